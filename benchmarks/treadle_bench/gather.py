"""`treadle bench gather`: rows of one table into a buffer, from Python: ours, Listing 1, the read-only pass, and what users have today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.client.engram.handle import EngramHandle
from treadle.contract import DataLoss, Deadline, Unavailable
from treadle.dataplane import DeadlineQueue
from treadle.kernels import calibrate_prefetch
from treadle_bench import _baselines
from treadle_bench.busy_core import busy_core
from treadle_bench.gather_goals import BUSY, GOAL_TOKENS, goals_of
from treadle_bench.gather_tables import PROFILES, SMALL, PagedTable, Profile, handle_on, tables
from treadle_bench.peers.engramdb import engramdb_fetcher
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.process import TableFile
from treadle_bench.peers.torch_rows import tensor_over
from treadle_bench.report import Goal, Row, interleave, rows_of
from treadle_bench.timing import Timed, on_fresh_sets, timed

TABLE_BYTES = 2_560_000_000  # far beyond any cache
TOKENS = (1, 16, 64, 256, 1024, 4096)
WARM_ROUNDS = 3
IDS_KEPT = 4_000_000  # row ids made beforehand: rows of 1.3 GB, so that a set comes again only when no cache holds it
ID_SETS_MIN = 16
PIECE_ROWS = 512  # of the two-thread gather: each worker takes the next piece when it has done one
BUSY_ROUNDS, BUSY_ROUNDS_QUICK = 2000, 200
WAIT_SECONDS = 10.0
TWO_THREADS = ", two threads"  # of a name, until the rows are made

Bytes: TypeAlias = NDArray[np.uint8]
Ids: TypeAlias = NDArray[np.int64]
Act = Callable[[int], object]
"""Gathers the set of ids with that number; what it returns is dropped."""


def measure(*, quick: bool, table_bytes: int = TABLE_BYTES) -> tuple[list[Row], list[Goal], list[str]]:
    """Every profile on 4 KiB and 2 MiB pages, and what could not be measured. Needs 2.5 GB of tmpfs twice over."""
    rows: list[Row] = []
    goals: list[Goal] = []
    notes: list[str] = []
    torch.set_num_threads(1)
    for profile in PROFILES[:1] if quick else PROFILES:
        with tables(profile, table_bytes // profile.row.bytes) as both:
            notes += [f"{profile.name}, {table.pages}: {_calibrated(table)}" for table in both]
            for tokens in (GOAL_TOKENS,) if quick else TOKENS:
                rounds = 60 if quick else max(100, min(600, 200_000 // tokens))
                rows += _measure_tokens(profile, both, tokens, rounds, notes)
            rows += _measure_busy(profile, both, BUSY_ROUNDS_QUICK if quick else BUSY_ROUNDS, notes)
        goals += goals_of([row for row in rows if row.params["rows"] == profile.name], profile.name)
    return rows, goals, list(dict.fromkeys(notes))


def _measure_tokens(profile: Profile, both: tuple[PagedTable, PagedTable], tokens: int, rounds: int, notes: list[str]) -> list[Row]:
    ids = _id_sets(profile, both[0], tokens)
    out = np.zeros((*ids.shape[1:], profile.row.bytes), dtype=np.uint8)
    with ExitStack() as stack:
        acts = stack.enter_context(_acts(profile, both, ids, out))
        sets = len(ids)
        count = len(acts) + 1
        variants: dict[str, Timed] = {
            name: on_fresh_sets(timed(act), place, count, sets) for place, (name, act) in enumerate(acts.items())
        }
        if tokens == GOAL_TOKENS:
            variants |= _engramdb(stack, both[1], profile, ids, notes, place=count - 1, count=count)
        for number in range(WARM_ROUNDS):
            for variant in variants.values():
                variant(number)
        samples = interleave(variants, rounds, seed=tokens, what=f"{profile.name}, {tokens} tokens")
    return _told_threads(rows_of(samples, {"rows": profile.name, "tokens": tokens}, "us", f"listing1 {SMALL}"))


@contextmanager
def _acts(profile: Profile, both: tuple[PagedTable, PagedTable], ids: Ids, out: Bytes) -> Iterator[dict[str, Act]]:
    """Everything that is called in this process, by name."""
    small, offsets = both[0].rows, ids * profile.row.bytes
    with ExitStack() as stack:
        acts: dict[str, Act] = {f"listing1 {SMALL}": partial(_listing1, small, offsets, out)}
        for table in both:
            handle = stack.enter_context(handle_on(profile, table.rows))
            queue = stack.enter_context(DeadlineQueue(workers=2, piece_rows=PIECE_ROWS))
            acts[f"mapped {table.pages}"] = partial(_mapped, handle, ids, out)
            acts[f"mapped {table.pages}{TWO_THREADS}"] = partial(_by_two, queue, table.rows, ids, out)
            acts[f"read-only {table.pages}"] = partial(_read_only, table.rows, ids)
            acts[f"np.take {table.pages}"] = partial(_take, table.rows, ids, out)
            acts[f"torch.index_select {table.pages}"] = partial(_index_select, tensor_over(table.rows), ids, tensor_over(out))
        yield acts


def _listing1(table: Bytes, offsets: Ids, out: Bytes, number: int) -> None:
    _baselines.listing1(table, offsets[number], table.shape[1], out, 1)


def _read_only(table: Bytes, ids: Ids, number: int) -> None:
    _baselines.read_only(table, ids[number], table.shape[1])


def _mapped(handle: EngramHandle, ids: Ids, out: Bytes, number: int) -> None:
    handle.gather(0, ids[number], out)


def _take(table: Bytes, ids: Ids, out: Bytes, number: int) -> None:
    np.take(table, ids[number], axis=0, out=out, mode="clip")


def _index_select(table: torch.Tensor, ids: Ids, out: torch.Tensor, number: int) -> None:
    torch.index_select(table, 0, torch.from_numpy(ids[number].reshape(-1)), out=out.view(-1, table.shape[1]))


def _by_two(queue: DeadlineQueue, table: Bytes, ids: Ids, out: Bytes, number: int) -> None:
    if not queue.submit_gather(table, ids[number], out, Deadline.after(1.0)).wait(WAIT_SECONDS):
        raise Unavailable(f"two threads did not gather {ids[number].size} rows within {WAIT_SECONDS:.0f} s")


def _measure_busy(profile: Profile, both: tuple[PagedTable, PagedTable], rounds: int, notes: list[str]) -> list[Row]:
    """The one-thread and the two-thread gather while one of the cores has other work to do."""
    ids = _id_sets(profile, both[0], GOAL_TOKENS)
    out = np.zeros((*ids.shape[1:], profile.row.bytes), dtype=np.uint8)
    with ExitStack() as stack:
        acts = stack.enter_context(_acts(profile, both, ids, out))
        chosen = {name: act for name, act in acts.items() if name.startswith("mapped")}
        try:
            stack.enter_context(busy_core())
        except Unavailable as error:
            notes.append(f"skipped: {error}")
            return []
        variants = {
            BUSY + name: on_fresh_sets(timed(act), place, len(chosen), len(ids)) for place, (name, act) in enumerate(chosen.items())
        }
        samples = interleave(variants, rounds, seed=1, what=f"{profile.name}, one core busy")
    return _told_threads(rows_of(samples, {"rows": profile.name, "tokens": GOAL_TOKENS}, "us", f"{BUSY}mapped {SMALL}"))


def _engramdb(
    stack: ExitStack, table: PagedTable, profile: Profile, ids: Ids, notes: list[str], *, place: int, count: int
) -> Mapping[str, Timed]:
    """engramdb over the file of `table`; nothing, with a note, where it cannot run."""
    if table.path is None:
        notes.append("skipped: engramdb: the table on 2 MiB pages is private memory here, no file; run as root")
        return {}
    try:
        wanted = IdSets(ids.reshape(-1, ids.shape[2]))
        peer = stack.enter_context(engramdb_fetcher(TableFile(table.path, 0, len(table.rows), profile.row.bytes), wanted))
    except Unavailable as error:
        notes.append(f"skipped: engramdb: {error}")
        return {}
    tokens = ids.shape[1]
    if not peer.fetches_rightly(wanted, 0, tokens):
        raise DataLoss("engramdb: its rows are not those of the file")
    fetch = on_fresh_sets(lambda number: peer.microseconds(wanted, number * tokens, tokens), place, count, len(ids))
    return {f"engramdb {table.pages}": fetch}


def _told_threads(rows: list[Row]) -> list[Row]:
    """The number of threads as a parameter instead of a part of the name."""
    return [
        replace(
            row,
            name=row.name.removesuffix(TWO_THREADS),
            params={**row.params, "threads": 2 if row.name.endswith(TWO_THREADS) else 1},
        )
        for row in rows
    ]


def _id_sets(profile: Profile, table: PagedTable, tokens: int) -> Ids:
    """[sets, tokens, columns]: uniform ids, the worst case for every cache."""
    columns = profile.rows_per_token
    sets = max(ID_SETS_MIN, IDS_KEPT // (tokens * columns))
    return np.random.default_rng(tokens).integers(0, len(table.rows), size=(sets, tokens, columns), dtype=np.int64)


def _calibrated(table: PagedTable) -> str:
    """What a calibration of the prefetch distance finds here; the figures are taken at the default."""
    try:
        found = calibrate_prefetch(table.rows, use=False)
    except Unavailable as error:
        return str(error)
    measured = ", ".join(f"{distance}: {us:.0f}" for distance, us in found.microseconds_by_distance.items())
    return f"prefetch {found.reason} (us of {found.rows} rows by distance: {measured or 'none'})"

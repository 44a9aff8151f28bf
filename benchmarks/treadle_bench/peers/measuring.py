"""Every peer on every table: opened, compared with the right bytes, then timed beside `np.take` over the same rows.

Calls in this process take turns round by round, all of them; a peer in a process of its own takes turns with `np.take` alone. Each
number of tokens has a share of the time and gets as many rounds as fit, so that a slow peer makes a run no longer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

import psutil

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import DataLoss, DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle.kernels.segment import Segment
from treadle_bench.peers import engramdb, listing1, lmdb, mooncake_store, numpy_rows, redis, service_ple, torch_rows, treadle_rows
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.layouts import LAYOUTS, QUICK_LAYOUTS, TOKEN_MAP, Layout
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Row, interleave, rows_of
from treadle_bench.timing import Timed, on_fresh_sets

PEERS: tuple[Peer, ...] = (
    *treadle_rows.PEERS, listing1.PEER, numpy_rows.PEER, torch_rows.PEER,
    engramdb.PEER, service_ple.PEER, redis.PEER, lmdb.PEER, mooncake_store.PEER,
)  # fmt: skip
OURS = tuple(peer.name for peer in treadle_rows.PEERS)
HERE = "calls in this process"
LEFT_OUT = (DeadlineExceeded, ResourceExhausted, Unavailable)  # what a fetcher may raise without ending the run
OVER = "the table's share of the run's time is over"
ROUNDS_MIN, ROUNDS_MAX = 3, 400
SETTLE_TOKENS = 64
FETCH_SECONDS_MAX = 0.5  # a peer that takes longer is not asked for more tokens: it would take the others' time
BYTES_BESIDE = 2 << 30  # of memory, for peers that copy rows, and for processes


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    seconds:        of each number of tokens, for the calls here and for each peer in a process of its own
    settle_seconds: of each fetcher before its first figure: a virtual machine's host gives new memory its final pages only after use
    """

    layouts: tuple[Layout, ...] = LAYOUTS
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
    seconds_here: float = 2.5
    seconds_apart: float = 0.7
    settle_seconds: float = 0.3
    copied_rows: int = 1_000_000
    table_bytes_max: int | None = None
    run_seconds_max: float = 450.0  # then no new figure is begun


QUICK = Extent(QUICK_LAYOUTS, (1, 256), 0.5, 0.25, 0.1, copied_rows=50_000, table_bytes_max=128_000_000, run_seconds_max=28.0)


@dataclass(slots=True)
class Findings:
    """What came out: rows, and notes on what did not. `until`: monotonic seconds, when no new figure of this table is begun."""

    until: float = 0.0
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note once."""
        if text not in self.notes:
            self.notes.append(text)


def chosen_peers(only: Sequence[str]) -> tuple[Peer, ...]:
    """The peers by name, all for none. Raises InvalidArgument listing the names."""
    unknown = set(only) - {peer.name for peer in PEERS}
    if unknown:
        raise InvalidArgument(f"no peer {sorted(unknown)}; there are {', '.join(peer.name for peer in PEERS)}")
    return tuple(peer for peer in PEERS if not only or peer.name in only)


def measure(extent: Extent, peers: Sequence[Peer] = PEERS) -> Findings:
    """Measure. Raises DataLoss if rows of our own are wrong."""
    findings, begun = Findings(), time.monotonic()
    for place, layout in enumerate(extent.layouts, 1):
        findings.until = begun + extent.run_seconds_max * place / len(extent.layouts)  # what one table leaves over goes to the next
        try:
            with held_table(layout, extent) as held:
                _measure_here(held, extent, [peer for peer in peers if peer.in_process], findings)
                for peer in peers:
                    if not peer.in_process:
                        _measure_apart(held, extent, peer, findings)
        except ResourceExhausted as error:
            findings.note(f"skipped: {layout.model}: {error}")
    return findings


@contextmanager
def held_table(layout: Layout, extent: Extent) -> Iterator[Held]:
    """A pool that holds the table, and the table mapped here."""
    template = layout.template(extent.table_bytes_max)
    table_bytes = template.rows_hashed(0) * layout.row.bytes
    needed = 2 * table_bytes + BYTES_BESIDE  # the pool's copy and the private one of `local`
    free = min(psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free)
    if free < needed:
        raise ResourceExhausted(f"its table needs {needed / 1e9:.1f} GB of memory and /dev/shm, {free / 1e9:.1f} are free")
    with pool_process() as process, EngramPool(Endpoint(process.address, timeout_seconds=60.0)) as pool:
        pool.load_random(template, TOKEN_MAP, seed=1)
        place = pool.describe(template.name).segments[0]
        with Segment(place.path) as segment:
            segment.populate()
            copied = min(extent.copied_rows, len(segment.rows))
            yield Held(
                layout,
                segment.rows,
                place.path,
                place.rows_offset_bytes,
                process.address,
                template.name,
                copied,
                f"{segment.page_bytes() >> 10}KiB",
            )


def _measure_here(held: Held, extent: Extent, peers: Sequence[Peer], findings: Findings) -> None:
    if not peers:
        return
    with ExitStack() as stack:
        fetchers: list[Fetcher] = [numpy_rows.take(held)]
        for peer in peers:
            fetchers += _opened(stack, peer, held, findings)
        _measure(held, fetchers, extent, extent.seconds_here, findings, HERE)


def _measure_apart(held: Held, extent: Extent, peer: Peer, findings: Findings) -> None:
    if time.monotonic() > findings.until:
        findings.note(f"skipped: {peer.name}, {held.layout.model}: {OVER}; --only {peer.name} measures it")
        return
    with ExitStack() as stack:
        fetchers = _opened(stack, peer, held, findings)
        if fetchers:
            _measure(held, [numpy_rows.take(held), *fetchers], extent, extent.seconds_apart, findings, peer.name)


def _opened(stack: ExitStack, peer: Peer, held: Held, findings: Findings) -> Sequence[Fetcher]:
    try:
        return stack.enter_context(peer.open(held))
    except (InvalidArgument, NotFound, *LEFT_OUT) as error:
        findings.note(f"skipped: {peer.name}: {error}. To have it: {peer.get}")
        return ()


def _measure(held: Held, fetchers: Sequence[Fetcher], extent: Extent, seconds: float, findings: Findings, group: str) -> None:
    """One row for each fetcher and number of tokens; the first fetcher is the baseline."""
    table_rows = min(fetcher.table_rows for fetcher in fetchers)
    ids = held.id_sets(table_rows)
    params = {"model": held.layout.model, "rows": held.layout.name, "table_rows": table_rows}
    if group != HERE:
        params["beside"] = group
    try:
        left = [fetcher for fetcher in fetchers if _settles(fetcher, ids, extent.settle_seconds, findings, held)]
        for tokens in extent.tokens:
            left = [fetcher for fetcher in left if _answers(fetcher, ids, tokens, findings, held)]
            if len(left) < 2:
                return
            if time.monotonic() > findings.until:
                findings.note(f"skipped: {group}, {held.layout.model}, {tokens} tokens and more: {OVER}")
                return
            samples = _samples(left, ids, tokens, seconds, f"{held.layout.title}, {tokens} tokens, {group}")
            pages = {fetcher.name: {"pages": fetcher.pages} if fetcher.pages else {} for fetcher in left}
            rows = rows_of(samples, {**params, "tokens": tokens}, "us", left[0].name)
            findings.rows += [replace(row, params={**row.params, **pages[row.name]}) for row in rows]
            left = [fetcher for fetcher in left if _may_go_on(fetcher, samples[fetcher.name], tokens, findings, held)]
    except LEFT_OUT as error:
        findings.note(f"stopped: {group}, {held.layout.model}: {error}")


def _samples(fetchers: Sequence[Fetcher], ids: IdSets, tokens: int, seconds: float, what: str) -> dict[str, list[float]]:
    """Microseconds of each, taking turns for about so many seconds."""
    variants = {
        fetcher.name: on_fresh_sets(_by_set(fetcher, ids, tokens), place, len(fetchers), ids.sets(tokens))
        for place, fetcher in enumerate(fetchers)
    }
    one_round = sum(act(0) for act in variants.values()) / 1e6
    return interleave(variants, max(ROUNDS_MIN, min(ROUNDS_MAX, int(seconds / one_round))), seed=tokens, what=what)


def _may_go_on(fetcher: Fetcher, samples: Sequence[float], tokens: int, findings: Findings, held: Held) -> bool:
    """False, with a note, for one that took so long that more tokens would take the others' time."""
    seconds = min(samples) / 1e6
    if seconds > FETCH_SECONDS_MAX:
        findings.note(
            f"{fetcher.name}, {held.layout.model}: takes {seconds:.1f} s for {tokens} tokens, so it was not asked for more"
        )
    return seconds <= FETCH_SECONDS_MAX


def _settles(fetcher: Fetcher, ids: IdSets, seconds: float, findings: Findings, held: Held) -> bool:
    """True once it has fetched for so long."""
    until, number = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < until:
            _by_set(fetcher, ids, SETTLE_TOKENS)(number % ids.sets(SETTLE_TOKENS))
            number += 1
    except LEFT_OUT as error:
        findings.note(f"not timed: {fetcher.name}, {held.layout.model}: {error}")
        return False
    return True


def _answers(fetcher: Fetcher, ids: IdSets, tokens: int, findings: Findings, held: Held) -> bool:
    """True if its rows are right. Raises DataLoss where ours are not."""
    try:
        right = fetcher.fetches_rightly(ids, 0, tokens)
    except LEFT_OUT as error:
        findings.note(f"not timed: {fetcher.name}, {held.layout.model}, {tokens} tokens: {error}")
        return False
    if not right:
        if fetcher.name in OURS:
            raise DataLoss(f"{fetcher.name}: wrong rows of {held.layout.model}, {tokens} tokens")
        findings.note(f"not timed: {fetcher.name}, {held.layout.model}, {tokens} tokens: it gives WRONG ROWS")
    return right


def _by_set(fetcher: Fetcher, ids: IdSets, tokens: int) -> Timed:
    return lambda number: fetcher.microseconds(ids, number * tokens, tokens)

"""`treadle bench gather`: rows of one table into a buffer, from Python, against Listing 1 and the read-only pass."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.sources import TableSource, private_copy
from treadle.contract import EngramModel, RowLayout, Scale, Table, Transport
from treadle.contract.families import demo_model
from treadle.kernels.segment import Segment
from treadle.kernels.segment_writer import SegmentWriter
from treadle_bench import _baselines
from treadle_bench.report import Goal, Row, interleave, rows_of

TABLE_BYTES = 2_560_000_000  # far beyond any cache
TOKENS = (1, 16, 64, 256, 1024, 4096)
FILL_BYTES = 16 << 20
WARM_ROUNDS = 3
SETTLE_SECONDS, SETTLE_IDS = 3.0, 1_000_000
IDS_KEPT = 4_000_000  # row ids made beforehand: rows of 1.3 GB, so that a set comes again only when no cache holds it
ID_SETS_MIN = 16


@dataclass(frozen=True, slots=True)
class Profile:
    """A row layout that models use."""

    name: str
    row: RowLayout
    rows_per_token: int


PROFILES = (
    Profile("16x320", RowLayout(320, 160, "bf16"), 16),
    Profile("24x264", RowLayout(264, 256, "fp8_e4m3", Scale("ue8m0", 32)), 24),
)


def measure(*, quick: bool, table_bytes: int = TABLE_BYTES) -> tuple[list[Row], list[Goal]]:
    """Every profile on 4 KiB and 2 MiB pages. Needs 2.5 GB of tmpfs twice over, one after the other."""
    rows: list[Row] = []
    goals: list[Goal] = []
    for profile in PROFILES[:1] if quick else PROFILES:
        table_rows = table_bytes // profile.row.bytes
        with _tables(profile, table_rows) as tables:
            for table in tables.values():
                _settle(table, profile.row.bytes)
            for tokens in (256,) if quick else TOKENS:
                rows += _measure_tokens(
                    profile, tables, table_rows, tokens, rounds=60 if quick else max(100, min(600, 200_000 // tokens))
                )
    for profile in PROFILES[:1] if quick else PROFILES:
        goals += _goals(rows, profile.name)
    return rows, goals


def _settle(table: NDArray[np.uint8], row_bytes: int) -> None:
    """Read the table at random for a while, untimed: a virtual machine's host gives new memory its final pages only after use."""
    ids = np.random.default_rng(0).integers(0, len(table), size=SETTLE_IDS, dtype=np.int64)
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        _baselines.read_only(table, ids, row_bytes)


def _measure_tokens(profile: Profile, tables: dict[str, NDArray[np.uint8]], table_rows: int, tokens: int, rounds: int) -> list[Row]:
    columns, row_bytes = profile.rows_per_token, profile.row.bytes
    sets = max(ID_SETS_MIN, IDS_KEPT // (tokens * columns))
    ids = np.random.default_rng(tokens).integers(0, table_rows, size=(sets, tokens, columns), dtype=np.int64)
    offsets = ids * row_bytes
    out = np.zeros((tokens, columns, row_bytes), dtype=np.uint8)
    small = tables["4KiB"]
    handles = {pages: _handle(profile, table, table_rows) for pages, table in tables.items()}
    acts: dict[str, Callable[[int], object]] = {
        "listing1 4KiB": lambda n: _baselines.listing1(small, offsets[n], row_bytes, out, 1),
        "np.take 4KiB": lambda n: np.take(small, ids[n], axis=0, out=out, mode="clip"),
    }
    for pages, handle in handles.items():
        acts[f"mapped {pages}"] = partial(_gather, handle, ids, out)
        acts[f"read-only {pages}"] = partial(_read_only, tables[pages], ids, row_bytes)
    variants = {name: _timed(act, place, len(acts), sets) for place, (name, act) in enumerate(acts.items())}
    for number in range(WARM_ROUNDS):
        for act in variants.values():
            act(number)
    samples = interleave(variants, rounds, seed=tokens, what=f"{profile.name}, {tokens} tokens")
    for handle in handles.values():
        handle.close()
    params = {"rows": profile.name, "tokens": tokens, "threads": 1}
    return rows_of(samples, params, "us", "listing1 4KiB")


def _timed(act: Callable[[int], object], place: int, variants: int, sets: int) -> Callable[[int], float]:
    """Microseconds of `act` on a set of ids that no other variant has just used, so that no cache holds its rows."""

    def run(number: int) -> float:
        chosen = (number * variants + place) % sets
        begun = time.perf_counter_ns()
        act(chosen)
        return (time.perf_counter_ns() - begun) / 1e3

    return run


def _gather(handle: EngramHandle, ids: NDArray[np.int64], out: NDArray[np.uint8], number: int) -> None:
    handle.gather(0, ids[number], out)


def _read_only(table: NDArray[np.uint8], ids: NDArray[np.int64], row_bytes: int, number: int) -> None:
    _baselines.read_only(table, ids[number], row_bytes)


def _handle(profile: Profile, table: NDArray[np.uint8], table_rows: int) -> EngramHandle:
    """The SDK's own handle over one table, as `mapped` gives it."""
    model = _model(profile, table_rows)
    return EngramHandle(model, model.version, TableSource(Transport.MAPPED, model, {0: table}, np.zeros(1, dtype=np.int32)))


def _model(profile: Profile, table_rows: int) -> EngramModel:
    digest = hashlib.sha256(np.zeros(1, dtype="<i4").tobytes()).hexdigest()
    orders = tuple(range(2, 2 + profile.rows_per_token // 8))
    template = demo_model(
        "bench",
        layers=(0,),
        token_map=digest,
        compressed_vocab_size=1,
        pad_id=0,
        prime_base=min(20_000, table_rows // (2 * profile.rows_per_token)),
        orders=orders,
        row=profile.row,
    )
    return template.with_tables({0: Table(table_rows, "0" * 64)})


@contextmanager
def _tables(profile: Profile, table_rows: int) -> Iterator[dict[str, NDArray[np.uint8]]]:
    """The same rows on 4 KiB pages (tmpfs) and on 2 MiB pages (tmpfs huge=always for root; else a private copy)."""
    small_dir = Path(tempfile.mkdtemp(prefix="treadle-bench-", dir="/dev/shm"))
    try:
        small = _write(small_dir / "table.safetensors", profile, table_rows)
        with Segment(small) as segment, _huge(segment.rows, profile, table_rows) as (label, huge):
            segment.populate()  # as a mapped handle does
            yield {"4KiB": segment.rows, label: huge}
    finally:
        shutil.rmtree(small_dir)


@contextmanager
def _huge(rows: NDArray[np.uint8], profile: Profile, table_rows: int) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    mount = Path(tempfile.mkdtemp(prefix="treadle-bench-huge-"))
    mounted = (
        os.geteuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "huge=always,size=90%", "treadle-bench", str(mount)], capture_output=True, check=False
        ).returncode
        == 0
    )
    try:
        if not mounted:
            yield "2MiB private", private_copy(rows)
            return
        path = _write(mount / "table.safetensors", profile, table_rows)
        with Segment(path) as segment:
            segment.populate()
            pages = segment.page_bytes()
            yield f"{pages >> 20}MiB tmpfs" if pages >= 1 << 20 else f"{pages >> 10}KiB tmpfs (huge=always refused)", segment.rows
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(mount)], check=True)  # arrays may still be on their way out
        mount.rmdir()


def _write(path: Path, profile: Profile, table_rows: int) -> Path:
    """A segment of seeded rows: one block of random bytes, written over and over (the gather never compares them)."""
    block = np.frombuffer(np.random.default_rng(0).bytes(FILL_BYTES // profile.row.bytes * profile.row.bytes), dtype=np.uint8)
    block = block.reshape(-1, profile.row.bytes)
    with SegmentWriter(path, rows=table_rows, row_bytes=profile.row.bytes) as writer:
        for start in range(0, table_rows, len(block)):
            writer.append(block[: min(len(block), table_rows - start)])
        writer.publish({"schema": "treadle.segment/1"})
    return path


def _goals(rows: list[Row], profile: str) -> list[Goal]:
    mine = {row.name: row for row in rows if row.params["rows"] == profile and row.params["tokens"] == 256}
    goals = []
    for name, row in mine.items():
        if not name.startswith("mapped") or row.ratio is None or row.p99_ratio is None:
            continue
        pages = name.removeprefix("mapped ")
        goals.append(Goal(f"{profile}, 256 tokens, {name} / listing1 4KiB", row.ratio, 0.90 if pages == "4KiB" else 0.65))
        goals.append(
            Goal(f"{profile}, 256 tokens, {name} / read-only {pages}", row.median / mine[f"read-only {pages}"].median, 1.5)
        )
        goals.append(Goal(f"{profile}, 256 tokens, p99 of {name} / p99 of listing1", row.p99_ratio, 1.1))
    return goals

"""The tables that `treadle bench gather` reads: the same rows on 4 KiB and on 2 MiB pages, in the layouts that models use.

Owns their files and mounts. What is measured over them is `gather`'s.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from treadle_bench.pool_process import huge_mount

SMALL = "4KiB"  # the label of the table on base pages
FILL_BYTES = 16 << 20
SETTLE_SECONDS, SETTLE_IDS = 3.0, 1_000_000


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


@dataclass(frozen=True, slots=True)
class PagedTable:
    """A table and what it lies on. path: its file; None for a private copy."""

    pages: str
    rows: NDArray[np.uint8]
    path: Path | None


@contextmanager
def tables(profile: Profile, table_rows: int) -> Iterator[tuple[PagedTable, PagedTable]]:
    """The same rows on 4 KiB pages (tmpfs) and on 2 MiB pages (tmpfs huge=always for root; else a private copy), settled."""
    small_dir = Path(tempfile.mkdtemp(prefix="treadle-bench-", dir="/dev/shm"))
    try:
        path = _write(small_dir / "table.safetensors", profile, table_rows)
        with Segment(path) as segment, _huge(segment.rows, profile, table_rows) as huge:
            segment.populate()  # as a mapped handle does
            small = PagedTable(SMALL, segment.rows, path)
            for table in (small, huge):
                _settle(table.rows, profile.row.bytes)
            yield small, huge
    finally:
        shutil.rmtree(small_dir)


def handle_on(profile: Profile, table: NDArray[np.uint8]) -> EngramHandle:
    """The SDK's own handle over one table, as `mapped` gives it."""
    model = _model(profile, len(table))
    return EngramHandle(model, model.version, TableSource(Transport.MAPPED, model, {0: table}, np.zeros(1, dtype=np.int32)))


@contextmanager
def _huge(rows: NDArray[np.uint8], profile: Profile, table_rows: int) -> Iterator[PagedTable]:
    with huge_mount() as mount:
        if mount is None:
            yield PagedTable("2MiB private", private_copy(rows), None)
            return
        path = _write(mount / "table.safetensors", profile, table_rows)
        with Segment(path) as segment:
            segment.populate()
            pages = segment.page_bytes()
            label = f"{pages >> 20}MiB tmpfs" if pages >= 1 << 20 else f"{pages >> 10}KiB tmpfs (huge=always refused)"
            yield PagedTable(label, segment.rows, path)


def _settle(table: NDArray[np.uint8], row_bytes: int) -> None:
    """Read the table at random for a while, untimed: a virtual machine's host gives new memory its final pages only after use."""
    ids = np.random.default_rng(0).integers(0, len(table), size=SETTLE_IDS, dtype=np.int64)
    end = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < end:
        _baselines.read_only(table, ids, row_bytes)


def _write(path: Path, profile: Profile, table_rows: int) -> Path:
    """A segment of seeded rows: one block of random bytes, written over and over (the gather never compares them)."""
    block = np.frombuffer(np.random.default_rng(0).bytes(FILL_BYTES // profile.row.bytes * profile.row.bytes), dtype=np.uint8)
    block = block.reshape(-1, profile.row.bytes)
    with SegmentWriter(path, rows=table_rows, row_bytes=profile.row.bytes) as writer:
        for start in range(0, table_rows, len(block)):
            writer.append(block[: min(len(block), table_rows - start)])
        writer.publish({"schema": "treadle.segment/1"})
    return path


def _model(profile: Profile, table_rows: int) -> EngramModel:
    digest = hashlib.sha256(np.zeros(1, dtype="<i4").tobytes()).hexdigest()
    template = demo_model(
        "bench",
        layers=(0,),
        token_map=digest,
        compressed_vocab_size=1,
        pad_id=0,
        prime_base=min(20_000, table_rows // (2 * profile.rows_per_token)),
        orders=tuple(range(2, 2 + profile.rows_per_token // 8)),
        row=profile.row,
    )
    return template.with_tables({0: Table(table_rows, "0" * 64)})

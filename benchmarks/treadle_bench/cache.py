"""`treadle bench cache`: what the hot-row cache finds and saves before a table on a disk, for made-up traces and for real text."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, NotFound, TreadleError, Windows
from treadle.contract.families import deepseek_v41_model
from treadle.dataplane import DeadlineQueue
from treadle.dataplane.disk import DiskReaders, disk_rows
from treadle.dataplane.hot_rows import HotRows, HotRowsReader
from treadle.kernels import HashPlan, row_ids
from treadle_bench.grow.other_texts import texts_folder
from treadle_bench.report import Goal, Row, interleave, rows_of

ROW_BYTES, COLUMNS, TOKENS = 264, 24, 256
BATCH_ROWS = COLUMNS * TOKENS
TABLE_ROWS, TABLE_ROWS_QUICK = 8_000_000, 800_000
CACHE_BYTES, CACHE_BYTES_QUICK = 84 << 20, 8 << 20
WARM_BATCHES, BATCHES, WARM_BATCHES_QUICK, BATCHES_QUICK = 400, 200, 40, 20
PROBE_GOAL_NS = 60.0
TEXT_BYTES = 8 << 20  # of the trace: more tokens than the batches need
VERSION, LAYER, WAIT_SECONDS = "ab" * 32, 1, 30.0
Trace = NDArray[np.int64]  # [batches, BATCH_ROWS]


def measure(*, quick: bool, texts: Path | None, tokenizer: Path | None) -> tuple[list[Row], list[Goal]]:
    """Microseconds of a batch of 256 tokens x 24 rows with and without the cache, its hit rate, and what a probe takes."""
    table_rows, cache_bytes = (TABLE_ROWS_QUICK, CACHE_BYTES_QUICK) if quick else (TABLE_ROWS, CACHE_BYTES)
    warm, batches = (WARM_BATCHES_QUICK, BATCHES_QUICK) if quick else (WARM_BATCHES, BATCHES)
    rows = _probe_rows(cache_bytes, rounds=50 if quick else 500)
    goals = [Goal("a probe that finds its row, ns", rows[0].median, PROBE_GOAL_NS)]
    with _table_on_disk(table_rows) as descriptor, DeadlineQueue(workers=1, implementation="native") as queue:
        for name, trace in _traces(table_rows, warm + batches, texts, tokenizer):
            rows += _trace_rows(queue, descriptor, table_rows, cache_bytes, name, trace, warm)
    return rows, goals


def fetched_tokenizer() -> Path | None:
    """SmolLM2's; None, said on standard error, where it cannot be had."""
    from treadle.nn.model_fetch import fetch

    try:
        return fetch("smollm2-135m") / "tokenizer.json"
    except TreadleError as error:
        sys.stderr.write(f"cache: {error}\n")
        return None


def _probe_rows(cache_bytes: int, rounds: int) -> list[Row]:
    """Rows that are all there, as another process looks for them."""
    hot, chance = HotRows(ROW_BYTES, cache_bytes), np.random.default_rng(0)
    ids = np.arange(hot.stats()["rows_max"] // 2)
    hot.insert(VERSION, LAYER, ids, chance.integers(0, 256, (ids.size, ROW_BYTES), dtype=np.uint8))
    reader, out = HotRowsReader(hot.descriptor), np.empty((BATCH_ROWS, ROW_BYTES), np.uint8)
    table = reader.table(VERSION, LAYER)
    assert table is not None, "rows were put in"
    misses = reader.probe(table, ids, np.empty((ids.size, ROW_BYTES), np.uint8))
    there = np.setdiff1d(ids, misses)
    wanted = [chance.choice(there, BATCH_ROWS) for _ in range(16)]

    def probe(number: int) -> float:
        begun = time.perf_counter_ns()
        missed = reader.probe(table, wanted[number % len(wanted)], out)
        took = time.perf_counter_ns() - begun
        assert not missed.size, "rows that are there are found"
        return took / BATCH_ROWS

    return rows_of(
        interleave({"probe": probe}, rounds),
        {"rows": BATCH_ROWS, "row_bytes": ROW_BYTES, "cache_MiB": cache_bytes >> 20},
        "ns",
        "probe",
    )


def _trace_rows(
    queue: DeadlineQueue, descriptor: int, table_rows: int, cache_bytes: int, name: str, trace: Trace, warm: int
) -> list[Row]:
    disk = disk_rows(descriptor, 0, table_rows, ROW_BYTES, DiskReaders())
    hot, out = HotRows(ROW_BYTES, cache_bytes), np.empty((BATCH_ROWS, ROW_BYTES), np.uint8)
    cached = hot.behind(VERSION, LAYER, disk)

    def act(store: object) -> Callable[[int], float]:
        def run(number: int) -> float:
            begun = time.perf_counter_ns()
            assert queue.submit_gather(store, trace[number], out, Deadline.after(1.0)).wait(WAIT_SECONDS)  # type: ignore[arg-type]  # any of three kinds of store
            return (time.perf_counter_ns() - begun) / 1e3

        return run

    with_cache = act(cached)
    for number in range(warm):
        with_cache(number)
    before = hot.stats()
    without = act(disk)
    measured = interleave(
        {"without": lambda number: without(warm + number), "with": lambda number: with_cache(warm + number)},
        len(trace) - warm, what=name,
    )  # fmt: skip
    after = hot.stats()
    hits, misses = (after[f"{kind}_total"] - before[f"{kind}_total"] for kind in ("hits", "misses"))
    params = {
        "trace": name,
        "hit_rate": round(hits / max(1, hits + misses), 3),
        "cache_MiB": cache_bytes >> 20,
        "table_MiB": table_rows * ROW_BYTES >> 20,
    }
    return rows_of(measured, params, "us", "without")


def _traces(table_rows: int, batches: int, texts: Path | None, tokenizer: Path | None) -> Iterator[tuple[str, Trace]]:
    chance = np.random.default_rng(1)
    yield "uniform", chance.integers(0, table_rows, (batches, BATCH_ROWS))
    for exponent in (1.05, 1.2):
        yield f"zipf {exponent}", _zipf(chance, exponent, table_rows, batches * BATCH_ROWS).reshape(batches, BATCH_ROWS)
    if tokenizer is None or not tokenizer.exists():
        sys.stderr.write(f"cache: the text trace is skipped for want of a tokenizer ({tokenizer}): give --tokenizer FILE\n")
        return
    try:
        folder = texts_folder(texts)
    except NotFound as error:
        sys.stderr.write(f"cache: the text trace is skipped: {error}\n")
        return
    yield "text", _text_trace(folder, tokenizer, table_rows, batches)


def _zipf(chance: np.random.Generator, exponent: float, count: int, draws: int) -> NDArray[np.int64]:
    """Row of rank r with a probability of r^-exponent, ranks spread over the table by a permutation."""
    weights = np.cumsum(np.arange(1, count + 1, dtype=np.float64) ** -exponent)
    ranks = np.searchsorted(weights, chance.random(draws) * weights[-1])
    rows: NDArray[np.int64] = chance.permutation(count)[np.minimum(ranks, count - 1)]
    return rows


def _text_trace(folder: Path, tokenizer: Path, table_rows: int, batches: int) -> Trace:
    """Books, one after the other, through SmolLM2's tokenizer and the hash of V4.1 with its token map."""
    from tokenizers import Tokenizer

    from treadle.nn.token_map import compressed_token_map

    token_map, compressed = compressed_token_map(tokenizer)[:2]
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    model = deepseek_v41_model(
        "trace",
        token_map=digest,
        compressed_vocab_size=compressed,
        pad_id=0,
        layers=(LAYER,),
        prime_base=table_rows // COLUMNS - 200,
    )
    text = "".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.txt")))[:TEXT_BYTES]
    ids = np.array(
        Tokenizer.from_file(str(tokenizer)).encode(text, add_special_tokens=False).ids[: batches * TOKENS], dtype=np.int64
    )
    if len(ids) < batches * TOKENS:
        raise ValueError(f"{folder}: {len(ids)} tokens of text, {batches * TOKENS} are needed")
    windows = Windows(tokens=ids, starts=np.array([0, len(ids)], np.int32), lookback=np.full((1, model.order_max - 1), -1))
    rows = row_ids(HashPlan.from_model(model, LAYER, token_map), windows)
    assert int(rows.max()) < table_rows, "the hash stays within the table"
    return rows.reshape(batches, BATCH_ROWS)


@contextmanager
def _table_on_disk(table_rows: int) -> Iterator[int]:
    """A file of seeded bytes below the folder for temporary files, its pages dropped: what is read is read from the disk first."""
    with tempfile.TemporaryFile(prefix="treadle-bench-") as file:
        block = np.random.default_rng(0).bytes(1 << 24)
        left = table_rows * ROW_BYTES
        while left > 0:
            left -= file.write(block[: min(left, len(block))])
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        yield file.fileno()

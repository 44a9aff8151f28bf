"""`treadle bench load`: tables into shared memory, random and from a DeepSeek-V4.1-like checkpoint, with the memory it takes."""

from __future__ import annotations

import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import EngramModel, RowLayout
from treadle.contract.families import deepseek_v41_model, demo_model
from treadle_bench.pool_process import PoolProcess, pool_process
from treadle_bench.report import Goal, Row, rows_of

TABLE_BYTES = 1_500_000_000
ANONYMOUS_BYTES_MAX = 256 << 20
SAMPLE_SECONDS = 0.02
TOKEN_MAP = np.arange(1000, dtype=np.int32)
GIGABYTE = 1e9


def measure(*, quick: bool, table_bytes: int = TABLE_BYTES) -> tuple[list[Row], list[Goal]]:
    """GB/s of payload, and the most anonymous memory that the pool's process took meanwhile."""
    digest = hashlib.sha256(TOKEN_MAP.astype("<i4").tobytes()).hexdigest()
    rounds = 1 if quick else 3
    with (
        pool_process() as process,
        EngramPool(Endpoint(process.address)) as pool,
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
    ):
        made_up, real = _demo(digest, table_bytes), _v41(digest, table_bytes)
        checkpoint = _write_checkpoint(Path(folder), real)
        samples: dict[str, list[float]] = {"copy to tmpfs": [], "random": [], "checkpoint": []}
        peaks = []
        for number in range(rounds):
            samples["copy to tmpfs"].append(_copy_rate(checkpoint, Path(folder) / "copy"))
            for name, model, load in (
                ("random", made_up, lambda n=number: pool.load_random(made_up, TOKEN_MAP, seed=n)),
                ("checkpoint", real, lambda: pool.load_checkpoint(checkpoint, real, TOKEN_MAP)),
            ):
                rate, peak = _timed_load(process, model, load)
                samples[name].append(rate)
                peaks.append(peak)
                pool.remove(model.name)
    rows = rows_of(samples, {"bytes": table_bytes}, "GB/s", "copy to tmpfs")
    slowest = min(row.median for row in rows if row.name != "copy to tmpfs")
    return rows, [
        Goal("slowest load, GB/s", slowest, 0.5, at_least=True),
        Goal("anonymous memory of the pool, MiB", max(peaks) / (1 << 20), ANONYMOUS_BYTES_MAX / (1 << 20)),
    ]


def _timed_load(process: PoolProcess, model: EngramModel, load: Callable[[], object]) -> tuple[float, int]:
    ended, peak = threading.Event(), [0]

    def sample() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            peak[0] = max(peak[0], _anonymous_bytes(process.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    begun = time.perf_counter()
    load()
    seconds = time.perf_counter() - begun
    ended.set()
    sampler.join()
    payload = sum(model.rows_hashed(layer) for layer in model.layers) * model.row.bytes
    return payload / seconds / GIGABYTE, peak[0]


def _anonymous_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def _copy_rate(source: Path, target: Path) -> float:
    """What one plain copy of the same file costs: read, write, nothing checked."""
    begun = time.perf_counter()
    with source.open("rb") as read, target.open("wb") as write:
        while block := read.read(4 << 20):
            write.write(block)
    seconds = time.perf_counter() - begun
    size = target.stat().st_size
    target.unlink()
    return size / seconds / GIGABYTE


def _demo(digest: str, table_bytes: int) -> EngramModel:
    return demo_model(
        "bench-random", layers=(2,), token_map=digest, compressed_vocab_size=1000, pad_id=2, prime_base=table_bytes // 320 // 16,
        row=RowLayout(320, 160, "bf16"),
    )  # fmt: skip


def _v41(digest: str, table_bytes: int) -> EngramModel:
    return deepseek_v41_model(
        "bench-v41", token_map=digest, pad_id=2, compressed_vocab_size=1000, layers=(1,), prime_base=table_bytes // 264 // 24
    )


def _write_checkpoint(folder: Path, model: EngramModel) -> Path:
    """A safetensors file with the two tensors of one DeepSeek-V4.1 Engram layer, written block by block."""
    rows, path = model.rows_hashed(1), folder / "model.safetensors"
    values, scales = rows * 256, rows * 8
    header = json.dumps({
        "model.layers.1.engram.embed.weight": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, values]},
        "model.layers.1.engram.embed.scale": {"dtype": "F8_E8M0", "shape": [rows, 8], "data_offsets": [values, values + scales]},
    }).encode()  # fmt: skip
    block = np.random.default_rng(0).integers(0, 120, size=8 << 20, dtype=np.uint8).tobytes()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        left = values + scales
        while left:
            left -= file.write(block[:left])
    return path

"""A load takes little anonymous memory, whatever its size."""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import EngramModel, Fusion
from treadle.contract.families import deepseek_v41_model, qwen_ple_model

if TYPE_CHECKING:
    from tests.conftest import StartPool

ANONYMOUS_BYTES_MAX = 256 << 20
SAMPLE_SECONDS = 0.005


@contextmanager
def peak_anonymous_bytes(pid: int) -> Iterator[list[int]]:
    """Samples RssAnon of a process until the block ends; the list holds the largest."""
    peak, done = [0], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_SECONDS):
            text = Path(f"/proc/{pid}/status").read_text()
            peak[0] = max(peak[0], int(text.split("RssAnon:")[1].split()[0]) * 1024)

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()


def sparse_checkpoint(folder: Path, model: EngramModel, vocabulary: int) -> Path:
    """A V4.1 checkpoint of zeros that takes no room on disk."""
    folder.mkdir()
    (layer,), rows = model.layers, model.rows_hashed(model.layers[0])
    header = {
        f"layers.{layer}.engram.embed.weight": {"dtype": "F8_E4M3", "shape": [rows, 256], "data_offsets": [0, rows * 256]},
        f"layers.{layer}.engram.embed.scale": {"dtype": "F8_E8M0", "shape": [rows, 8], "data_offsets": [rows * 256, rows * 264]},
    }
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + rows * 264)
    config = {
        "engram_layer_ids": [layer], "engram_num_embeddings": rows, "engram_max_ngram_size": 4, "engram_n_heads": 8,
        "engram_head_dim": 256, "engram_compressed_vocab_size": vocabulary, "engram_pad_token_id": 2, "engram_vocab_size": 100_000,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("source", ["checkpoint", "random"])
def test_a_load_of_600_megabytes_stays_far_below_256_mebibytes_of_anonymous_memory(
    start_pool: StartPool, shm_folder: Path, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32], source: str
) -> None:
    model = deepseek_v41_model(
        "big", token_map=str(demo.token_map), compressed_vocab_size=400, pad_id=2, layers=(1,), prime_base=100_000
    )
    ple = qwen_ple_model("big", prime_base=120_000, row=replace(model.row, bytes=320, dim=160, dtype="bf16", scale=None))
    with start_pool(shm_folder, "--keep-segments", "false") as process:
        with peak_anonymous_bytes(process.child.pid) as peak:
            if source == "checkpoint":
                folder = sparse_checkpoint(tmp_path / "big", model, 400)
                loaded = process.fabric.engram.load_checkpoint(folder, token_map=token_map)
                assert loaded.model.template == replace(model, fusion=Fusion("v4.1"))
            else:
                loaded = process.fabric.engram.load_random(ple)
        assert loaded.segment_bytes > 600_000_000
        assert 0 < peak[0] < ANONYMOUS_BYTES_MAX, f"{peak[0] >> 20} MiB"
        process.stop()

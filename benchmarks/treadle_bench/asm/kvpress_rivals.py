"""KVzip and SnapKV by kvpress, in an environment and a process of their own: which keys of a prefix each of them keeps.

Owns that process and the plain model folder that it reads. What is kept is then answered from by the same forward as everything else
(`compact_kv`). KVzip: arXiv 2505.23416, every layer and head with the same share of keys in all; SnapKV: arXiv 2404.14469, which sees the
prefix's last 64 tokens in place of a question.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from treadle.contract.errors import Unavailable
from treadle_bench.asm.tasks import Tokens
from treadle_bench.own_venv import interpreter_with

KVPRESS = ("kvpress==0.5.5", "cachetools==5.5.2", "transformers==5.2.0", "huggingface_hub==1.4.1", "tokenizers==0.22.2")
SCRIPT = Path(__file__).with_name("kvpress_script.py")
SECONDS_MAX = 1800  # for all presses of one prefix
SNAPKV_TOKENS_MIN = 65  # it keeps its window of 64 and one more
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")  # no chat template among them


@dataclass(frozen=True, slots=True, eq=False)
class Pressed:
    """kept: bool [layers, KV, tokens]; cpu_seconds: what choosing took."""

    kept: Tensor
    cpu_seconds: float


def press(model: Path, prefix: Tokens, asked: Sequence[tuple[str, int]]) -> list[Pressed]:
    """What each (press, tokens) keeps of a prefix. Raises Unavailable where kvpress cannot be had or fails, in its own words."""
    if not asked:
        return []
    python = interpreter_with(*KVPRESS, beside=True)
    with tempfile.TemporaryDirectory(prefix="treadle-kvpress-") as folder:
        plain, out = Path(folder) / "model", Path(folder) / "kept.npy"
        _plain_model(model, plain)
        request = {"model": str(plain), "prefix": prefix, "presses": list(asked), "out": str(out)}
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        try:
            ran = subprocess.run(
                [str(python), str(SCRIPT)], input=json.dumps(request), capture_output=True, text=True, timeout=SECONDS_MAX,
                check=False, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise Unavailable(f"kvpress: not done after {SECONDS_MAX} s") from error
        if ran.returncode:
            raise Unavailable(f"kvpress ended with {ran.returncode}: {(ran.stderr.strip().splitlines() or ['without a word'])[-1]}")
        told = json.loads(ran.stdout.strip().splitlines()[-1])
        kept = np.load(out, allow_pickle=False)
    return [Pressed(torch.from_numpy(one.copy()), seconds) for one, seconds in zip(kept, told["seconds"], strict=True)]


def _plain_model(model: Path, plain: Path) -> None:
    plain.mkdir()
    for name in MODEL_FILES:
        if (model / name).is_file():
            (plain / name).symlink_to((model / name).resolve())
    told = model / "tokenizer_config.json"
    settings = json.loads(told.read_text(encoding="utf-8")) if told.is_file() else {}
    settings.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")

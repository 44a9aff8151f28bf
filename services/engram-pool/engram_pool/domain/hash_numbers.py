"""Hash numbers that a checkpoint brings along: they must be those of the manifest, or every row is another one."""

from __future__ import annotations

import re
from itertools import chain

import numpy as np

from engram_pool.domain.sources import Checkpoint, Tensor
from treadle.contract import EngramModel, Family, FingerprintMismatch, InvalidArgument

NUMBERS_MAX = 1024  # of one tensor; a layer has at most 256 heads
_NAME = re.compile(
    r"(?:^|\.)layers\.(\d+)\.(?:.+\.)?ple_embedding\.(layer_multipliers|ngram_heads_vocab_sizes|ngram_heads_offsets)"
)


def check_hash_numbers(checkpoint: Checkpoint, model: EngramModel) -> None:
    """Compare what the tensors of a Qwen PLE say with the manifest; nothing where there are none.

    Raises FingerprintMismatch naming multipliers, primes or offsets; InvalidArgument for tensors that hold no such numbers.
    """
    if model.family is not Family.QWEN_PLE:
        return
    for name, tensor in checkpoint.tensors.items():
        match = _NAME.search(name)
        if match is None or match.end() < len(name) or int(match[1]) not in model.layers:
            continue
        field, expected = _expected(model, int(match[1]), match[2])
        there = _numbers(checkpoint, tensor)
        if there != expected:
            place = next((at for at, pair in enumerate(zip(expected, there, strict=False)) if pair[0] != pair[1]), None)
            if place is None:  # the first ones are the same: there are more of one than of the other
                raise FingerprintMismatch(field, f"{len(expected)} numbers (manifest)", f"{len(there)} ({name})")
            raise FingerprintMismatch(field, f"{expected[place]} (manifest) at {place}", f"{there[place]} ({name})")


def _expected(model: EngramModel, layer: int, what: str) -> tuple[str, list[int]]:
    position = model.layer_position(layer)
    primes = list(chain.from_iterable(model.primes[position]))
    if what == "layer_multipliers":
        return "multipliers", list(model.multipliers[position])
    if what == "ngram_heads_vocab_sizes":
        return "primes", primes
    return "offsets", [sum(primes[:head]) for head in range(len(primes))]


def _numbers(checkpoint: Checkpoint, tensor: Tensor) -> list[int]:
    if tensor.dtype != "I64" or len(tensor.shape) != 1 or not 1 <= tensor.shape[0] <= NUMBERS_MAX:
        raise InvalidArgument(f"{tensor}: I64 numbers of the hash expected")
    data = np.empty((tensor.shape[0], 8), dtype=np.uint8)
    checkpoint.read(tensor, 0, data)
    return [int(number) for number in data.view("<i8")[:, 0]]

"""Dictionaries whose every number says which version it is of, computed here from (seed, layer, entry): nothing of a store is believed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.dictionary import (
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Prefix,
    RowDtype,
    tensor_name,
)  # fmt: skip
from treadle.contract.dictionary_file import DTYPES, tensor_info, write_folder

NAME = "loadtest-rules"
DIGEST = hashlib.sha256(b"a model that nobody has").hexdigest()
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 6, 8, 4, 32
KEY_DIM = HEADS * HEAD_DIM  # all heads of a token in one key


class _Shapes(Dictionary):
    """A manifest without tensors, to be asked which it is to have."""

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Truth:
    """What the entries of one version must be. entries: K; seed: 1 to 1000, of all versions another one."""

    seed: int
    entries: int

    def keys(self, layer: int, entries: NDArray[np.int64]) -> NDArray[np.float32]:
        """f32 [N, KEY_DIM] of length 1: the lookup keys of some entries."""
        numbers = _scattered(self.seed, layer, entries[:, None] * KEY_DIM + np.arange(KEY_DIM)).astype(np.float64) - (1 << 15)
        unit: NDArray[np.float64] = numbers / np.linalg.norm(numbers, axis=1, keepdims=True)
        return unit.astype(np.float32)

    def states(self, layer: int, entries: NDArray[np.int64]) -> NDArray[np.float32]:
        """f32 [N, HEADS, HEAD_DIM], whole numbers."""
        places = entries[:, None] * KEY_DIM + np.arange(KEY_DIM)
        return _scattered(self.seed + 1000, layer, places).astype(np.float32).reshape(-1, HEADS, HEAD_DIM)

    def log_z(self, layer: int, entries: NDArray[np.int64]) -> NDArray[np.float32]:
        """f32 [N, HEADS], whole numbers."""
        return _scattered(self.seed + 2000, layer, entries[:, None] * HEADS + np.arange(HEADS)).astype(np.float32)

    def wrong(self, layer: int, asked: NDArray[np.int64], states: NDArray[np.float32], log_z: NDArray[np.float32]) -> int:
        """How many of the answers [N, HEADS, HEAD_DIM] and [N, HEADS] to the keys of `asked` are not those of this version."""
        same_states = (states == self.states(layer, asked)).all(axis=(1, 2))
        return int((~(same_states & (log_z == self.log_z(layer, asked)).all(axis=1))).sum())

    def write(self, folder: Path) -> Dictionary:
        """Write its folder, new, as `treadle asm build` does."""
        parts: dict[str, Any] = {
            "name": NAME, "model": DictionaryModel(DIGEST, DIGEST, DIGEST, LAYERS, HEADS, KV_HEADS, HEAD_DIM),
            "layers": tuple(range(LAYERS)), "prefix": Prefix(DIGEST, 4096, (4096,)), "calibration": Calibration(DIGEST, 1, self.entries),
            "settings": DictionarySettings(dtype=RowDtype.F32, entries=self.entries, heads_joined=HEADS // KV_HEADS, seed=self.seed),
        }  # fmt: skip
        shapes = dict(_Shapes(**parts, tensors=()).tensor_shapes())
        everywhere, tensors = np.arange(self.entries), dict[str, NDArray[Any]]()
        for layer in parts["layers"]:
            made = {"keys": self.keys, "states": self.states, "log_z": self.log_z}
            of_layer: dict[str, NDArray[Any]] = {part: make(layer, everywhere)[None] for part, make in made.items()}
            of_layer["counts"] = np.ones((1, self.entries))
            of_layer["cosine_quantiles"] = np.linspace(0.0, 1.0, 101)[None]
            tensors |= {tensor_name(layer, part): values for part, values in of_layer.items()}
        tensors = {name: np.ascontiguousarray(values, DTYPES[shapes[name][0]]) for name, values in tensors.items()}
        infos = tuple((name, tensor_info(tensors[name], shapes[name][0])) for name in sorted(tensors))
        dictionary = Dictionary(**parts, tensors=infos)
        folder.mkdir(parents=True)
        write_folder(folder, dictionary, tensors)
        return dictionary


def entries_of_bytes(byte_count: int) -> int:
    """K of a dictionary of about so many bytes."""
    return max(64, byte_count // (LAYERS * 2 * KEY_DIM * 4))


def _scattered(seed: int, layer: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
    """Numbers of 0 to 65535 without a visible order: a multiplicative hash of (seed, layer, place)."""
    mixed = (places.astype(np.uint64) + np.uint64((seed * 64 + layer) * 0x9E3779B97F4A7C15 % (1 << 64))) * np.uint64(
        0xD1342543DE82EF95
    )
    return ((mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(48)).astype(np.int64)

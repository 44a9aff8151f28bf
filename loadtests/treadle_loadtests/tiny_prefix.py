"""A dictionary of a few random entries for any model: a real store keeps it and a real worker opens it, in a moment.

What an answer behind it says means nothing, when and whether it comes behind it does.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Prefix,
    RowDtype,
    tensor_name,
)
from treadle.contract.dictionary_file import tensor_info, write_folder
from treadle.nn.config import ModelConfig
from treadle.nn.model_identity import dictionary_model

ENTRIES, TOKENS = 64, 64  # of a codebook, and of the prefix that nobody wrote


def model_of(folder: Path) -> DictionaryModel:
    """What a dictionary says of the language model in `folder`. Reads its weights once."""
    return dictionary_model(folder, ModelConfig.from_folder(folder))


def write_tiny_prefix(folder: Path, name: str, model: DictionaryModel) -> Path:
    """Write a dictionary's folder, new, as `treadle asm build` does, without exact KV; its path. Every request is on its task."""
    chance, tensors = np.random.default_rng(11), dict[str, tuple[str, NDArray[Any]]]()
    shape = (1, ENTRIES, model.heads)  # one codebook, all heads in one key
    for layer in range(model.layers):
        keys = chance.standard_normal((*shape[:2], model.heads * model.head_dim), dtype=np.float32)
        tensors |= {
            tensor_name(layer, "keys"): ("F32", keys / np.linalg.norm(keys, axis=-1, keepdims=True)),
            tensor_name(layer, "states"): ("F32", chance.standard_normal((*shape, model.head_dim), dtype=np.float32)),
            tensor_name(layer, "log_z"): ("F32", np.ones(shape, np.float32)),
            tensor_name(layer, "counts"): ("I32", np.ones(shape[:2], np.int32)),
            tensor_name(layer, "cosine_quantiles"): ("F32", np.full((1, QUANTILES), -1, np.float32)),
        }
    digest = hashlib.sha256(name.encode()).hexdigest()
    dictionary = Dictionary(
        name, model, tuple(range(model.layers)), Prefix(digest, TOKENS, (TOKENS,)), Calibration(digest, 1, ENTRIES),
        DictionarySettings(dtype=RowDtype.F32, entries=ENTRIES, heads_joined=model.group),
        tuple((each, tensor_info(array, dtype)) for each, (dtype, array) in sorted(tensors.items())),
    )  # fmt: skip
    folder.mkdir(parents=True)
    write_folder(folder, dictionary, {each: array for each, (_, array) in tensors.items()})
    return folder

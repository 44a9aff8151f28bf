"""The exact KV of a prefix as a file beside its dictionary, for requests that the guard sends back to it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, write_tensors
from treadle.contract.errors import DataLoss, NotFound
from treadle.nn.kv import KVBlock, SequenceKV
from treadle.nn.model import CausalLM


def write_prefix_kv(folder: Path, scratch: Path, model: CausalLM, kv: SequenceKV) -> str:
    """Write PREFIX_KV_FILE into `folder`: tensor `kv` [layers, 2, kv_heads, tokens, head_dim], as SequenceKV.block gives it.

    scratch: a file that does not exist, gone afterwards; the copy goes through it, so that no second KV is held in memory
    Returns the sha256 of the file.
    """
    config, bf16 = model.config, model.dtype is torch.bfloat16
    shape = (config.layers, 2, config.kv_heads, kv.length, config.head_dim)
    whole = np.memmap(scratch, np.dtype("<u2" if bf16 else "<f4"), "w+", shape=shape)
    for layer in range(config.layers):
        for place, heads in enumerate((kv.keys(layer), kv.values(layer))):
            rows = heads.transpose(0, 1).contiguous()
            whole[layer, place] = rows.view(torch.uint16).numpy() if bf16 else rows.to(torch.float32).numpy()
    write_tensors(folder / PREFIX_KV_FILE, {"kv": ("BF16" if bf16 else "F32", whole)})
    scratch.unlink()
    with (folder / PREFIX_KV_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_prefix_kv(folder: Path, dictionary: Dictionary, model: CausalLM) -> SequenceKV:
    """The KV beside a dictionary. Raises NotFound where none is kept, DataLoss where it is not the manifest's."""
    path = folder / PREFIX_KV_FILE
    if dictionary.prefix_kv is None or not path.is_file():
        parts = len(dictionary.prefix.parts)
        how = f"the texts of its {parts} parts, in order" if parts else "the prefix's text, or build with --keep-prefix-kv"
        raise NotFound(f"{folder}: no exact prefix KV beside the dictionary; give {how}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != dictionary.prefix_kv:
            raise DataLoss(f"{path}: its sha256 is not the manifest's")
    kv = model.new_kv()
    with safe_open(path, framework="pt") as tensors:
        kv.extend_from(KVBlock(0, dictionary.prefix.tokens, tensors.get_tensor("kv").to(model.dtype), {}))
    return kv

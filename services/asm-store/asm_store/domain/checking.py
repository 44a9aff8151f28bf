"""Whether what came is a dictionary: the announcement before its bytes, then the files, tensor by tensor.

What is wrong is refused with the tensor named. Memory: BLOCK_BYTES at once, whatever the size of the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.domain.versions import FileInfo
from treadle.contract.checks import expect
from treadle.contract.dictionary import Dictionary, tensor_name
from treadle.contract.dictionary_file import (
    ALIGNMENT_BYTES,
    CARD_BYTES_MAX,
    DTYPES,
    HEADER_BYTES_MAX,
    PREFIX_KV_FILE,
    TENSORS_FILE,
    map_tensors,
    read_header,
    tensor_offsets,
)
from treadle.contract.errors import DataLoss, InvalidArgument
from treadle.kernels import as_numbers

BLOCK_BYTES = 4 << 20
MESSAGE_BYTES_MAX = 1 << 20  # manifest, card and what Open answers beside them fit one message
TENSOR_WORDS_BYTES = 64  # of a tensor's name and offset in such a message
COSINE_SLACK = 1e-3  # a cosine computed in fp32
KEY_LENGTHS = (0.95, 1.05)  # of length 1 before rounding to int8
NUMBER_MAX = {
    "states": 1e7,
    "list_keys": 1e7,
    "whitening": 1e9,
    "matched_keys": 1e7,
    "matched_values": 1e7,
    "matched_biases": 1e4,
}  # in fp32, what a model makes of them has a finite square
PREFIX_KV_MAX = 1e7
CARD_DEPTH_MAX = 32  # objects and lists within each other; builders write three: whoever prints a card goes down as far
PREFIX_KV_TENSOR = "kv"
Array = NDArray[Any]


def check_announcement(manifest_json: bytes, files: Sequence[FileInfo], card_json: bytes) -> Dictionary:
    """The dictionary that is announced. Raises InvalidArgument naming the field that is wrong, before any byte of a file is read."""
    dictionary = Dictionary.from_json(manifest_json)
    expect(dictionary.to_json() == manifest_json, "manifest_json: not canonical JSON (sorted keys, no spaces, UTF-8)")
    _check_card(card_json)
    expect(
        fits_message(dictionary, card_json), f"card_json: {len(card_json)} bytes beside this manifest do not fit a message of 1 MiB"
    )
    names = [TENSORS_FILE] + ([PREFIX_KV_FILE] if dictionary.prefix_kv is not None else [])
    expect(
        [file.name for file in files] == names, f"files: {names} in this order, as the manifest says; got {[f.name for f in files]}"
    )
    tensor_bytes_max = dictionary.nbytes + ALIGNMENT_BYTES * len(dictionary.tensors)
    for file, data_bytes in zip(files, (tensor_bytes_max, prod(_prefix_kv_shape(dictionary)) * 4), strict=False):
        most = data_bytes + 8 + HEADER_BYTES_MAX
        expect(file.nbytes <= most, f"files: {file.name}: {file.nbytes} bytes, tensors as in the manifest take {most} at most")
    if dictionary.prefix_kv is not None:
        given = files[1].sha256
        expect(given == dictionary.prefix_kv, f"files: {PREFIX_KV_FILE}: sha256 {given}, the manifest says {dictionary.prefix_kv}")
    return dictionary


def fits_message(dictionary: Dictionary, card_json: bytes) -> bool:
    """Whether manifest and card, and what Open answers beside them, fit one message."""
    words = len(dictionary.to_json()) + len(card_json) + TENSOR_WORDS_BYTES * len(dictionary.tensors)
    return words <= MESSAGE_BYTES_MAX


def check_files(folder: Path, dictionary: Dictionary, *, pace: Callable[[int], None] | None = None) -> None:
    """Whether the files, whose own sha256 was compared, hold what the manifest says.

    Raises InvalidArgument naming the tensor: layout, NaN, infinity, what must rise; DataLoss naming it: digest.
    """
    try:
        offsets = tensor_offsets(folder / TENSORS_FILE, dictionary)
    except DataLoss as error:  # the bytes are those that were sent: what they say is wrong
        raise InvalidArgument(str(error)) from error
    for name, info in dictionary.tensors:
        _check_place(f"tensor {name}", offsets[name], DTYPES[info.dtype])
    tensors = map_tensors(folder / TENSORS_FILE, dictionary, offsets)
    check_tensor_digests(tensors, dictionary, pace=pace)
    for layer in dictionary.layers:
        if pace is not None:
            pace(0)
        check_layer(layer, dictionary, tensors)
    if dictionary.prefix_kv is not None:
        check_prefix_kv(folder / PREFIX_KV_FILE, dictionary)


def check_tensor_digests(
    tensors: Mapping[str, Array], dictionary: Dictionary, *, pace: Callable[[int], None] | None = None
) -> None:
    """Compare the sha256 of each tensor with the manifest's; pace: told of each block's bytes. Raises DataLoss naming the tensor."""
    for name, info in dictionary.tensors:
        digest = hashlib.sha256()
        for block in _blocks(tensors[name]):
            digest.update(block.data)
            if pace is not None:
                pace(block.nbytes)
        if digest.hexdigest() != info.sha256:
            raise DataLoss(f"tensor {name}: its sha256 is {digest.hexdigest()}, the manifest says {info.sha256}")


def check_layer(layer: int, dictionary: Dictionary, tensors: Mapping[str, Array]) -> None:
    """Whether a layer's numbers can be looked up. Raises InvalidArgument naming the tensor."""
    found = {name: tensors[name] for name, _ in dictionary.tensors if name.startswith(tensor_name(layer, ""))}
    dtypes = {name: info.dtype for name, info in dictionary.tensors}
    log_z, counts = tensor_name(layer, "log_z"), tensor_name(layer, "counts")
    for name, tensor in found.items():
        if name != log_z:
            expect(all(is_finite(block, dtypes[name]) for block in _blocks(tensor)), f"tensor {name}: NaN or infinity")
        if (most := NUMBER_MAX.get(name.rpartition(".")[2])) and dtypes[name] in ("F32", "BF16"):
            _check_numbers(f"tensor {name}", tensor, most)
    expect(bool((found[counts] >= 0).all()), f"tensor {counts}: a count below 0")
    empty = np.broadcast_to((found[counts] == 0)[..., None], found[log_z].shape)
    right = np.where(empty, np.isneginf(found[log_z]), np.isfinite(found[log_z]))
    expect(bool(right.all()), f"tensor {log_z}: finite where counts > 0, -inf where counts == 0; {int((~right).sum())} are not")
    for part in ("key_scales", "state_scales"):
        if (name := tensor_name(layer, part)) in found:
            expect(bool((found[name] >= 0).all()), f"tensor {name}: a scale below 0")
    _check_quantiles(tensor_name(layer, "cosine_quantiles"), found)
    _check_lists(tensor_name(layer, "list_starts"), found, dictionary.settings.entries)
    _check_key_lengths(layer, dictionary, found)


def check_prefix_kv(path: Path, dictionary: Dictionary) -> None:
    """Whether the exact prefix KV beside a dictionary fits it. Raises InvalidArgument naming the tensor."""
    try:
        header, data_start, file_bytes = read_header(path)
    except DataLoss as error:
        raise InvalidArgument(str(error)) from error
    expect(set(header) == {PREFIX_KV_TENSOR}, f"{path.name}: one tensor {PREFIX_KV_TENSOR!r} expected, got {sorted(header)[:3]}")
    kv, shape = header[PREFIX_KV_TENSOR], _prefix_kv_shape(dictionary)
    place = f"{path.name}: tensor {PREFIX_KV_TENSOR}"
    expect(kv["dtype"] in ("F32", "BF16"), f"{place}: F32 or BF16, got {kv['dtype']!r}")
    expect(kv["shape"] == list(shape), f"{place}: shape {list(shape)} expected, got {kv['shape']}")
    dtype = DTYPES[kv["dtype"]]
    begin, end = kv["data_offsets"]
    nbytes = prod(shape) * dtype.itemsize
    expect(begin >= 0 and end - begin == nbytes and data_start + end <= file_bytes, f"{place}: its bytes end beyond the file")
    _check_place(place, data_start + begin, dtype)
    values = np.memmap(path, dtype, "r", data_start + begin, (prod(shape),))
    expect(all(is_finite(block, kv["dtype"]) for block in _blocks(values)), f"{place}: NaN or infinity")
    _check_numbers(place, values, PREFIX_KV_MAX)


def is_finite(values: Array, dtype: str) -> bool:
    """Whether no number is NaN or infinite; dtype: as a manifest says it, bf16 being uint16 here."""
    if dtype == "BF16":
        return bool(((values & 0x7F80) != 0x7F80).all())
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _check_place(place: str, offset: int, dtype: np.dtype[Any]) -> None:
    expect(offset % dtype.itemsize == 0, f"{place}: it begins at byte {offset}, a multiple of {dtype.itemsize} is needed to map it")


def _check_numbers(place: str, tensor: Array, most: float) -> None:
    """Finite numbers so large that the model overflows a layer on would spoil whoever is computed in one batch with them."""
    largest = max(float(np.abs(as_numbers(block, None)).max(initial=0.0)) for block in _blocks(tensor))
    expect(largest <= most, f"{place}: a number of size {largest:g}, at most {most:g} can be computed with")


def _check_card(card_json: bytes) -> None:
    expect(len(card_json) <= CARD_BYTES_MAX, f"card_json: {len(card_json)} bytes, the limit is {CARD_BYTES_MAX}")
    if card_json:
        try:
            card = json.loads(card_json)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"card_json: not JSON: {error}") from error
        expect(isinstance(card, dict), "card_json: a JSON object expected")
        level = [card]
        for _ in range(CARD_DEPTH_MAX):
            level = [
                part
                for whole in level
                for part in (whole.values() if isinstance(whole, dict) else whole)
                if isinstance(part, dict | list)
            ]
        expect(not level, f"card_json: nested deeper than {CARD_DEPTH_MAX}")


def _check_quantiles(name: str, found: Mapping[str, Array]) -> None:
    quantiles = found[name]
    expect(bool((np.abs(quantiles) <= 1 + COSINE_SLACK).all()), f"tensor {name}: a cosine outside -1 to 1")
    expect(bool((np.diff(quantiles, axis=1) >= 0).all()), f"tensor {name}: quantiles that fall")


def _check_lists(name: str, found: Mapping[str, Array], entries: int) -> None:
    if name in found:
        starts = found[name]
        expect(bool((starts[:, 0] == 0).all() and (starts[:, -1] == entries).all()), f"tensor {name}: from 0 to {entries} expected")
        expect(bool((np.diff(starts.astype(np.int64), axis=1) >= 0).all()), f"tensor {name}: starts that fall")


def _check_key_lengths(layer: int, dictionary: Dictionary, found: Mapping[str, Array]) -> None:
    name, scales = tensor_name(layer, "keys"), found.get(tensor_name(layer, "key_scales"))
    counts = found[tensor_name(layer, "counts")]
    shortest, longest = KEY_LENGTHS
    for book in range(dictionary.codebooks):
        for rows in row_blocks(dictionary.settings.entries, dictionary.key_dim):
            keys = as_numbers(found[name][book, rows], None if scales is None else scales[book, rows])
            lengths = np.sqrt(np.einsum("kd,kd->k", keys, keys))
            wrong = (lengths > longest) | ((lengths < shortest) & (counts[book, rows] > 0))
            expect(not wrong.any(), f"tensor {name}: keys of length 1 expected, entry {rows.start + int(wrong.argmax())} is not")


def row_blocks(entries: int, numbers: int) -> Iterator[slice]:
    """Slices of rows that take BLOCK_BYTES as fp32. numbers: of a row."""
    step = max(1, BLOCK_BYTES // (4 * numbers))
    return (slice(first, min(first + step, entries)) for first in range(0, entries, step))


def _blocks(tensor: Array) -> Iterator[Array]:
    flat = tensor.reshape(-1)
    step = BLOCK_BYTES // flat.dtype.itemsize
    return (flat[first : first + step] for first in range(0, max(1, flat.size), step))


def _prefix_kv_shape(dictionary: Dictionary) -> tuple[int, ...]:
    model = dictionary.model
    return model.layers, 2, model.kv_heads, dictionary.prefix.tokens, model.head_dim

"""A dictionary as a folder: manifest.json, dictionary.safetensors, and beside them card.json and prefix_kv.safetensors where there are any.

Owns writing it, finding the tensors in the file and mapping them. numpy knows no bf16: such tensors are uint16 here. Does not verify
digests unless asked (they are compared where a dictionary is published), nor know what the numbers mean (`dictionary`).
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.checks import object_fields
from treadle.contract.dictionary import DICTIONARY_BYTES_MAX, Dictionary, TensorInfo
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.contract.lasting_files import sync_folder, write_through

MANIFEST_FILE, TENSORS_FILE, PREFIX_KV_FILE, CARD_FILE = (
    "manifest.json", "dictionary.safetensors", "prefix_kv.safetensors", "card.json",
)  # fmt: skip
CARD_BYTES_MAX = 256 << 10  # what a builder says of a dictionary; in one message with other fields
HEADER_BYTES_MAX = 4 << 20
BLOCK_NUMBERS = 1 << 20  # looked at together
ALIGNMENT_BYTES = 64  # a tensor begins on a cache line: rows are read where they lie
DTYPES: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2"), "I8": np.dtype("i1"), "I32": np.dtype("<i4"),
}  # fmt: skip
Tensors = Mapping[str, NDArray[Any]]


def tensor_info(array: NDArray[Any], dtype: str) -> TensorInfo:
    """What a manifest says of `array`, which is of DTYPES[dtype]. Raises InvalidArgument where it is not."""
    if array.dtype != DTYPES[dtype]:
        raise InvalidArgument(f"{dtype}: an array of {DTYPES[dtype]} expected, got {array.dtype}")
    return TensorInfo(dtype, array.shape, hashlib.sha256(np.ascontiguousarray(array).data).hexdigest())


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write a safetensors file of (dtype, array) by name, each at a multiple of ALIGNMENT_BYTES, and force it to the disk.

    Names lie in rising order of their text, without gaps: what lies between two tensors is a tensor `pad.N` of bytes.
    """
    header, parts, end = dict[str, Any](), list[NDArray[Any]](), 0
    for name in sorted(tensors):
        dtype, array = tensors[name]
        if -end % ALIGNMENT_BYTES:
            _place(header, parts, f"pad.{len(parts)}", "I8", np.zeros(-end % ALIGNMENT_BYTES, np.int8), end)
            end += -end % ALIGNMENT_BYTES
        if array.dtype != DTYPES[dtype]:
            raise InvalidArgument(f"tensor {name}: {DTYPES[dtype]} expected, got {array.dtype}")
        _place(header, parts, name, dtype, np.ascontiguousarray(array), end)
        end += array.nbytes
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for part in parts:
            file.write(part.data)
        file.flush()
        os.fsync(file.fileno())


def tensor_offsets(path: Path, dictionary: Dictionary) -> dict[str, int]:
    """Where the bytes of each tensor of the manifest begin in the file.

    Raises NotFound (no file), DataLoss naming the tensor that is torn, misplaced or of another dtype or shape than the manifest says.
    """
    header, data_start, file_bytes = read_header(path)
    offsets = {}
    for name, info in dictionary.tensors:
        if name not in header:
            raise DataLoss(f"{path.name}: tensor {name} is missing")
        found = header[name]
        begin, end = found["data_offsets"]
        if found["dtype"] != info.dtype or tuple(found["shape"]) != info.shape or end - begin != info.nbytes:
            raise DataLoss(
                f"{path.name}: tensor {name} is {found['dtype']} {found['shape']}, the manifest says {info.dtype} {list(info.shape)}"
            )
        if not 0 <= begin <= end <= file_bytes - data_start:
            raise DataLoss(f"{path.name}: tensor {name} ends beyond the file of {file_bytes} bytes")
        offsets[name] = data_start + begin
    return offsets


def map_tensors(path: Path, dictionary: Dictionary, offsets: Mapping[str, int] | None = None) -> dict[str, NDArray[Any]]:
    """Every tensor of the manifest as a read-only view of the mapped file: milliseconds, whatever its size. bf16 comes as uint16.

    offsets: as `tensor_offsets` gives them; None: read from the file
    The views keep the mapping alive. Raises as `tensor_offsets`.
    """
    found = tensor_offsets(path, dictionary) if offsets is None else offsets
    whole = np.memmap(path, np.uint8, "r")
    views: dict[str, NDArray[Any]] = {}
    for name, info in dictionary.tensors:
        if found[name] + info.nbytes > whole.size:
            raise DataLoss(f"{path.name}: tensor {name} ends beyond the file of {whole.size} bytes")
        part = whole[found[name] : found[name] + info.nbytes]
        views[name] = np.asarray(part).view(DTYPES[info.dtype]).reshape(info.shape)
    return views


def check_digests(tensors: Tensors, dictionary: Dictionary, progress: Callable[[int], None] | None = None) -> None:
    """Compare every tensor with its digest in the manifest; `progress` is told the bytes of each. Raises DataLoss naming the tensor."""
    for name, info in dictionary.tensors:
        if hashlib.sha256(np.ascontiguousarray(tensors[name]).data).hexdigest() != info.sha256:
            raise DataLoss(f"tensor {name}: its sha256 is not the manifest's")
        if progress is not None:
            progress(info.nbytes)


def check_numbers(tensors: Tensors, dictionary: Dictionary) -> None:
    """Whether all can be computed with: no NaN, no infinity but the -inf of a log_z. All of it is read. Raises DataLoss naming the tensor.

    A NaN of one layer is met by the lookups of the next; behind the last layer nothing would meet it but the answer.
    """
    for name, info in dictionary.tensors:
        flat = tensors[name].reshape(-1)
        for first in range(0, flat.size, BLOCK_NUMBERS):
            if not _can_be_computed_with(flat[first : first + BLOCK_NUMBERS], info.dtype, minus_infinity=name.endswith(".log_z")):
                raise DataLoss(f"tensor {name}: NaN or infinity")


def write_folder(folder: Path, dictionary: Dictionary, tensors: Tensors, card: bytes = b"") -> None:
    """Write manifest, tensors and card into `folder`, which exists, and force them to the disk.

    The manifest comes last, by a rename: a folder with one is whole, also after a power cut.
    """
    dtypes = {name: info.dtype for name, info in dictionary.tensors}
    write_tensors(folder / TENSORS_FILE, {name: (dtypes[name], tensors[name]) for name in dtypes})
    if card:
        write_through(folder / CARD_FILE, card)
    partial = folder / f".{MANIFEST_FILE}.partial"
    write_through(partial, dictionary.to_json())
    sync_folder(folder)  # else the manifest's name may be on the disk before those of the others
    partial.rename(folder / MANIFEST_FILE)
    sync_folder(folder)


def read_manifest(folder: Path) -> Dictionary:
    """The manifest of a folder. Raises NotFound where there is none, InvalidArgument naming the field that is wrong."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise NotFound(f"{folder} holds no {MANIFEST_FILE}: `treadle asm build` makes such folders")
    return Dictionary.from_json(path.read_bytes())


def _can_be_computed_with(numbers: NDArray[Any], dtype: str, *, minus_infinity: bool) -> bool:
    if dtype == "BF16":
        return bool(((numbers & 0x7F80) != 0x7F80).all())
    if not minus_infinity:
        return numbers.dtype.kind != "f" or bool(np.isfinite(numbers).all())
    return bool((numbers < np.inf).all())  # false for NaN, too


def _place(header: dict[str, Any], parts: list[NDArray[Any]], name: str, dtype: str, array: NDArray[Any], begin: int) -> None:
    header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [begin, begin + array.nbytes]}
    parts.append(array)


def read_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """(tensor name -> dtype, shape, data_offsets; where data begin; size) of a safetensors file. Raises NotFound, DataLoss if torn."""
    if not path.is_file():
        raise NotFound(f"no such file: {path}")
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= HEADER_BYTES_MAX or 8 + length > file_bytes or file_bytes > DICTIONARY_BYTES_MAX:
            raise DataLoss(f"{path.name}: no safetensors file, or a torn one")
        text = file.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, found in header.items():
            begin, end = object_fields(name, found, {"dtype", "shape", "data_offsets"}, set())["data_offsets"]
            if not all(isinstance(number, int) for number in (begin, end, *found["shape"])) or not isinstance(found["dtype"], str):
                raise ValueError(name)
    except (ValueError, TypeError, AttributeError, RecursionError, InvalidArgument) as error:
        raise DataLoss(f"{path.name}: the header is damaged: {error}") from error
    return header, 8 + length, file_bytes

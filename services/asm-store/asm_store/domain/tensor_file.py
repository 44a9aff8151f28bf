"""A dictionary.safetensors written bit by bit: its tensors' sizes are known before, their numbers come in blocks, each in its order.

The same layout as `treadle.contract.dictionary_file.write_tensors` gives, which needs all tensors at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.domain.compute import Check
from asm_store.domain.versions import FileInfo
from treadle.contract.dictionary import ITEM_BYTES, TensorInfo
from treadle.contract.dictionary_file import ALIGNMENT_BYTES
from treadle.contract.errors import InvalidArgument

FILE_MODE = 0o640
READ_BYTES = 4 << 20


class TensorFile:
    """A context manager; `infos` and `file_info` once all is written. shapes: name -> (dtype, shape); check: called before each block."""

    def __init__(self, path: Path, shapes: Mapping[str, tuple[str, tuple[int, ...]]], check: Check = lambda: None) -> None:
        self._path, self._shapes, self._check = path, dict(shapes), check
        text, self._at = _layout(self._shapes)
        self._left = {name: prod(shape) * ITEM_BYTES[dtype] for name, (dtype, shape) in self._shapes.items()}
        self._digests = {name: hashlib.sha256() for name in self._shapes}
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, FILE_MODE)
        os.pwrite(self._descriptor, text, 0)

    def append(self, name: str, block: NDArray[Any]) -> None:
        """The next numbers of a tensor. Raises InvalidArgument for more than it has, OSError as it comes, and what `check` raises."""
        self._check()
        data = np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
        self._left[name] -= data.nbytes
        if self._left[name] < 0:
            raise InvalidArgument(f"tensor {name}: {-self._left[name]} bytes too many")
        self._digests[name].update(data)
        while data:
            written = os.pwrite(self._descriptor, data, self._at[name])
            self._at[name] += written
            data = data[written:]

    def infos(self) -> tuple[tuple[str, TensorInfo], ...]:
        """What a manifest says of the tensors. Raises InvalidArgument for one that is not whole."""
        for name, left in self._left.items():
            if left:
                raise InvalidArgument(f"tensor {name}: {left} bytes are missing")
        return tuple((name, TensorInfo(*self._shapes[name], self._digests[name].hexdigest())) for name in sorted(self._shapes))

    def file_info(self) -> FileInfo:
        """What the file is, forced to the disk."""
        os.fsync(self._descriptor)
        digest = hashlib.sha256()
        with self._path.open("rb") as file:
            while block := file.read(READ_BYTES):
                self._check()
                digest.update(block)
        return FileInfo(self._path.name, self._path.stat().st_size, digest.hexdigest())

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._descriptor)


def _layout(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header, and where each tensor begins in the file. What lies between two tensors is a tensor `pad.N` of bytes."""
    header, begins, end = dict[str, Any](), dict[str, int](), 0
    for name in sorted(shapes):
        dtype, shape = shapes[name]
        if gap := -end % ALIGNMENT_BYTES:
            header[f"pad.{len(header)}"] = {"dtype": "I8", "shape": [gap], "data_offsets": [end, end + gap]}
            end += gap
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes]}
        begins[name], end = end, end + nbytes
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT_BYTES)
    return struct.pack("<Q", len(text)) + text, {name: 8 + len(text) + begin for name, begin in begins.items()}

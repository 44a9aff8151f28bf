"""A safetensors file, or a folder of them, read in pieces by position: no tensor is ever loaded whole.

Owns the files it opens. Reads go past the page cache as they end, so that a checkpoint does not push out what the host needs.
Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header size, JSON header, data).
"""

from __future__ import annotations

import json
import math
import os
import stat
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engram_pool.domain.sources import Tensor
from engram_pool.domain.storing import Rows
from treadle.contract import DataLoss, InvalidArgument, NotFound

FILES_MAX = 4096  # in one folder
HEADER_BYTES_MAX = 16 << 20  # of one file: about 100,000 tensors; the format allows 100 MB, which is no header but an attack
CONFIG_BYTES_MAX = 4 << 20
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16,
    "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip


class SafetensorsCheckpoint:
    """Tensors of a file or folder, by name."""

    def __init__(self, name: str, files: list[Path], config: Mapping[str, Any] | None) -> None:
        self.name, self.config = name, config
        self.tensors: dict[str, Tensor] = {}
        self._descriptors: list[int] = []
        self._places: dict[str, tuple[int, int]] = {}  # tensor -> file descriptor, offset of its first byte
        try:
            for file in files:
                self._take_in(file)
        except BaseException:
            self.close()
            raise

    def read(self, tensor: Tensor, first_row: int, out: Rows) -> None:
        """Fill `out` [n, tensor.row_bytes] with rows from `first_row` on. Raises DataLoss if the file has shrunk or fails."""
        descriptor, start = self._places[tensor.name]
        place = begin = start + first_row * tensor.row_bytes
        left = out.reshape(-1).data
        while left:
            try:
                read = os.preadv(descriptor, [left], place)
            except OSError as error:
                raise DataLoss(f"{tensor.name}: cannot be read at byte {place}: {error.strerror}") from error
            if read == 0:
                raise DataLoss(f"{tensor.name}: the file ends at byte {place}, {len(left)} bytes early")
            left, place = left[read:], place + read
        os.posix_fadvise(descriptor, begin, place - begin, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _take_in(self, file: Path) -> None:
        descriptor = open_plain(file)
        self._descriptors.append(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        header, data_start = _read_header(file, descriptor)
        data_bytes = os.fstat(descriptor).st_size - data_start
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if name in self.tensors:
                raise InvalidArgument(f"{file}: tensor {name!r} stands in another file of {self.name} too")
            tensor, offset = _tensor(file, name, entry, data_bytes)
            self.tensors[name] = tensor
            self._places[name] = descriptor, data_start + offset


def open_checkpoint(path: Path, *, allowed_folder: Path | None = None) -> SafetensorsCheckpoint:
    """Open a safetensors file, or all of a folder; config.json beside them is read too.

    allowed_folder: refuse every file outside it, links resolved
    Raises NotFound if there is nothing, DataLoss for a torn file, InvalidArgument for a file of another kind.
    """
    try:
        resolved = resolved_below(path, allowed_folder)
        if resolved.is_dir():
            files = sorted(file for file in resolved.iterdir() if file.name.endswith(".safetensors"))
            folder = resolved
        else:
            files, folder = [resolved], resolved.parent
        if not files:
            raise NotFound(f"{path} holds no *.safetensors")
        if len(files) > FILES_MAX:
            raise InvalidArgument(f"{path} holds {len(files)} files, the limit is {FILES_MAX}")
        files = [resolved_below(file, allowed_folder) for file in files]
        return SafetensorsCheckpoint(folder.name, files, _read_config(resolved_below(folder / "config.json", allowed_folder)))
    except FileNotFoundError as error:
        raise NotFound(f"no file or folder {path} on the pool's host") from error
    except OSError as error:
        raise InvalidArgument(f"{path} cannot be read: {error.strerror or error}") from error


def resolved_below(path: Path, allowed_folder: Path | None) -> Path:
    """`path` with links resolved. Raises InvalidArgument if it then lies outside `allowed_folder`."""
    resolved = path.resolve()
    if allowed_folder is not None and not resolved.is_relative_to(allowed_folder.resolve()):
        raise InvalidArgument(f"path: {path} is outside checkpoint_dir {allowed_folder}")
    return resolved


def open_plain(file: Path) -> int:
    """Open a plain file; never wait for the other end of a pipe. `file` is resolved: a link that came since is refused."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise InvalidArgument(f"{file} is no plain file: a pipe, device or folder holds no tensors")
    return descriptor


def _read_header(file: Path, descriptor: int) -> tuple[dict[str, Any], int]:
    start = os.pread(descriptor, 8, 0)
    if len(start) < 8:
        raise DataLoss(f"{file} is torn: {len(start)} bytes, a safetensors file has at least 8")
    (header_bytes,) = struct.unpack("<Q", start)
    if header_bytes > HEADER_BYTES_MAX:
        raise InvalidArgument(
            f"{file} is no safetensors file: it claims a header of {header_bytes} bytes, the limit is {HEADER_BYTES_MAX}"
        )
    text = os.pread(descriptor, header_bytes, 8)
    if len(text) < header_bytes:
        raise DataLoss(f"{file} is torn: it ends inside its header")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{file} is no safetensors file: its header is not JSON") from error
    if not isinstance(header, dict):
        raise InvalidArgument(f"{file} is no safetensors file: its header is not an object")
    return header, 8 + header_bytes


def _tensor(file: Path, name: str, entry: object, data_bytes: int) -> tuple[Tensor, int]:
    """A tensor and the offset of its data. Raises InvalidArgument for a header that is wrong, DataLoss for missing data."""
    try:
        assert isinstance(entry, dict)
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        assert all(isinstance(number, int) and 0 <= number < 1 << 62 for number in (*shape, begin, end))
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise InvalidArgument(f"{file}: the header's entry for {name!r} is wrong") from error
    bits = _BITS.get(dtype)
    if begin > end or (bits is not None and (math.prod(shape) * bits + 7) // 8 != end - begin):
        raise InvalidArgument(f"{file}: {name!r}: {dtype}{list(shape)} does not take the {end - begin} bytes of its data_offsets")
    if end > data_bytes:
        raise DataLoss(f"{file} is torn: {name!r} ends at byte {end} of its data, the file holds {data_bytes}")
    rows = shape[0] if shape else 1
    return Tensor(name, dtype, shape, (end - begin) // rows if rows else 0), begin


def _read_config(path: Path) -> dict[str, Any] | None:
    try:
        with os.fdopen(open_plain(path), "rb") as file:
            text = file.read(CONFIG_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    try:
        config = json.loads(text) if len(text) <= CONFIG_BYTES_MAX else None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is not JSON") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path}: an object of at most {CONFIG_BYTES_MAX} bytes expected")
    return config

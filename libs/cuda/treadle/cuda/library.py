"""The compiled library behind plain functions: what it returns becomes the errors of `treadle.contract`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol

from treadle.contract import InvalidArgument, ResourceExhausted, TreadleError, Unavailable

LIBRARY = Path(__file__).with_name("libtreadle_cuda.so")
_INVALID_VALUE, _MEMORY_ALLOCATION, _INSUFFICIENT_DRIVER, _NO_DEVICE, _INVALID_DEVICE = 1, 2, 35, 100, 101
_ALREADY_REGISTERED, _NOT_SUPPORTED = 712, 801
_ERRORS: dict[int, tuple[Callable[[str], TreadleError], str]] = {
    _INVALID_VALUE: (InvalidArgument, "an address, a size or a stream is not what the device takes"),
    _MEMORY_ALLOCATION: (ResourceExhausted, "the driver pins no more memory; look at `ulimit -l` and what other processes pin"),
    _INSUFFICIENT_DRIVER: (Unavailable, "there is no NVIDIA driver here, or one older than this build's CUDA; update the driver"),
    _NO_DEVICE: (Unavailable, "there is no CUDA device here; use the transport mapped, whose rows come by the host"),
    _INVALID_DEVICE: (InvalidArgument, "no device of that number"),
    _ALREADY_REGISTERED: (InvalidArgument, "this memory is registered already; close the DeviceRows that did it"),
    _NOT_SUPPORTED: (Unavailable, "this driver or platform cannot do that"),
}


class DeviceFailure(TreadleError):
    """The device or its driver failed: what is on it is not to be trusted any more."""


class Library(Protocol):
    """What is asked of the compiled part. Addresses are ints; every function raises what its status stands for."""

    def registers_read_only(self, device: int) -> bool: ...
    def register(self, address: int, byte_count: int, *, read_only: bool) -> None: ...
    def unregister(self, address: int) -> None: ...
    def device_pointer(self, device: int, address: int) -> int: ...
    def gather(
        self, device: int, table: int, row_count: int, row_bytes: int, rows: int, count: int, out: int, bad: int, *,
        blocks_max: int, stream: int,
    ) -> None: ...  # fmt: skip


class CudaLibrary:
    """The library that nvcc built. Raises Unavailable where it was not built, or does not load."""

    def __init__(self, path: Path = LIBRARY) -> None:
        try:
            self._native = ctypes.CDLL(str(path))
        except OSError as error:
            raise Unavailable(f"treadle-cuda: {error}; build it on a machine with nvcc: make cuda") from error
        pointer, size, wide = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
        for name, arguments in (
            ("device_count", [ctypes.POINTER(ctypes.c_int)]),
            ("registers_read_only", [ctypes.c_int, ctypes.POINTER(ctypes.c_int)]),
            ("register", [pointer, size, ctypes.c_int]),
            ("unregister", [pointer]),
            ("device_pointer", [ctypes.c_int, pointer, ctypes.POINTER(pointer)]),
            ("gather", [ctypes.c_int, pointer, wide, wide, pointer, wide, pointer, pointer, wide, pointer]),
        ):
            function = getattr(self._native, f"treadle_cuda_{name}")
            function.argtypes, function.restype = arguments, ctypes.c_int
        self._native.treadle_cuda_error_text.argtypes, self._native.treadle_cuda_error_text.restype = (
            [ctypes.c_int],
            ctypes.c_char_p,
        )

    def device_count(self) -> int:
        """How many devices there are, at least one. Raises Unavailable saying why there is none."""
        count = ctypes.c_int()
        self._check("device_count", self._native.treadle_cuda_device_count(ctypes.byref(count)))
        return count.value

    def registers_read_only(self, device: int) -> bool:
        """Whether memory that this process may only read can be registered."""
        supported = ctypes.c_int()
        self._check("device attribute", self._native.treadle_cuda_registers_read_only(device, ctypes.byref(supported)))
        return bool(supported.value)

    def register(self, address: int, byte_count: int, *, read_only: bool) -> None:
        """Pin whole pages for all devices."""
        self._check("cudaHostRegister", self._native.treadle_cuda_register(address, byte_count, read_only))

    def unregister(self, address: int) -> None:
        """Let go of what was registered at this address."""
        self._check("cudaHostUnregister", self._native.treadle_cuda_unregister(address))

    def device_pointer(self, device: int, address: int) -> int:
        """Where a device sees registered memory."""
        pointer = ctypes.c_void_p()
        self._check("cudaHostGetDevicePointer", self._native.treadle_cuda_device_pointer(device, address, ctypes.byref(pointer)))
        return int(pointer.value or 0)

    def gather(
        self, device: int, table: int, row_count: int, row_bytes: int, rows: int, count: int, out: int, bad: int, *,
        blocks_max: int, stream: int,
    ) -> None:  # fmt: skip
        """Queue a gather on a stream; returns at once."""
        arguments = (device, table, row_count, row_bytes, rows, count, out, bad, blocks_max, stream)
        self._check("gather", self._native.treadle_cuda_gather(*arguments))

    def _check(self, what: str, status: int) -> None:
        if status:
            raise error_of(status, what, self._native.treadle_cuda_error_text(status).decode())


def error_of(status: int, what: str, said: str) -> TreadleError:
    """The error that a cudaError_t other than 0 stands for."""
    if status not in _ERRORS:
        return DeviceFailure(f"{what}: {said} (CUDA error {status})")
    make, text = _ERRORS[status]
    return make(f"{what}: {text} ({said}, CUDA error {status})")


@cache
def library() -> CudaLibrary:
    """The one of this process. Raises Unavailable."""
    return CudaLibrary()


def device_count() -> int:
    """CUDA devices of this machine, at least one. Raises Unavailable saying why there is none, or that nothing was built."""
    return library().device_count()

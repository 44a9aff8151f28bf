"""Rows by service-ple: its server, which keeps a table in memory, asked over TCP by its own client library.

The server listens on all addresses without a key, so this script runs in a network of its own.
"""

from __future__ import annotations

import array
import ctypes
import json
import socket
import sys
from pathlib import Path
from typing import Any

from answering import answer, ended, rows_of, started, task, wait_for  # type: ignore[import-not-found,unused-ignore]

PORT = 18460
FAULT_BYTES = 512


def main() -> None:
    """Answer until standard input ends."""
    asked = task()
    folder = Path(asked["folder"])
    table, log = folder / "ple-fp8.safetensors", folder / "server.log"
    _write(table, asked)
    server = started(
        [str(Path(sys.executable).with_name("service-ple-server")), "--fichero", str(table), "--puerto", str(PORT)], log
    )
    try:
        wait_for(_listens, server, log)
        table.unlink()  # it has its own copy
        answer(asked, lambda ids: array.array("q", ids), _Client(asked).fetch)
    finally:
        ended(server)


class _Client:
    """The C ABI of libserviceple.so."""

    def __init__(self, asked: dict[str, Any]) -> None:
        import vllm_service_ple  # type: ignore[import-not-found,unused-ignore]

        self._rows, self._row_bytes = asked["rows"], asked["row_bytes"]
        self._library = ctypes.CDLL(str(Path(vllm_service_ple.__file__).with_name("libserviceple.so")))
        self._library.sple_abrir.restype = ctypes.c_void_p
        self._library.sple_filas.argtypes = [
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int,
        ]  # fmt: skip
        self._fault, self._out = ctypes.create_string_buffer(FAULT_BYTES), bytearray()
        self._connection = self._library.sple_abrir(f"127.0.0.1:{PORT}".encode(), self._fault, FAULT_BYTES)
        if not self._connection:
            sys.exit(f"service-ple: {self._fault.value.decode(errors='replace')}")

    def fetch(self, ids: array.array[int]) -> bytearray:
        size = len(ids) * self._row_bytes
        if len(self._out) != size:
            self._out = bytearray(size)
        out = (ctypes.c_char * size).from_buffer(self._out)
        if self._library.sple_filas(
            self._connection, ids.buffer_info()[0], len(ids), 0, self._rows, ctypes.addressof(out), self._fault, FAULT_BYTES
        ):
            sys.exit(f"service-ple: {self._fault.value.decode(errors='replace')}")
        return self._out


def _write(path: Path, asked: dict[str, Any]) -> None:
    """The rows as the one shard of a table in the form that the server reads, with a scale of 1."""
    size = asked["rows"] * asked["row_bytes"]
    header = json.dumps({
        "ple.shard_0.weight": {"dtype": "F8_E4M3", "shape": [asked["rows"], asked["row_bytes"]], "data_offsets": [0, size]},
        "ple.weight_scale": {"dtype": "BF16", "shape": [1], "data_offsets": [size, size + 2]},
    }).encode()  # fmt: skip
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.writelines(rows_of(asked))
        file.write(b"\x80\x3f")


def _listens() -> bool:
    try:
        socket.create_connection(("127.0.0.1", PORT), 1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()

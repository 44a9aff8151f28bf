"""Mooncake's Transfer Engine of this process: one engine, the memory registered with it, and reads that refuse all other memory.

The only module that calls the engine. Over TCP a read into unregistered memory works and over RDMA it does not, so every
destination is checked here. Mooncake's own listeners know no keys: see docs/operations.md for the network rule.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, ResourceExhausted, Unavailable

PROTOCOLS = ("tcp", "rdma")
INSTALL = "install it with `pip install treadle[mooncake]`, and on Debian `apt-get install libibverbs1 libnuma1 libcurl4 libssl3`"
TIMEOUT_SECONDS = "5"  # the least that the engine takes: a read that nobody answers holds its thread for so long, not for 30 s


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of a read: `length` bytes from `remote` at the owner to `local` here, both addresses."""

    local: int
    remote: int
    length: int


def load(module: str) -> Any:
    """`mooncake.engine` or `mooncake.store`. Raises Unavailable saying what to install."""
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", TIMEOUT_SECONDS)  # read when the first engine of a process is made
    try:
        return __import__(module, fromlist=["mooncake"])
    except ImportError as error:
        raise Unavailable(f"{module} cannot be loaded ({error}): {INSTALL}") from error


class Engine:
    """One engine. It and what is registered with it live as long as the process: the engine writes when it likes."""

    def __init__(self, host: str, protocol: str) -> None:
        """host: an address of this host that peers reach. Raises InvalidArgument, Unavailable if Mooncake is not there or does not start."""
        if protocol not in PROTOCOLS:
            raise InvalidArgument(f"protocol: {' or '.join(PROTOCOLS)}, got {protocol!r}")
        self.protocol, self._lock = protocol, threading.Lock()
        self._engine = load("mooncake.engine").TransferEngine()
        code = self._engine.initialize(host, "P2PHANDSHAKE", protocol, "")
        if code != 0:
            raise Unavailable(f"Mooncake's engine does not start on {host} by {protocol} (code {code}); its log on stderr says why")
        self.name = f"{host}:{self._engine.get_rpc_port()}"
        self._registered: dict[int, NDArray[np.uint8]] = {}

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Register a flat array; kept until `unregister`. Raises ResourceExhausted if the engine refuses it."""
        code = self._engine.register_memory(memory.ctypes.data, memory.nbytes)
        if code != 0:
            raise ResourceExhausted(
                f"Mooncake does not register {memory.nbytes} bytes (code {code}); over rdma raise the limit: ulimit -l unlimited"
            )
        with self._lock:
            self._registered[memory.ctypes.data] = memory

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """Peers can no longer reach it. Raises Unavailable, the memory then stays registered and held, if the engine refuses."""
        code = self._engine.unregister_memory(memory.ctypes.data)
        if code != 0:
            raise Unavailable(f"Mooncake does not unregister {memory.nbytes} bytes (code {code})")
        with self._lock:
            del self._registered[memory.ctypes.data]

    def read(self, owner: str, spans: Sequence[Span]) -> int:
        """Read from the engine called `owner`, without the GIL, for up to TIMEOUT_SECONDS; 0, or the engine's code.

        After another code than 0 the engine may go on writing to the destinations: they must never be used again.
        Raises InvalidArgument, and reads nothing, for a destination that is not registered.
        """
        self.check_registered(spans)
        if len(spans) == 1:
            (span,) = spans
            return int(self._engine.transfer_sync_read(owner, span.local, span.remote, span.length))
        return int(
            self._engine.batch_transfer_sync_read(
                owner, [span.local for span in spans], [span.remote for span in spans], [span.length for span in spans]
            )
        )

    def check_registered(self, spans: Sequence[Span]) -> None:
        """Raise InvalidArgument unless every destination lies in registered memory."""
        with self._lock:
            regions = [(start, start + memory.nbytes) for start, memory in self._registered.items()]
        for span in spans:
            if not any(start <= span.local and span.local + span.length <= end for start, end in regions):
                raise InvalidArgument(f"a destination of {span.length} bytes is not registered with Mooncake")

"""What the native doors of a process serve: versions by digest, published and withdrawn by whoever owns their memory.

Owns the references that a request in flight needs. Does not know where versions come from, nor when they should go.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.dataplane.extension import native_module
from treadle.kernels import HashPlan

_POLL_SECONDS = 0.002  # a request in flight ends within milliseconds


@dataclass(frozen=True, slots=True, eq=False)
class ServedLayer:
    """One table of a version.

    number: 0-based decoder layer
    plan:   how its tokens become rows
    rows:   u8 [N, row_bytes], C-contiguous, kept by the version while a request reads it; or a native RowStore
    held:   int64 [n, 2], rising ranges [first, last) of the rows that are here; None: all
    """

    number: int
    plan: HashPlan
    rows: NDArray[np.uint8] | Any
    held: NDArray[np.int64] | None = None


class Versions:
    """Versions that requests may read, by their hexadecimal digest. May be used from any thread.

    Raises Unavailable where the native extension was not built.
    """

    def __init__(self) -> None:
        self.native: Any = native_module().Versions()
        self._lock = threading.Lock()
        self._served: dict[str, object] = {}  # tables, kept while they are served
        self._withdrawn: dict[str, list[tuple[Any, object]]] = {}  # and while they are read

    def publish(self, version: str, fingerprint: bytes, layers: Sequence[ServedLayer]) -> None:
        """Serve a version from now on, or again. fingerprint: sha256 of its fields (`Fingerprint.digest`)."""
        native = native_module()
        served = [
            (layer.number, layer.plan, native.memory_rows(layer.rows, layer.held) if isinstance(layer.rows, np.ndarray) else layer.rows)
            for layer in layers
        ]  # fmt: skip
        with self._lock:
            self._hide(version)
            self._served[version] = served
            self.native.publish(bytes.fromhex(version), fingerprint, served)

    def withdraw(self, version: str) -> None:
        """Take a version out of sight at once; requests that have found it read it to their end."""
        with self._lock:
            self._hide(version)

    def read(self, version: str) -> bool:
        """True while a request reads a version that was withdrawn."""
        with self._lock:
            return self._is_read(version)

    def wait_unread(self, version: str, seconds: float) -> bool:
        """True once no request reads a withdrawn version: its memory may go. False after `seconds`."""
        until = time.monotonic() + seconds
        while self.read(version):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _hide(self, version: str) -> None:
        gone = self.native.withdraw(bytes.fromhex(version))
        if gone is not None:
            self._withdrawn.setdefault(version, []).append((gone, self._served.pop(version)))
        self._is_read(version)

    def _is_read(self, version: str) -> bool:
        left = [(gone, tables) for gone, tables in self._withdrawn.pop(version, []) if gone.read]
        if left:
            self._withdrawn[version] = left
        return bool(left)

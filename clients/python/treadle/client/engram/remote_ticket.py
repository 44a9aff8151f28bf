"""A ticket whose rows come from another process, piece by piece, by whatever carries them."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.ticket import Rows
from treadle.contract import Deadline, TreadleError


class RemoteCall(Protocol):
    """What brings the rows of one or more layers."""

    def leave(self) -> None:
        """One layer is no longer wanted; with the last one the call is over."""


class RemoteTicket:
    """Once it has ended, `out` is the caller's again and nothing is written to it. `call` is left when the layer is no longer wanted."""

    def __init__(self, call: RemoteCall, deadline: Deadline, out: Rows) -> None:
        self.deadline, self.submitted_ns, self.started_ns, self.finished_ns = deadline, time.monotonic_ns(), 0, 0
        self._call, self._flat = call, out.reshape(-1, out.shape[2])
        self._came = np.zeros(len(self._flat), dtype=np.bool_)
        self._ended, self._lock = threading.Event(), threading.Lock()
        self._cancelled, self._descriptor = False, -1
        self._failure: TreadleError | None = None

    @property
    def done(self) -> bool:
        """See LayerTicket."""
        return self.finished_ns > 0

    @property
    def rows_shape(self) -> tuple[int, int]:
        """Rows [T * C] and row_bytes."""
        return len(self._flat), self._flat.shape[1]

    def started(self) -> None:
        """Somebody works on it."""
        self.started_ns = self.started_ns or time.monotonic_ns()

    def take(self, start: int, piece: NDArray[np.uint8]) -> None:
        """Copy rows from `start` on into `out`, unless the ticket has ended; the lock keeps a canceller out meanwhile."""
        with self._lock:
            if not self._cancelled and not self._ended.is_set():
                self._flat[start : start + len(piece)] = piece
                self._came[start : start + len(piece)] = True

    def filled(self) -> None:
        """All rows were taken."""
        with self._lock:
            if self._cancelled or self._ended.is_set():
                return
            self.finished_ns = time.monotonic_ns()
            self._end()
        self._call.leave()

    def fail(self, failure: TreadleError) -> None:
        """It ends without its rows; nothing where it has ended already."""
        with self._lock:
            if not self._ended.is_set():
                self._failure = failure
                self._end()

    def wait(self, seconds: float) -> bool:
        """See LayerTicket. Raises what `fail` was given."""
        self._ended.wait(seconds)
        if self._failure is not None:
            raise self._failure
        return self.done

    def cancel(self) -> NDArray[np.bool_]:
        """See LayerTicket."""
        with self._lock:
            leaves, self._cancelled = not self._cancelled and not self.done, True
        if leaves:
            self._call.leave()
        return self._came

    def fileno(self) -> int:
        """See LayerTicket."""
        with self._lock:
            if self._descriptor < 0:
                self._descriptor = os.eventfd(1 if self._ended.is_set() else 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            return self._descriptor

    def close(self) -> None:
        """See LayerTicket."""
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def _end(self) -> None:
        """Called once, with the lock held."""
        self._ended.set()
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

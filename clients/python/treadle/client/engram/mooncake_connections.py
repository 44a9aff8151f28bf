"""Connections to one owner's mooncake door: kept between lookups, found again after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from treadle.client.engram.mooncake_control import SocketControl, StagingControl
from treadle.contract import DataLoss, Deadline, TreadleError

Resolve = Callable[[Deadline], str]


class Connections:
    """As many as there are lookups at once; each has the same version of the same model open. Thread-safe."""

    def __init__(self, resolve: Resolve, model: str, version: str, key: str | None) -> None:
        """resolve: address of the door, asked again when it does not answer where it was: a restart may have moved it"""
        self._resolve, self._model, self._version, self._key = resolve, model, version, key
        self._lock, self._idle = threading.Lock(), list[StagingControl]()
        self.closed, self._address = False, ""

    @contextmanager
    def one(self, deadline: Deadline) -> Iterator[StagingControl]:
        """A connection for one request; kept for the next one unless something went wrong that the owner did not say itself.

        Raises what `SocketControl` does.
        """
        control = self._take() or self._connect(deadline)
        intact = False
        try:
            yield control
            intact = True
        except TreadleError as error:
            intact = error.origin is not None and not isinstance(error, DataLoss)
            raise
        finally:
            with self._lock:
                keep = intact and not self.closed
                if keep:
                    self._idle.append(control)
            if not keep:
                control.close()

    def close(self) -> None:
        """Close those that nobody uses, and the others when their request has ended."""
        with self._lock:
            self.closed = True
            idle, self._idle = self._idle, []
        for control in idle:
            control.close()

    def _take(self) -> StagingControl | None:
        """One that nobody uses; those that the owner has closed meanwhile are put away, after a restart all of them."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                control = self._idle.pop()
            if control.alive():
                return control
            control.close()

    def _connect(self, deadline: Deadline) -> StagingControl:
        """A new one, to where the last one was if somebody who knows the version is still there."""
        if self._address:
            with suppress(TreadleError):
                return SocketControl(self._address, self._model, self._version, self._key, deadline)
        self._address = self._resolve(deadline)
        return SocketControl(self._address, self._model, self._version, self._key, deadline)

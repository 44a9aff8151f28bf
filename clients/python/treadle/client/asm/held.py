"""A version that a store holds for this process, as long as a call is open. Owns the call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm.records import Ref
from treadle.client.endpoint import Endpoint
from treadle.contract.errors import TreadleError, Unavailable

HOLD_SECONDS_MAX = 24 * 3600.0


class HeldVersion:
    """An open Hold call: what the shared lock is to a process that maps. A context manager; `close` lets go."""

    def __init__(self, endpoint: Endpoint, method: Callable[..., Any], ref: Ref, timeout_seconds: float) -> None:
        """Returns once the store holds it. timeout_seconds: until then. Raises NotFound, ResourceExhausted, Unavailable."""
        self._call = method(pb.HoldRequest(ref=ref.message), timeout=HOLD_SECONDS_MAX, metadata=endpoint.metadata)
        self._late = threading.Event()
        alarm = threading.Timer(timeout_seconds, self._end_late)
        alarm.daemon = True  # who leaves meanwhile does not wait for it
        alarm.start()  # the call stays open for long, its first answer must not take long
        try:
            answer = next(endpoint.answers_of(self._call), None)
        except TreadleError as error:
            if self._late.is_set():
                raise Unavailable(f"{endpoint.address} does not hold {ref} after {timeout_seconds:g} s; try again") from error
            raise
        finally:
            alarm.cancel()
        if answer is None:
            raise Unavailable(f"{endpoint.address} ended the hold of {ref} before it began")
        self.ref = Ref(answer.ref.name, answer.ref.version)

    @property
    def stands(self) -> bool:
        """True while the store holds the version for us; False after a restart of the store."""
        return bool(self._call.is_active())

    def close(self) -> None:
        """Let go."""
        self._call.cancel()

    def __enter__(self) -> HeldVersion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _end_late(self) -> None:
        self._late.set()
        self._call.cancel()

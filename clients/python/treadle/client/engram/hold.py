"""An open HoldModel call: what the shared lock is to a process that maps, for those who read by other ways."""

from __future__ import annotations

import logging
import threading
from typing import Any

from treadle.client.endpoint import Endpoint
from treadle.contract import ProtocolMismatch
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

log = logging.getLogger("treadle.client")
HOLD_SECONDS_MAX = 24 * 3600.0  # a hold is taken anew at the first lookup after that


class Hold:
    """The pool does not free the version while it stands. Taken again, by `ensure`, when the pool has restarted. Owns its channel."""

    def __init__(self, endpoint: Endpoint, model: str, version: str) -> None:
        self._endpoint, self._channel = endpoint, endpoint.channel()
        self._stub = pb_grpc.EngramPoolServiceStub(self._channel)
        self._ref = pb.ModelRef(model=model, version=version)
        self._call: Any = None
        self._refused = False
        self._lock = threading.Lock()

    @property
    def stands(self) -> bool:
        """True while the pool holds the version for us, or is too old to be asked."""
        call = self._call
        return self._refused or (call is not None and call.is_active())

    def ensure(self) -> None:
        """Raises NotFound if the version has gone, Unavailable if the pool does not answer."""
        with self._lock:
            if self.stands:
                return
            self._call = self._stub.HoldModel(
                pb.HoldModelRequest(ref=self._ref), timeout=HOLD_SECONDS_MAX, metadata=self._endpoint.metadata
            )
            self._await_answer()

    def close(self) -> None:
        """Let go."""
        self._channel.close()

    def _await_answer(self) -> None:
        """The call stays open for long, its first answer must not take long."""
        too_late = threading.Timer(self._endpoint.timeout_seconds, self._call.cancel)
        too_late.start()
        try:
            next(self._endpoint.answers_of(self._call), None)
        except ProtocolMismatch:  # an older pool: it frees a superseded version without asking
            log.warning(
                "this pool cannot hold a version for remote readers; a newer one can", extra={"pool": self._endpoint.address}
            )
            self._refused = True
        finally:
            too_late.cancel()

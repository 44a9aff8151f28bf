"""A pool of Engram memories over the SDK: opened version by version, and waited for at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramHandle, EngramPool
from treadle.client.engram.pool_types import ResidentModel
from treadle.contract.deadline import Deadline
from treadle.contract.errors import AccessDenied, DeadlineExceeded, NotFound, Unavailable

log = logging.getLogger("treadle.worker")
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.1, 2.0
LIST_SECONDS_MAX = 1.0  # a request waits for this listing; a pool that is well answers in milliseconds


@dataclass(frozen=True, slots=True)
class PoolOfMemories:
    """The MemoryPool of an endpoint. `transport`: a word of TransportChoice."""

    endpoint: Endpoint
    transport: str

    @property
    def address(self) -> str:
        """See MemoryPool."""
        return self.endpoint.address

    def resident(self) -> list[ResidentModel]:
        """See MemoryPool."""
        with EngramPool(self.endpoint) as pool:
            return pool.list_models(LIST_SECONDS_MAX)

    def open(self, model: str, version: str) -> EngramHandle:
        """See MemoryPool. The handle outlives the pool's process, except by rpc."""
        with EngramPool(self.endpoint) as pool:
            return pool.open(model, version, transport=self.transport)

    def read_fusion(self, model: str, version: str) -> bytes:
        """See MemoryPool."""
        with EngramPool(self.endpoint) as pool:
            return pool.read_fusion(model, version)


def open_engram(
    endpoint: Endpoint, model: str, version: str, transport: str, seconds_max: float, sleep: Callable[[float], None] = time.sleep
) -> EngramHandle:
    """A handle on a version (empty: the current one), tried again while the pool or the model is not there yet.

    The handle is pinned: it goes on working, mapped, when the pool dies. Raises Unavailable, NotFound or DeadlineExceeded
    with the last refusal once `seconds_max` are over, and what cannot get better (fingerprint, protocol, corrupt data) at once.
    """
    deadline, pause = Deadline.after(seconds_max), RETRY_SECONDS_MIN
    while True:
        try:
            with EngramPool(endpoint) as pool:
                return pool.open(model, version or None, transport=transport)
        except (Unavailable, NotFound, DeadlineExceeded) as error:
            if deadline.remaining_seconds() <= pause:
                text = f"engram model {model!r} at {endpoint.address}: not there after {seconds_max:.0f} s: {error}"
                raise type(error)(text) from error
            log.info("waiting for the engram pool", extra={"pool": endpoint.address, "model": model, "reason": str(error)})
        sleep(pause)
        pause = min(2 * pause, RETRY_SECONDS_MAX)


def read_key(path: Path | None, setting: str = "engram_key_file") -> str | None:
    """The key in a file: its first line that is neither empty nor a comment. Raises AccessDenied, naming the setting, if there is none."""
    if path is None:
        return None
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise AccessDenied(f"{setting}: cannot read {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise AccessDenied(f"{setting}: {path} holds no key")
    return keys[0]

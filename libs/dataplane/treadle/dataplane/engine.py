"""What an implementation of the queue is: the native one, or `fallback`; both are made here."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Windows
from treadle.dataplane import fallback
from treadle.dataplane.admission import Verdict
from treadle.dataplane.extension import Implementation, native_module
from treadle.dataplane.fallback_admission import QueueOptions
from treadle.dataplane.tenants import Tenants
from treadle.kernels import HashPlan


class EngineTicket(Protocol):
    """A ticket as an implementation gives it; see `queue.Ticket`."""

    @property
    def submitted_ns(self) -> int: ...
    @property
    def started_ns(self) -> int: ...
    @property
    def finished_ns(self) -> int: ...
    @property
    def ended(self) -> bool: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def fault(self) -> int: ...
    @property
    def predicted_ns(self) -> int: ...
    @property
    def busy_ns(self) -> int: ...
    def wait(self, seconds: float) -> bool: ...
    def cancel(self) -> int: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


class Engine(Protocol):
    """Queue and threads of an implementation. What it is given has been checked."""

    def submit_lookup(
        self, plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8], deadline_ns: int, tenant: int, /
    ) -> EngineTicket | Verdict: ...
    def submit_gather(
        self, table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8], deadline_ns: int, tenant: int, /
    ) -> EngineTicket | Verdict: ...
    def reserve(self, name: str, total: int, bytes_per_second: int, until_ns: int, /) -> bool: ...
    def pace_ns(self, byte_count: int, /) -> int: ...
    def row_ns(self, tier: int, row_bytes: int, rows: int, /) -> float: ...
    def stats(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


def make_engine(implementation: Implementation, options: QueueOptions, tenants: Tenants) -> Engine:
    """Start its threads.

    Raises Unavailable where the native extension was not built, OSError or RuntimeError when the system grants no more threads.
    """
    if implementation == "python":
        return fallback.Engine(options, tenants.ledger)
    engine: Engine = native_module().Engine(*options, tenants.ledger)
    return engine

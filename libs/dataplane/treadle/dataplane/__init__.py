"""Moving parts: lookups and gathers on worker threads, earliest deadline first.

Owns queue, threads, tickets, admission and tenants. Leaf loops are `treadle.kernels`; transports, policies and segments belong to the
callers. `TREADLE_DATAPLANE=python` takes the Python threads of `fallback`, `TREADLE_DATAPLANE=native` refuses to start without the
extension.
"""

from treadle.dataplane.admission import PREDICTION_ERROR_PARTS, Tier
from treadle.dataplane.extension import IMPLEMENTATION, Implementation
from treadle.dataplane.queue import (
    HINTS_MAX,
    PIECE_ROWS_MAX,
    RESERVE_SECONDS_MAX,
    TICKETS_MAX,
    WORKERS_MAX,
    DeadlineQueue,
    Reserved,
    Ticket,
)
from treadle.dataplane.remote import RemoteLayer, RemoteRows, RemoteTicket, Route, remote_stats
from treadle.dataplane.socket import SocketServer
from treadle.dataplane.tenants import NOBODY, SLACK_SECONDS, TENANTS_MAX, TenantFigures, TenantLimits, Tenants
from treadle.dataplane.versions import ServedLayer, Versions

__all__ = [
    "HINTS_MAX", "IMPLEMENTATION", "NOBODY", "PIECE_ROWS_MAX", "PREDICTION_ERROR_PARTS", "RESERVE_SECONDS_MAX", "SLACK_SECONDS",
    "TENANTS_MAX", "TICKETS_MAX", "WORKERS_MAX", "DeadlineQueue", "Implementation", "RemoteLayer", "RemoteRows", "RemoteTicket",
    "Reserved", "Route", "ServedLayer", "SocketServer", "TenantFigures", "TenantLimits", "Tenants", "Ticket", "Tier", "Versions",
    "remote_stats",
]  # fmt: skip

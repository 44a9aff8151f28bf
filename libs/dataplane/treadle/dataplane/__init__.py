"""Moving parts: lookups and gathers on worker threads, earliest deadline first.

Owns queue, threads and tickets. Leaf loops are `treadle.kernels`; transports, policies and segments belong to the callers.
`TREADLE_DATAPLANE=python` takes the Python threads of `fallback`, `TREADLE_DATAPLANE=native` refuses to start without the extension.
"""

from treadle.dataplane.queue import (
    IMPLEMENTATION,
    PIECE_ROWS_MAX,
    TICKETS_MAX,
    WORKERS_MAX,
    DeadlineQueue,
    Implementation,
    Ticket,
)
from treadle.dataplane.versions import ServedLayer, Versions

__all__ = [
    "IMPLEMENTATION", "PIECE_ROWS_MAX", "TICKETS_MAX", "WORKERS_MAX", "DeadlineQueue", "Implementation", "ServedLayer", "Ticket",
    "Versions",
]  # fmt: skip

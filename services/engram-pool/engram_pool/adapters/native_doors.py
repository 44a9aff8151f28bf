"""The native doors of this process: one queue, one set of versions, and the listeners that read them.

Owns what requests at the doors read. Does not decide when a version comes or goes (the pool).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from engram_pool.domain.ports import Door, Doors, NoDoors, StoredVersion
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, ServedLayer, Tenants, Versions
from treadle.kernels import HashPlan

log = logging.getLogger("engram_pool")


class NativeDoors:
    """Doors over the native data plane. Raises Unavailable where it was not built.

    workers:    threads that gather
    piece_rows: rows of one piece, what an earlier deadline may have to wait for
    admission:  refuse at once what would be late
    tenants:    whose quotas and shares requests are taken off; None: one without limits
    """

    def __init__(
        self, *, workers: int, tickets_max: int, piece_rows: int = 1024, admission: bool = False, tenants: Tenants | None = None
    ) -> None:
        self.versions = Versions()
        self.queue = DeadlineQueue(
            workers=workers,
            tickets_max=tickets_max,
            piece_rows=piece_rows,
            admission=admission,
            tenants=tenants,
            implementation="native",
        )

    @property
    def open_doors(self) -> Sequence[Door]:
        """See Doors."""
        return ()

    def publish(self, stored: StoredVersion) -> None:
        """See Doors."""
        layers = []
        for number, segment in stored.segments.items():
            plan = HashPlan.from_model(stored.model, number, segment.token_map)
            held = None if segment.held is None else np.array(segment.held or [(0, 0)], dtype=np.int64)  # none: an empty range
            layers.append(ServedLayer(number, plan, segment.rows, held))
        self.versions.publish(stored.version, stored.model.fingerprint.digest, layers)

    def withdraw(self, stored: StoredVersion) -> None:
        """See Doors."""
        self.versions.withdraw(stored.version)

    def read(self, stored: StoredVersion) -> bool:
        """See Doors."""
        return self.versions.read(stored.version)

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """See Doors."""
        self.versions.withdraw(stored.version)
        if self.versions.wait_unread(stored.version, seconds):
            return True
        log.warning("requests still read a version that is to go", extra={"model": stored.model.name, "version": stored.version})
        self.publish(stored)
        return False

    def drain(self) -> None:
        """See Doors."""

    def close(self) -> None:
        """See Doors."""
        self.queue.close()


def open_native_doors(*, workers: int, tickets_max: int, admission: bool, tenants: Tenants) -> tuple[Doors, DeadlineQueue | None]:
    """The native doors of a pool and their queue; none, with a warning, where the extension was not built."""
    if IMPLEMENTATION != "native":
        log.warning("the native data plane was not built: rows leave this process by gRPC alone")
        return NoDoors(), None
    doors = NativeDoors(workers=workers, tickets_max=tickets_max, admission=admission, tenants=tenants)
    return doors, doors.queue

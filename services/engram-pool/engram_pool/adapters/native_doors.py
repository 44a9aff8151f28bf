"""The native doors of this process: one queue, one set of versions, and the listeners that read them.

Owns what requests at the doors read. Does not decide when a version comes or goes (the pool).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_pool.adapters.queued_hints import QueuedHint
from engram_pool.adapters.row_stores import RowStores
from engram_pool.domain.ports import Nearing, NoDoors
from engram_pool.domain.storing import StoredVersion
from treadle.contract import ResourceExhausted, Unavailable
from treadle.contract.owners import Door
from treadle.contract.warm_state import WarmState
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, ServedLayer, SocketServer, Tenants, Versions
from treadle.dataplane.dedup import memory_rows
from treadle.dataplane.ring import RingServer
from treadle.kernels import HashPlan

log = logging.getLogger("engram_pool")


class NativeDoors:
    """Doors over the native data plane. Raises Unavailable where it was not built.

    workers:    threads that gather
    piece_rows: rows of one piece, what an earlier deadline may have to wait for
    admission:  refuse at once what would be late
    tenants:    whose quotas and shares requests are taken off; None: one without limits
    piece_seconds: the same as time
    stores:     where the rows of a segment are read; None: in its mapping
    """

    def __init__(
        self, *, workers: int, tickets_max: int, piece_rows: int = 1024, admission: bool = False, tenants: Tenants | None = None,
        stores: RowStores | None = None, piece_seconds: float = 100e-6,
    ) -> None:  # fmt: skip
        self.versions = Versions()
        self.stores = stores or RowStores()
        self.ring: RingServer | None = None
        self._shared_caches: set[int] = set()  # descriptors that the ring hands on
        self._stores: dict[tuple[str, int], Any] = {}  # of what is served, for hints
        self.socket: SocketServer | None = None
        self.queue = DeadlineQueue(
            workers=workers,
            tickets_max=tickets_max,
            piece_rows=piece_rows,
            piece_seconds=piece_seconds,
            admission=admission,
            tenants=tenants,
            implementation="native",
        )

    @property
    def open_doors(self) -> Sequence[Door]:
        """See Doors. The ring, then Unix sockets: they cost less."""
        ring = [] if self.ring is None else [Door("ring", f"unix:{self.ring.path}")]
        addresses = () if self.socket is None else self.socket.addresses
        return ring + [
            Door("socket", address) for address in sorted(addresses, key=lambda address: not address.startswith("unix:"))
        ]

    def listen(self, addresses: Sequence[str], *, connections_max: int, reply_bytes_max: int) -> None:
        """Open the socket door; nothing for no addresses. Once only. Raises InvalidArgument and Unavailable naming the address."""
        if addresses:
            self.socket = SocketServer(
                self.queue, self.versions, addresses, connections_max=connections_max, reply_bytes_max=reply_bytes_max
            )

    def open_ring(self, path: str, *, clients_max: int, arena_bytes_max: int, users: Sequence[int]) -> None:
        """Open the shared-memory ring, once. Raises InvalidArgument and Unavailable naming the path."""
        self.ring = RingServer(
            path, self.queue, self.versions, clients_max=clients_max, arena_bytes_max=arena_bytes_max, users=users
        )
        self.share_hot_rows()

    def publish(self, stored: StoredVersion) -> None:
        """See Doors."""
        layers = []
        for number, segment in stored.segments.items():
            plan = HashPlan.from_model(stored.model, number, segment.token_map)
            held = None if segment.held is None else np.array(segment.held or [(0, 0)], dtype=np.int64)  # none: an empty range
            rows = self.stores.store(stored.version, number, segment, held)
            self._stores[stored.version, number] = rows
            layers.append(ServedLayer(number, plan, rows, held))
        self.versions.publish(stored.version, stored.model.fingerprint.digest, layers)
        self.share_hot_rows()

    def withdraw(self, stored: StoredVersion) -> None:
        """See Doors."""
        self.versions.withdraw(stored.version)
        for layer in stored.segments:
            self._stores.pop((stored.version, layer), None)
        self.stores.retire(stored.version, stored.segments)

    def read(self, stored: StoredVersion) -> bool:
        """See Doors."""
        return self.versions.read(stored.version)

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """See Doors."""
        self.withdraw(stored)
        if self.versions.wait_unread(stored.version, seconds):
            return True
        log.warning("requests still read a version that is to go", extra={"model": stored.model.name, "version": stored.version})
        self.publish(stored)
        return False

    def brings_nearer(self, stored: StoredVersion, warm: WarmState) -> bool:
        """See Nearness: from a disk, and into pages that are not entered yet."""
        return self.stores.on_disk or warm is not WarmState.WARM

    def bring_near(self, stored: StoredVersion, layer: int, rows: NDArray[np.int64]) -> Nearing | None:
        """See Nearness. Queued without a deadline, in pieces: a request waits for one of them at most."""
        store = self._stores.get((stored.version, layer))
        if store is None:
            raise Unavailable(f"{stored.model.name} {stored.version} is not served any more")
        try:
            return QueuedHint(self.queue.submit_hint(memory_rows(store, None) if isinstance(store, np.ndarray) else store, rows))
        except ResourceExhausted:
            return None

    def drain(self) -> None:
        """See Doors."""
        if self.socket is not None:
            self.socket.drain()

    def close(self) -> None:
        """See Doors."""
        if self.ring is not None:
            self.ring.close()
        if self.socket is not None:
            self.socket.close()
        self.queue.close()

    def share_hot_rows(self) -> None:
        """Let the ring's clients map caches that have come."""
        if self.ring is None:
            return
        for descriptor in set(self.stores.hot_descriptors) - self._shared_caches:
            self.ring.add_hot_rows(descriptor)
            self._shared_caches.add(descriptor)


def open_native_doors(
    *, workers: int, tickets_max: int, admission: bool, tenants: Tenants, stores: Callable[[], RowStores] = RowStores
) -> tuple[NativeDoors | NoDoors, DeadlineQueue | None]:
    """The native doors of a pool and their queue; none, with a warning, where the extension was not built."""
    if IMPLEMENTATION != "native":
        log.warning("the native data plane was not built: rows leave this process by gRPC alone")
        return NoDoors(), None
    doors = NativeDoors(workers=workers, tickets_max=tickets_max, admission=admission, tenants=tenants, stores=stores())
    return doors, doors.queue

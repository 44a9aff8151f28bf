"""Rows by the shared-memory ring of this host's pool: for processes that may not map the tables, or want the host's hot rows.

Owns the connection, taken anew when the pool has restarted, and the hold that keeps the version from being freed. Rows go straight
into an `out` that `buffer` made; into any other they are copied once more.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.client.endpoint import Endpoint
from treadle.client.engram.hold import Hold
from treadle.client.engram.pool_types import OpenedModel
from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.client.engram.windows_pieces import token_pieces
from treadle.contract import Deadline, EngramModel, NotFound, Transport, TreadleError, Unavailable, Windows
from treadle.contract.policy import WAIT_SECONDS_MAX, WaitPolicy
from treadle.dataplane import DeadlineQueue
from treadle.dataplane.hot_rows import HotRowsReader
from treadle.dataplane.ring import TOKENS_MAX, RingCall, RingClient
from treadle.dataplane.socket import token_digest
from treadle.kernels.arguments import row_out_of_range

PATIENCE_SECONDS = WaitPolicy().wait_seconds_max  # rows that are late by less than that are still taken by most callers
HOLD_CHECK_SECONDS = 1.0  # between two looks whether the pool still holds the version


class RingSource:
    """Rows of one version through the ring at `path`.

    arena_bytes: memory shared with the pool, for buffers and requests in flight; 0: as much as the pool gives
    Raises Unavailable, AccessDenied, ResourceExhausted: what the first connection met.
    """

    def __init__(self, endpoint: Endpoint, model: EngramModel, version: str, path: str, *, arena_bytes: int = 0) -> None:
        self.transport = Transport.RING
        self._row_bytes, self._digest, self._version = model.row.bytes, bytes.fromhex(version), version
        self._token_bytes = model.columns * model.row.bytes  # of one layer
        self._row_counts = {layer: model.table(layer).rows for layer in model.layers}
        self._path, self._token, self._arena_bytes = path, token_digest(endpoint.key), arena_bytes
        self._timeout_seconds, self._lock, self._holding = endpoint.timeout_seconds, threading.Lock(), threading.Lock()
        self._connecting = threading.Lock()
        self._hold = Hold(endpoint, model.name, version)
        try:
            self._hold.ensure()
            self._client, self._hot = self._connect()
        except TreadleError:
            self._hold.close()
            raise
        self._hold_checked = time.monotonic()

    def buffer(self, shape: tuple[int, ...]) -> Rows:
        """An `out` in memory shared with the pool. Raises ResourceExhausted when the arena is full."""
        return self._connected().buffer(shape)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        client, until = self._connected(), Deadline.after(self._timeout_seconds)
        row_count, ids = self._row_counts[layer], np.ascontiguousarray(rows)
        if self._hot is None or not self._gather_hot(self._hot, client, layer, ids, out, until):
            client.gather(self._digest, layer, row_count, ids, out, until)

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        client, until = self._connected(), Deadline.after(self._timeout_seconds)
        tokens_max = max(1, min(TOKENS_MAX, client.arena_bytes // 2 // max(1, len(layers) * self._token_bytes)))
        for first, piece in token_pieces(windows, tokens_max):
            last = first + piece.token_count
            self._lookup_piece(client, piece, {layer: outs[layer][first:last] for layer in layers}, until)

    def _lookup_piece(self, client: RingClient, windows: Windows, outs: Mapping[int, Rows], until: Deadline) -> None:
        calls = client.submit_lookup(self._digest, windows, outs, dict.fromkeys(outs, until))
        try:
            for call in calls.values():
                _whole(call, until)
        except TreadleError:
            for call in calls.values():
                call.cancel()  # `outs` are the caller's again
            raise

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource. One request for each layer, one wake-up for all; nothing is gathered here, so no queue is needed."""
        client = self._connected_already()
        patient = {layer: _later(deadline) for layer, deadline in deadlines.items()}
        calls = client.submit_lookup(self._digest, windows, outs, patient)
        for layer, call in calls.items():
            call.deadline = deadlines[layer]
        return {layer: call for layer, call in calls.items()}  # noqa: C416 - widens the value type

    def page_bytes(self) -> int:
        """See RowSource: the tables are elsewhere."""
        return 0

    def close(self) -> None:
        """See RowSource. Buffers stay readable."""
        self._client.close()
        self._hold.close()

    def _connected(self) -> RingClient:
        """The connection, a new one if the pool has gone meanwhile. Raises Unavailable while it is away."""
        client, now = self._client, time.monotonic()
        if client.lost:
            with self._lock:
                if self._client.lost:
                    self._client.close()
                    self._client, self._hot = self._connect()
                client = self._client
        if now >= self._hold_checked + HOLD_CHECK_SECONDS:
            self._hold_checked = now
            self._keep_hold()
        return client

    def _connected_already(self) -> RingClient:
        """As `_connected`, for who must not wait: a lost connection is taken anew beside the caller. Raises Unavailable meanwhile."""
        if not self._client.lost:
            return self._connected()
        if self._connecting.acquire(blocking=False):
            threading.Thread(target=self._connect_again, name="treadle-ring-connect", daemon=True).start()
        raise Unavailable(f"ring {self._path}: the pool has gone or has restarted; connecting again, ask again soon")

    def _connect_again(self) -> None:
        try:
            self._connected()
        except TreadleError:  # the pool is away: the next prefetch starts another try
            pass
        finally:
            self._connecting.release()

    def _keep_hold(self) -> None:
        """A pool that has restarted is asked to hold again, beside the lookup: rows do not wait for it."""
        if not self._hold.stands and self._holding.acquire(blocking=False):
            threading.Thread(target=self._hold_again, name="treadle-hold", daemon=True).start()

    def _hold_again(self) -> None:
        try:
            self._hold.ensure()
        except TreadleError:  # the pool is away, or the version: lookups say so themselves
            pass
        finally:
            self._holding.release()

    def _connect(self) -> tuple[RingClient, HotRowsReader | None]:
        client = RingClient(self._path, token=self._token, arena_bytes=self._arena_bytes, seconds=self._timeout_seconds)
        caches = [HotRowsReader(descriptor) for descriptor in client.hot_rows]
        return client, next((cache for cache in caches if cache.row_bytes == self._row_bytes), None)

    def _gather_hot(
        self, hot: HotRowsReader, client: RingClient, layer: int, rows: NDArray[np.int64], out: Rows, until: Deadline
    ) -> bool:
        """Take what is hot from the host's cache and ask for the rest; False, and nothing done, where it has nothing of this table."""
        table, row_count = hot.table(self._version, layer), self._row_counts[layer]
        if table is None:
            return False
        bad = (rows < 0) | (rows >= row_count)
        if bad.any():  # before anything is written
            raise row_out_of_range(rows, int(np.argmax(bad)), row_count)
        flat, target = rows.reshape(-1), out.reshape(-1, out.shape[-1])
        misses = hot.probe(table, flat, target)
        if misses.size:
            rest = np.empty((misses.size, target.shape[1]), np.uint8)
            client.gather(self._digest, layer, row_count, flat[misses], rest, until)
            target[misses] = rest
        return True


def ring_source(endpoint: Endpoint, opened: OpenedModel, *, arena_bytes: int = 0) -> RingSource:
    """Open the ring of a pool on this host. Raises NotFound where it has none, and what RingSource raises."""
    model = opened.resident.model
    for door in opened.doors:
        if door.transport == Transport.RING:
            path = door.address.removeprefix("unix:")
            return RingSource(endpoint, model, opened.resident.version, path, arena_bytes=arena_bytes)
    raise NotFound(f"{endpoint.address} has no ring; see its setting ring_listen")


def _later(deadline: Deadline) -> Deadline:
    """What the pool is told: it refuses only what comes too late even for a caller who waits."""
    return Deadline(min(deadline.at_ns + round(PATIENCE_SECONDS * 1e9), (1 << 63) - 1))


def _whole(call: RingCall, until: Deadline) -> None:
    """Wait for it. Raises what ended it, DeadlineExceeded when the time was over; nobody writes to its rows then."""
    while not call.wait(min(WAIT_SECONDS_MAX, until.remaining_seconds())):
        if until.remaining_seconds() == 0:
            call.cancel()
            until.check(before="all rows were there")

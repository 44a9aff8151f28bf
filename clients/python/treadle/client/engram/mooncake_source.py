"""Rows by Mooncake: the owner gathers them into a slot of its own, one read brings them here.

Owns retries within the caller's time, and the checks that make rows believable: length, version
and CRC32C of what came. Rows pass through a slot of ours into `out`: Mooncake may write to a destination long after a read has
failed, and `out` is the caller's. A few rows by id are read straight from the owner's table (`direct_rows`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treadle.client.endpoint import Endpoint
from treadle.client.engram.mooncake_connections import Connections, Resolve
from treadle.client.engram.mooncake_control import StagingControl
from treadle.client.engram.mooncake_landing import Landing, landing
from treadle.client.engram.mooncake_wire import IDENTITY_BYTES, Staged
from treadle.client.engram.pool_types import OpenedModel, opened_model
from treadle.client.engram.remote_ticket import RemoteTicket
from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.client.engram.windows_pieces import token_pieces
from treadle.contract import (
    DataLoss,
    Deadline,
    DeadlineExceeded,
    EngramModel,
    InvalidArgument,
    ResourceExhausted,
    RowOutOfRange,
    Transport,
    TreadleError,
    Unavailable,
    Windows,
)
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import DeadlineQueue
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc
from treadle.kernels import crc32c

CALLS_MAX = 8  # lookups in flight of one handle
DIRECT_ROWS = 4  # over TCP: beyond, asking the owner to gather is faster
DIRECT_SECONDS_MAX = 1.0  # the owner keeps a table mapped for twice as long after it has closed a connection
RETRY_SECONDS = 0.05  # before the second try, doubled each time: the engine needs a pause after a rejected batch
RETRY_SECONDS_MAX = 0.8
TRY_SECONDS_MAX = 2.0  # one try: an owner that hangs is asked again, perhaps elsewhere, and an abandoned lookup ends


class MooncakeSource:
    """Rows of one version from one owner. Owns its connections and threads; engine and slots are the process's."""

    def __init__(
        self, resolve: Resolve, model: EngramModel, version: str, *, key: str | None, timeout_seconds: float, direct_rows: int = DIRECT_ROWS
    ) -> None:  # fmt: skip
        """Connect once.

        resolve:     see Connections
        direct_rows: read up to so many rows of a `gather` straight from the owner's table; 0: never
        Raises Unavailable if Mooncake is not installed or the owner does not answer, NotFound, AccessDenied.
        """
        self.transport = Transport.MOONCAKE
        self._model, self._timeout_seconds, self.direct_rows = model, timeout_seconds, direct_rows
        self._connections = Connections(resolve, model.name, version, key)
        with self._connections.one(Deadline.after(timeout_seconds)) as control:
            self._landing: Landing = landing(control.host(), control.owner.protocol)
            self._slot_bytes = min(control.owner.slot_bytes, self._landing.slot_bytes)  # the most that one request can bring
        self._calls = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="treadle-lookup")
        self._places = threading.Semaphore(CALLS_MAX)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        ids, flat = rows.reshape(-1), out.reshape(-1, out.shape[-1])
        self._check_ids(layer, ids)
        deadline = Deadline.after(self._timeout_seconds)
        if 0 < ids.size <= self.direct_rows and self._retried(partial(self._direct, layer, ids, flat), deadline):
            return
        step = max(1, self._slot_bytes // flat.shape[1])
        for first in range(0, ids.size, step):
            piece = ids[first : first + step]
            ask = partial(_gather_piece, layer, piece)
            take = partial(_put, flat[first : first + step])
            self._retried(partial(self._bring, ask, piece.size * flat.shape[1], take), deadline)

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        deadline = Deadline.after(self._timeout_seconds)
        flats = {layer: outs[layer].reshape(-1, outs[layer].shape[2]) for layer in layers}

        def take(layer: int, first: int, rows: NDArray[np.uint8]) -> None:
            flats[layer][first : first + len(rows)] = rows

        for piece in self._pieces(layers, windows):
            self._retried(partial(self._bring_piece, *piece, take), deadline)

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource. Layers travel in the order of their deadlines; nothing is gathered here, so no queue is needed."""
        layers = sorted(deadlines, key=lambda layer: deadlines[layer])
        if not self._places.acquire(blocking=False):
            raise ResourceExhausted(f"{CALLS_MAX} lookups in flight, the limit of one handle", RETRY_SECONDS)
        call = _Call(len(layers))
        tickets = {layer: RemoteTicket(call, deadlines[layer], outs[layer]) for layer in layers}
        try:
            work = self._calls.submit(self._run, windows, tickets, call)
        except RuntimeError as error:
            self._places.release()
            raise Unavailable("this handle is closed") from error
        work.add_done_callback(partial(self._call_ended, tickets))
        return dict(tickets)

    def page_bytes(self) -> int:
        """See RowSource: the tables are elsewhere."""
        return 0

    def close(self) -> None:
        """See RowSource. Engine and slots stay: Mooncake may still write to them."""
        self._connections.close()
        self._calls.shutdown(wait=True, cancel_futures=True)

    # -- one call -------------------------------------------------------------------------------------------------------

    def _run(self, windows: Windows, tickets: Mapping[int, RemoteTicket], call: _Call) -> None:
        """A submitted lookup, tried again while the owner restarts, until nobody wants it."""
        deadline, left = Deadline.after(WAIT_SECONDS_MAX), dict.fromkeys(tickets, windows.token_count)
        for ticket in tickets.values():
            ticket.started()
            if not windows.token_count:
                ticket.filled()

        def take(layer: int, first: int, rows: NDArray[np.uint8]) -> None:
            tickets[layer].take(first, rows)

        try:
            for layers, first, piece in self._pieces(list(tickets), windows):
                self._retried(partial(self._bring_piece, layers, first, piece, take), deadline, call.abandoned)
                for layer in layers:
                    left[layer] -= piece.token_count
                    if not left[layer]:
                        tickets[layer].filled()
        except TreadleError as error:
            for ticket in tickets.values():
                ticket.fail(error)

    def _call_ended(self, tickets: Mapping[int, RemoteTicket], work: Future[None]) -> None:
        """The place is free; whoever still waits is told, also where the handle was closed or we have a bug."""
        self._places.release()
        cause = None if work.cancelled() else work.exception()
        for ticket in tickets.values():
            ticket.fail(Unavailable(f"the lookup ended without its rows: {cause or 'the handle was closed'}"))

    def _pieces(self, layers: Sequence[int], windows: Windows) -> Iterator[tuple[Sequence[int], int, Windows]]:
        """(layers, first token, windows) of each request: all layers in one where they fit a slot, else layer after layer."""
        token_bytes = self._model.columns * self._model.row.bytes
        tokens_max = self._slot_bytes // token_bytes
        if tokens_max == 0:
            raise InvalidArgument(f"a token's rows take {token_bytes} bytes, a slot of the owner {self._slot_bytes}")
        together = windows.token_count * len(layers) <= tokens_max
        for group in [layers] if together else [[layer] for layer in layers]:
            for first, piece in token_pieces(windows, tokens_max):
                yield group, first, piece

    def _bring_piece(
        self, layers: Sequence[int], first: int, windows: Windows, take: Callable[[int, int, NDArray[np.uint8]], None],
        deadline: Deadline,
    ) -> bool:  # fmt: skip
        count, row_bytes = windows.token_count * self._model.columns, self._model.row.bytes

        def put(data: NDArray[np.uint8]) -> None:
            for place, layer in enumerate(layers):
                rows = data[place * count * row_bytes : (place + 1) * count * row_bytes]
                take(layer, first * self._model.columns, rows.reshape(count, row_bytes))

        ask = partial(_lookup_piece, layers, windows)
        return self._bring(ask, count * row_bytes * len(layers), put, deadline)

    def _bring(
        self,
        ask: Callable[[StagingControl, Deadline], Staged],
        length: int,
        put: Callable[[NDArray[np.uint8]], None],
        deadline: Deadline,
    ) -> bool:
        """Have rows staged, read them, check them, hand them over."""
        with self._connections.one(deadline) as control:
            lease = Deadline.after(control.owner.lease_seconds)  # from before the owner begins to count
            staged = ask(control, deadline)
            if staged.length != length:
                raise DataLoss(f"{control.owner.engine} staged {staged.length} bytes of rows, {length} asked for")
            with self._landing.read(control.owner.engine, [(staged.address, length)], min(deadline, lease)) as data:
                if crc32c(data) != staged.crc32c:
                    raise Unavailable(f"what came from {control.owner.engine} is not what it staged: CRC32C differs")
                put(data)
            control.release(staged)
        return True

    def _direct(self, layer: int, ids: NDArray[np.int64], out: NDArray[np.uint8], deadline: Deadline) -> bool:
        """Read rows from the owner's table; False where it is not registered. Believed only with the owner's identity beside them."""
        with self._connections.one(deadline) as control:
            owner = control.owner
            table, row_bytes = owner.tables.get(layer), self._model.row.bytes
            if table is None:
                return False
            if table.rows != self._model.table(layer).rows or table.row_bytes != row_bytes:
                raise DataLoss(f"{owner.engine} has {table.rows} rows of {table.row_bytes} bytes registered for layer {layer}")
            if not control.alive():
                raise Unavailable(f"{owner.engine} has closed the version")
            trusted = Deadline.after(DIRECT_SECONDS_MAX)
            pieces = [(table.address + row * row_bytes, row_bytes) for row in ids.tolist()]
            with self._landing.read(
                owner.engine, [*pieces, (owner.identity_address, IDENTITY_BYTES)], min(deadline, trusted)
            ) as data:
                if data[-IDENTITY_BYTES:].tobytes() != owner.identity:
                    raise Unavailable(f"{owner.engine} is another owner now, or has let the table go")
                out[:] = data[:-IDENTITY_BYTES].reshape(out.shape)
        return True

    # -- retries --------------------------------------------------------------------------------------------------------

    def _retried(self, act: Callable[[Deadline], bool], deadline: Deadline, abandoned: threading.Event | None = None) -> bool:
        """`act(its deadline)`, again after Unavailable and full slots, with pauses that grow, while there is time and somebody who wants it."""
        stop, pause = abandoned or threading.Event(), RETRY_SECONDS
        while True:
            if stop.is_set():
                raise Unavailable("the lookup was abandoned")
            try:
                return act(min(deadline, Deadline.after(TRY_SECONDS_MAX)))
            except (Unavailable, ResourceExhausted, DeadlineExceeded) as error:
                after = pause
                if isinstance(error, ResourceExhausted):
                    if error.retry_after_seconds is None:
                        raise
                    after = error.retry_after_seconds
                if self._connections.closed or deadline.remaining_seconds() <= after:
                    raise
                stop.wait(after)
                pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _check_ids(self, layer: int, ids: NDArray[np.int64]) -> None:
        rows = self._model.table(layer).rows
        bad = np.flatnonzero((ids < 0) | (ids >= rows))
        if bad.size:
            raise RowOutOfRange(f"row {int(ids[bad[0]])} at position {int(bad[0])}: layer {layer} has rows 0 to {rows - 1}")


def mooncake_source(endpoint: Endpoint, opened: OpenedModel) -> MooncakeSource:
    """Rows of an opened version by the mooncake door of its pool, which is asked again where the door is when it does not answer.

    Raises NotFound if the pool has no such door, Unavailable if Mooncake is not installed here.
    """
    model, version = opened.resident.model, opened.resident.version
    known = [opened.door(Transport.MOONCAKE).address]  # believed once

    def resolve(deadline: Deadline) -> str:
        if known:
            return known.pop()
        request = pb.OpenModelRequest(ref=pb.ModelRef(model=model.name, version=version))
        with closing(endpoint.channel()) as channel:
            answer = endpoint.call(
                pb_grpc.EngramPoolServiceStub(channel).OpenModel, request, max(0.001, deadline.remaining_seconds())
            )
        return opened_model(answer).door(Transport.MOONCAKE).address

    return MooncakeSource(resolve, model, version, key=endpoint.key, timeout_seconds=endpoint.timeout_seconds)


class _Call:
    """A submitted lookup: abandoned once no layer is wanted any more."""

    def __init__(self, wanted: int) -> None:
        self._wanted, self._lock = wanted, threading.Lock()
        self.abandoned = threading.Event()

    def leave(self) -> None:
        """See RemoteCall."""
        with self._lock:
            self._wanted -= 1
            if self._wanted <= 0:
                self.abandoned.set()


def _gather_piece(layer: int, ids: NDArray[np.int64], control: StagingControl, deadline: Deadline) -> Staged:
    return control.gather(layer, ids, deadline)


def _lookup_piece(layers: Sequence[int], windows: Windows, control: StagingControl, deadline: Deadline) -> Staged:
    return control.lookup(layers, windows, deadline)


def _put(out: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
    out[:] = data.reshape(out.shape)

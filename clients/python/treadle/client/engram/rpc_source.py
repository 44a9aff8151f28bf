"""Rows by gRPC: the compatible door for processes that cannot map the table. One call carries all layers of a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np
from numpy.typing import NDArray

from treadle.client.endpoint import Endpoint
from treadle.client.engram.hold import Hold
from treadle.client.engram.pool_types import windows_message
from treadle.client.engram.remote_ticket import RemoteTicket
from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.contract import (
    DataLoss,
    Deadline,
    EngramModel,
    ResourceExhausted,
    Transport,
    TreadleError,
    Unavailable,
    Windows,
)
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import DeadlineQueue
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

CALLS_MAX = 8  # lookups in flight of one handle: a step at a time, and those being cancelled
RETRY_SECONDS = 0.05  # between two tries while the pool restarts


class RpcSource:
    """Rows of one version, by `Lookup` and `Gather`. Owns its channel and threads."""

    def __init__(self, endpoint: Endpoint, model: EngramModel, version: str) -> None:
        self.transport = Transport.RPC
        self._endpoint, self._channel = endpoint, endpoint.channel()
        self._stub = pb_grpc.EngramPoolServiceStub(self._channel)
        self._ref = pb.ModelRef(model=model.name, version=version)
        self._hold = Hold(endpoint, model.name, version)
        try:
            self._hold.ensure()
        except TreadleError:
            self._hold.close()
            self._channel.close()
            raise
        self._calls = ThreadPoolExecutor(CALLS_MAX, thread_name_prefix="treadle-lookup")
        self._places = threading.Semaphore(CALLS_MAX)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        self._hold.ensure()
        request = pb.GatherRequest(ref=self._ref, layer=layer, rows=rows.astype("<i8", copy=False).tobytes())
        answers = self._endpoint.stream(self._stub.Gather, request, self._endpoint.timeout_seconds)
        _fill_array(out, (answer.data for answer in answers))

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        if not windows.token_count:
            return
        self._hold.ensure()
        request = pb.LookupRequest(ref=self._ref, layers=layers, windows=windows_message(windows))
        answers = self._endpoint.stream(self._stub.Lookup, request, self._endpoint.timeout_seconds)
        for layer, pieces in _by_layer(answers, layers):
            _fill_array(outs[layer], pieces)

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource. Layers travel in the order of their deadlines; nothing is gathered here, so no queue is needed."""
        layers = sorted(deadlines, key=lambda layer: deadlines[layer])
        if not self._places.acquire(blocking=False):
            raise ResourceExhausted(f"{CALLS_MAX} lookups in flight, the limit of one handle", RETRY_SECONDS)
        request = pb.LookupRequest(ref=self._ref, layers=layers, windows=windows_message(windows))
        call = _LookupCall(self._endpoint, self._stub, request, self._hold)
        tickets = {layer: RemoteTicket(call, deadlines[layer], outs[layer]) for layer in layers}
        work = self._calls.submit(call.run if windows.token_count else _fill_empty, tickets)
        work.add_done_callback(partial(self._ended, tickets))
        return {layer: ticket for layer, ticket in tickets.items()}  # noqa: C416 - widens the value type

    def page_bytes(self) -> int:
        """See RowSource: the tables are elsewhere."""
        return 0

    def close(self) -> None:
        """See RowSource."""
        self._hold.close()
        self._channel.close()
        self._calls.shutdown(wait=True, cancel_futures=True)

    def _ended(self, tickets: Mapping[int, RemoteTicket], work: Future[None]) -> None:
        """The place is free; whoever still waits is told, also where the handle was closed or we have a bug."""
        self._places.release()
        cause = None if work.cancelled() else work.exception()
        for ticket in tickets.values():
            ticket.fail(Unavailable(f"the lookup ended without its rows: {cause or 'the handle was closed'}"))


class _LookupCall:
    """One Lookup in flight, tried again while the pool restarts, cancelled when nobody waits any more."""

    def __init__(self, endpoint: Endpoint, stub: pb_grpc.EngramPoolServiceStub, request: pb.LookupRequest, hold: Hold) -> None:
        self._endpoint, self._stub, self._request, self._hold = endpoint, stub, request, hold
        self._until = Deadline.after(WAIT_SECONDS_MAX)
        self._wanted, self._lock = len(request.layers), threading.Lock()
        self._abandoned = threading.Event()
        self._live: Callable[[], object] = _nothing_to_cancel

    def run(self, tickets: Mapping[int, RemoteTicket]) -> None:
        failure: TreadleError = Unavailable("the lookup was abandoned")
        while not self._abandoned.is_set():
            try:
                self._try(tickets)
                return
            except Unavailable as error:  # a pool that restarts comes back with the same version
                failure = error
                if self._until.remaining_seconds() == 0:
                    break
                self._abandoned.wait(RETRY_SECONDS)
            except TreadleError as error:
                failure = error
                break
        for ticket in tickets.values():
            ticket.fail(failure)

    def leave(self) -> None:
        """One layer is no longer wanted; with the last one the call is over."""
        with self._lock:
            self._wanted -= 1
            if self._wanted > 0:
                return
            self._abandoned.set()
            self._live()

    def _try(self, tickets: Mapping[int, RemoteTicket]) -> None:
        self._hold.ensure()
        call = self._stub.Lookup(
            self._request, timeout=max(0.001, self._until.remaining_seconds()), metadata=self._endpoint.metadata
        )
        with self._lock:
            self._live = call.cancel
            if self._abandoned.is_set():
                call.cancel()
        for layer, pieces in _by_layer(self._endpoint.answers_of(call), tickets):
            ticket = tickets[layer]
            ticket.started()
            _fill(ticket.rows_shape, pieces, ticket.take)
            ticket.filled()


def _by_layer(answers: Iterator[pb.LookupResponse], wanted: Collection[int]) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Group a stream of pieces, which come layer after layer. Raises DataLoss for a layer that is not wanted, or is left out."""
    left, first = set(wanted), next(answers, None)
    while first is not None:
        if first.layer not in left:
            raise DataLoss(f"the pool sent layer {first.layer}; still to come were {sorted(left)}")
        left.remove(first.layer)
        group = _Group(first, answers)
        yield first.layer, iter(group)
        first = group.following
    if left:
        raise DataLoss(f"the pool left out layers {sorted(left)}")


class _Group:
    """Pieces of one layer; afterwards `following` is the first piece of the next."""

    def __init__(self, first: pb.LookupResponse, answers: Iterator[pb.LookupResponse]) -> None:
        self._first, self._answers = first, answers
        self.following: pb.LookupResponse | None = None

    def __iter__(self) -> Iterator[bytes]:
        yield self._first.data
        for answer in self._answers:
            if answer.layer != self._first.layer:
                self.following = answer
                return
            yield answer.data


def _fill(shape: tuple[int, int], pieces: Iterator[bytes], take: Callable[[int, NDArray[np.uint8]], None]) -> None:
    """Hand over rows piece by piece, in order: shape [rows, row_bytes] in all. Raises DataLoss if they are too few, too many or torn."""
    count, row_bytes = shape
    done = 0
    for data in pieces:
        if len(data) % row_bytes or done + len(data) // row_bytes > count:
            raise DataLoss(f"the pool sent {len(data)} bytes after {done} of {count} rows of {row_bytes}")
        piece = np.frombuffer(data, dtype=np.uint8).reshape(-1, row_bytes)
        take(done, piece)
        done += len(piece)
    if done != count:
        raise DataLoss(f"the pool sent {done} of {count} rows")


def _fill_array(out: Rows, pieces: Iterator[bytes]) -> None:
    flat = out.reshape(-1, out.shape[-1])

    def take(start: int, piece: NDArray[np.uint8]) -> None:
        flat[start : start + len(piece)] = piece

    _fill((len(flat), flat.shape[1]), pieces, take)


def _fill_empty(tickets: Mapping[int, RemoteTicket]) -> None:
    for ticket in tickets.values():
        ticket.started()
        ticket.filled()


def _nothing_to_cancel() -> object:
    return None

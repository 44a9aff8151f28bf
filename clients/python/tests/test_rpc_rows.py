"""The rpc door against a scripted pool on a real socket: pieces, short answers, refusals, retries, cancelling."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

from treadle.client import Endpoint
from treadle.client.endpoint import check_protocol
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.pool import EngramPool
from treadle.client.engram.rpc_source import RpcSource
from treadle.client.errors import InternalError
from treadle.contract import (
    AccessDenied,
    DataLoss,
    Deadline,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    Late,
    NotFound,
    ProtocolMismatch,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
    WaitPolicy,
    Windows,
)
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

ROWS = 3 * 16  # of three tokens
ROW_BYTES = 64
DATA = {1: bytes(range(64)) * ROWS, 4: bytes(reversed(range(64))) * ROWS}
Script = Callable[[Any], Iterator[pb.LookupResponse]]


class ScriptedPool(pb_grpc.EngramPoolServiceServicer):
    def __init__(self) -> None:
        self.lookup: Script = whole
        self.holds, self.left = 0, threading.Event()
        self.refusal: tuple[grpc.StatusCode, tuple[tuple[str, str], ...]] | None = None

    def Lookup(self, request: pb.LookupRequest, context: Any) -> Iterator[pb.LookupResponse]:  # noqa: N802
        yield from self.lookup(context)

    def HoldModel(self, request: pb.HoldModelRequest, context: Any) -> Iterator[pb.HoldModelResponse]:  # noqa: N802
        self.holds += 1
        left = threading.Event()
        context.add_callback(left.set)
        yield pb.HoldModelResponse(ref=request.ref)
        left.wait(60)
        self.left.set()

    def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:  # noqa: N802
        if self.refusal is not None:
            code, details = self.refusal
            context.set_trailing_metadata(details)
            context.abort(code, "said so")
        return pb.ListModelsResponse()


def whole(_: Any) -> Iterator[pb.LookupResponse]:
    for layer, data in DATA.items():
        for start in range(0, len(data), 10 * ROW_BYTES):
            yield pb.LookupResponse(layer=layer, data=data[start : start + 10 * ROW_BYTES])


@pytest.fixture
def pool() -> Iterator[tuple[ScriptedPool, str]]:
    servicer, server = ScriptedPool(), grpc.server(ThreadPoolExecutor(8))  # type: ignore[abstract]  # the other calls answer UNIMPLEMENTED
    pb_grpc.add_EngramPoolServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None).wait(10)


@pytest.fixture
def handle(pool: tuple[ScriptedPool, str], small: Any) -> Iterator[EngramHandle]:
    with EngramHandle(small.model, small.model.version, RpcSource(Endpoint(pool[1]), small.model, small.model.version)) as opened:
        yield opened


def windows() -> Windows:
    return Windows.of_sequences([([5, 6, 7], 0)], depth=2)


def prefetch(handle: EngramHandle, policy: WaitPolicy) -> dict[int, Any]:
    return handle.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.02)}).wait(policy)


def test_pieces_come_together_in_order(handle: EngramHandle) -> None:
    rows = prefetch(handle, WaitPolicy(10))
    assert {layer: taken.rows.tobytes() for layer, taken in rows.items()} == DATA
    assert {layer: data.tobytes() for layer, data in handle.lookup(windows()).items()} == DATA


@pytest.mark.parametrize("damage", ["short", "long", "torn row", "nothing"])
def test_an_answer_of_the_wrong_size_is_data_loss_never_served(
    damage: str, pool: tuple[ScriptedPool, str], handle: EngramHandle
) -> None:
    data = {"short": DATA[1][:-ROW_BYTES], "long": DATA[1] + b"x" * ROW_BYTES, "torn row": DATA[1][:-1], "nothing": b""}[damage]
    pool[0].lookup = lambda _: iter([pb.LookupResponse(layer=1, data=data), pb.LookupResponse(layer=4, data=DATA[4])])
    with pytest.raises(DataLoss):
        handle.lookup(windows())
    with pytest.raises(DataLoss):
        prefetch(handle, WaitPolicy(10, Late.FAIL))
    masked = prefetch(handle, WaitPolicy(10, Late.MASK))
    assert masked[1].missing is not None
    assert not masked[1].rows[masked[1].missing].any()


def test_a_layer_that_was_left_out_is_missing_not_zero(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    pool[0].lookup = lambda _: iter([pb.LookupResponse(layer=1, data=DATA[1])])
    with pytest.raises(DataLoss, match="layer"):
        handle.lookup(windows())
    rows = prefetch(handle, WaitPolicy(10, Late.MASK))
    assert rows[1].missing is None
    assert rows[4].missing is not None
    assert rows[4].missing.all()


def test_a_lookup_that_failed_says_why_also_where_its_rows_are_masked(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    pool[0].lookup = lambda _: iter([pb.LookupResponse(layer=1, data=DATA[1]), pb.LookupResponse(layer=4, data=b"short")])
    rows = prefetch(handle, WaitPolicy(10, Late.MASK))
    assert (rows[1].missing, rows[1].cause) == (None, None)
    assert rows[4].missing is not None
    assert isinstance(rows[4].cause, DataLoss)


def test_a_layer_nobody_asked_for_is_data_loss(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    pool[0].lookup = lambda _: iter([pb.LookupResponse(layer=9, data=DATA[1])])
    with pytest.raises(DataLoss, match="layer 9"):
        handle.lookup(windows())


def test_a_pool_that_is_away_for_a_moment_is_asked_again(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    tries: list[int] = []

    def away_twice(context: Any) -> Iterator[pb.LookupResponse]:
        tries.append(1)
        if len(tries) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        return whole(context)

    pool[0].lookup = away_twice
    assert prefetch(handle, WaitPolicy(20))[4].rows.tobytes() == DATA[4]
    assert len(tries) == 3


def test_rows_after_a_cancel_do_not_touch_the_buffer(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    go_on, sent = threading.Event(), threading.Event()

    def held(_: Any) -> Iterator[pb.LookupResponse]:
        yield pb.LookupResponse(layer=1, data=DATA[1][: 10 * ROW_BYTES])
        sent.set()
        go_on.wait(20)
        yield pb.LookupResponse(layer=1, data=DATA[1][10 * ROW_BYTES :])

    pool[0].lookup = held
    out = {layer: handle.rows_buffer(3) for layer in (1, 4)}
    ticket = handle.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.01)}, out)
    assert sent.wait(20)
    rows = ticket.wait_layer(1, WaitPolicy(0.2, Late.MASK))
    ticket.cancel()
    assert rows.missing is not None
    assert rows.missing.reshape(-1)[10:].all()
    before = out[1].copy()
    go_on.set()
    assert prefetch_again(pool, handle)
    assert np.array_equal(out[1], before)


def prefetch_again(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> bool:
    pool[0].lookup = whole
    return prefetch(handle, WaitPolicy(10))[1].missing is None


def test_giving_up_one_layer_leaves_the_others(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    go_on = threading.Event()

    def slow_first_layer(_: Any) -> Iterator[pb.LookupResponse]:
        yield pb.LookupResponse(layer=1, data=DATA[1][:ROW_BYTES])
        go_on.wait(20)
        yield pb.LookupResponse(layer=1, data=DATA[1][ROW_BYTES:])
        yield pb.LookupResponse(layer=4, data=DATA[4])

    pool[0].lookup = slow_first_layer
    ticket = handle.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.02)})
    assert ticket.wait_layer(1, WaitPolicy(0.05)).missing is not None
    go_on.set()
    assert ticket.wait_layer(4, WaitPolicy(10)).rows.tobytes() == DATA[4]


def test_a_second_try_does_not_write_to_rows_that_were_taken(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    taken, tries = threading.Event(), []

    def breaks_off_after_the_first_layer(context: Any) -> Iterator[pb.LookupResponse]:
        tries.append(1)
        if len(tries) == 1:
            yield pb.LookupResponse(layer=1, data=DATA[1])
            taken.wait(20)
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        yield from whole(context)

    pool[0].lookup = breaks_off_after_the_first_layer
    ticket = handle.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.02)})
    first = ticket.wait_layer(1, WaitPolicy(10)).rows
    first[:] = 99  # the caller's again
    taken.set()
    assert ticket.wait_layer(4, WaitPolicy(20)).rows.tobytes() == DATA[4]
    assert (first == 99).all()


def test_a_pool_that_hangs_costs_no_thread_for_ever(pool: tuple[ScriptedPool, str], handle: EngramHandle) -> None:
    begun, ended = threading.Semaphore(0), threading.Semaphore(0)

    def hangs(context: Any) -> Iterator[pb.LookupResponse]:
        left = threading.Event()
        context.add_callback(left.set)
        begun.release()
        left.wait(20)
        ended.release()
        yield pb.LookupResponse(layer=1, data=b"")

    pool[0].lookup = hangs
    for _ in range(20):  # more than CALLS_MAX
        ticket = handle.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.02)})
        assert begun.acquire(timeout=10)  # a call that is given up before it is made ends nowhere
        assert ticket.wait(WaitPolicy(0.05))[1].missing is not None
        assert ended.acquire(timeout=10)


def test_an_open_handle_holds_its_version_until_it_is_closed(pool: tuple[ScriptedPool, str], small: Any) -> None:
    with EngramHandle(small.model, small.model.version, RpcSource(Endpoint(pool[1]), small.model, small.model.version)) as opened:
        opened.lookup(windows())
        prefetch(opened, WaitPolicy(10))
        assert pool[0].holds == 1
        assert not pool[0].left.is_set()
    assert pool[0].left.wait(10)


def test_no_tokens_are_no_rows(handle: EngramHandle) -> None:
    nothing = Windows.of_sequences([], depth=2)
    assert handle.lookup(nothing)[4].shape == (0, 16, ROW_BYTES)
    rows = handle.prefetch(nothing, {1: Deadline.after(0.01), 4: Deadline.after(0.01)}).wait(WaitPolicy(10))
    assert rows[4].missing is None


def test_closing_a_handle_ends_its_tickets(pool: tuple[ScriptedPool, str], small: Any) -> None:
    begun = threading.Event()

    def hangs(context: Any) -> Iterator[pb.LookupResponse]:
        begun.set()
        left = threading.Event()
        context.add_callback(left.set)
        left.wait(20)
        yield pb.LookupResponse(layer=1, data=b"")

    pool[0].lookup = hangs
    closed = EngramHandle(small.model, small.model.version, RpcSource(Endpoint(pool[1]), small.model, small.model.version))
    ticket = closed.prefetch(windows(), {1: Deadline.after(0.01), 4: Deadline.after(0.01)})
    assert begun.wait(10)
    closed.close()
    with pytest.raises(Unavailable):
        ticket.wait_layer(1, WaitPolicy(10, Late.FAIL))


CODES: list[tuple[grpc.StatusCode, tuple[tuple[str, str], ...], type[TreadleError]]] = [
    (grpc.StatusCode.INVALID_ARGUMENT, (), InvalidArgument),
    (grpc.StatusCode.OUT_OF_RANGE, (), RowOutOfRange),
    (grpc.StatusCode.NOT_FOUND, (), NotFound),
    (grpc.StatusCode.FAILED_PRECONDITION, (("treadle-field", "row_bytes"),), FingerprintMismatch),
    (grpc.StatusCode.FAILED_PRECONDITION, (), ProtocolMismatch),
    (grpc.StatusCode.RESOURCE_EXHAUSTED, (("treadle-retry-after-seconds", "1.5"),), ResourceExhausted),
    (grpc.StatusCode.DEADLINE_EXCEEDED, (("treadle-predicted-finish-seconds", "0.5"),), DeadlineExceeded),
    (grpc.StatusCode.UNAVAILABLE, (("treadle-error", "Unavailable"),), Unavailable),
    (grpc.StatusCode.UNAUTHENTICATED, (), AccessDenied),
    (grpc.StatusCode.DATA_LOSS, (), DataLoss),
    (grpc.StatusCode.INTERNAL, (), InternalError),
]


@pytest.mark.parametrize(("code", "details", "expected"), CODES, ids=lambda value: getattr(value, "name", ""))
def test_each_code_becomes_the_error_it_stands_for(
    code: grpc.StatusCode, details: tuple[tuple[str, str], ...], expected: type[TreadleError], pool: tuple[ScriptedPool, str]
) -> None:
    pool[0].refusal = (code, details)
    with EngramPool(Endpoint(pool[1])) as client, pytest.raises(expected, match="said so") as caught:
        client.list_models()
    assert type(caught.value) is expected
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert getattr(caught.value, "field", "row_bytes") == "row_bytes"
    assert getattr(caught.value, "retry_after_seconds", 1.5) == 1.5
    assert getattr(caught.value, "predicted_finish_seconds", 0.5) == 0.5


def test_an_address_without_a_service_is_named() -> None:
    with EngramPool(Endpoint("127.0.0.1:9", timeout_seconds=5)) as client, pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        client.status()


@pytest.mark.parametrize("theirs", ["", "v2.0", "v10.1"])
def test_another_protocol_is_refused_naming_both(theirs: str) -> None:
    check_protocol("pool", "v1.7")
    with pytest.raises(ProtocolMismatch, match=r"v1\."):
        check_protocol("pool", theirs)


@pytest.mark.parametrize("fields", [{"address": "nowhere"}, {"address": "a:1", "timeout_seconds": 0}])
def test_a_wrong_endpoint_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        Endpoint(**fields)

"""Streamed calls of a worker over the gateway's own HTTP/2, against gRPC's server: what gRPC's own client sees, they see."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from inference_gateway.adapters.grpc_calls import CONNECTIONS_MAX

if TYPE_CHECKING:
    from tests.called_workers import METHOD, calling, heard, register, serving, still
else:
    from called_workers import METHOD, calling, heard, register, serving, still


async def heard_by_grpc(address: str, request: bytes) -> tuple[list[bytes], Any]:
    """The same by gRPC's own client."""
    messages: list[bytes] = []
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", 8 << 20)]) as channel:
        method: Any = channel.unary_stream(METHOD)
        call = method(request)
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                messages.append(message)
        except grpc.aio.AioRpcError as error:
            return messages, (error.code(), error.details(), sorted(error.trailing_metadata() or ()))
    return messages, None


async def answer_by_plan(request: bytes, context: Any) -> AsyncIterator[bytes]:
    """Messages of the sizes that the request lists, then the status that it begins with."""
    code, *sizes = struct.unpack(f">{len(request) // 4}I", request)
    for place, size in enumerate(sizes):
        yield bytes([place & 0xFF]) * size
    if code:
        status = next(each for each in grpc.StatusCode if each.value[0] == code)
        await context.abort(status, "größer als 100 %\nund mehr", (("treadle-error", "Draining"), ("treadle-field", "a" * 500)))


async def test_every_answer_is_what_grpcs_own_client_hears() -> None:
    chance = random.Random(0)
    sizes = [[], [0], [1, 0, 2], [65_530, 65_531, 65_536, 200_000], [20] * 300, [3 << 20, 5], [7 << 20]]
    plans = [[chance.choice([0, 0, 3, 5, 8, 13, 14, 15]), *each] for each in sizes * 4]
    async with serving(answer_by_plan) as (address, _), calling(address) as calls:
        for plan in plans:
            request = struct.pack(f">{len(plan)}I", *plan)
            assert await heard(calls, request) == await heard_by_grpc(address, request), plan[:8]


async def test_calls_at_once_share_a_connection_and_keep_their_answers_apart() -> None:
    peers = set()

    async def echo(request: bytes, context: Any) -> AsyncIterator[bytes]:
        peers.add(context.peer())
        for _ in range(20):
            await asyncio.sleep(0.001)
            yield request

    async with serving(echo) as (address, _), calling(address) as calls:
        answers = await asyncio.gather(*(heard(calls, b"%d" % number * 100) for number in range(50)))
    assert answers == [([b"%d" % number * 100] * 20, None) for number in range(50)]
    assert len(peers) == 1


async def test_a_request_larger_than_the_windows_arrives_whole() -> None:
    async def measure(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"%d" % len(request)

    async with serving(measure) as (address, _), calling(address) as calls:
        assert await asyncio.gather(*(heard(calls, bytes(size)) for size in (4 << 20, 1, 70_000))) == [
            ([b"4194304"], None), ([b"1"], None), ([b"70000"], None)
        ]  # fmt: skip


async def test_who_does_not_read_holds_the_worker_back_and_nobody_else() -> None:
    sent = 0

    async def flood(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(20 if request else 1000):
            sent += 0 if request else 1
            yield bytes(10_000)

    async with serving(flood) as (address, _), calling(address) as calls:
        slow = await calls.begin(METHOD, b"", 60.0)
        assert await heard(calls, b"short") == ([bytes(10_000)] * 20, None)
        await still(lambda: sent)
        assert sent < 100  # a window, and what gRPC's server buffers
        count = 0
        while await slow.read() is not None:
            count += 1
        assert count == 1000


async def test_closing_a_call_cancels_it_at_the_worker() -> None:
    cancelled = asyncio.Event()

    async def endless(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x"
                await asyncio.sleep(0.01)
        finally:
            cancelled.set()

    async with serving(endless) as (address, _), calling(address) as calls:
        call = await calls.begin(METHOD, b"", 10.0)
        assert await call.read() == b"x"
        call.close()
        await asyncio.wait_for(cancelled.wait(), 5)


async def test_a_deadline_goes_with_the_call_and_ends_it_here_too() -> None:
    told = []

    async def sleep(request: bytes, context: Any) -> AsyncIterator[bytes]:
        told.append(context.time_remaining())
        yield b"asleep"
        await asyncio.sleep(300)

    async with serving(sleep) as (address, _), calling(address) as calls:
        call = await calls.begin(METHOD, b"", 100.0)
        assert await call.read() == b"asleep"
        call.close()
        _, error = await heard(calls, seconds=0.3)
    assert error[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert 50 < told[0] <= 100.1


async def test_key_and_trace_go_with_the_call() -> None:
    async def tell(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield dict(context.invocation_metadata())["authorization"].encode()

    room = ("grpc.absolute_max_metadata_size", 64 << 10), ("grpc.max_metadata_size", 64 << 10)
    for size in (1, 300, 40_000):  # the last one is more than a frame holds
        async with serving(tell, *room) as (address, _), calling(address, key="k" * size) as calls:
            assert await heard(calls) == ([b"Bearer " + b"k" * size], None)


async def test_a_worker_that_is_not_there_is_unavailable_and_found_again() -> None:
    async def hello(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"hello"

    async with serving(hello) as (address, server), calling(address) as calls:
        assert await heard(calls) == ([b"hello"], None)
        await server.stop(None)
        _, error = await heard(calls)
        assert error[0] is grpc.StatusCode.UNAVAILABLE
        again = grpc.aio.server()
        register(again, hello)
        assert again.add_insecure_port(address)
        await again.start()
        assert await heard(calls) == ([b"hello"], None)
        await again.stop(None)


async def test_a_worker_that_drains_ends_its_calls_and_gets_no_more() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(request: bytes, context: Any) -> AsyncIterator[bytes]:
        begun.set()
        await go_on.wait()
        yield b"well"

    async with serving(wait) as (address, server), calling(address) as calls:
        first = asyncio.create_task(heard(calls))
        await begun.wait()
        stopping = asyncio.create_task(server.stop(5))
        while (answer := await heard(calls, seconds=0.2))[1][0] is not grpc.StatusCode.UNAVAILABLE:
            # It had not said yet that it goes: it takes no notice of the call, or refuses it in these words.
            assert answer[1][0] in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        go_on.set()
        assert await first == ([b"well"], None)
        await stopping


async def test_a_worker_that_takes_few_calls_at_once_gets_more_connections() -> None:
    peers, somebody, together = set(), asyncio.Event(), asyncio.Event()

    async def meet(request: bytes, context: Any) -> AsyncIterator[bytes]:
        peers.add(context.peer())
        somebody.set()
        if len(peers) == 3:
            together.set()
        await together.wait()
        yield b"met"

    async with serving(meet, ("grpc.max_concurrent_streams", 2)) as (address, _), calling(address) as calls:
        first = asyncio.create_task(heard(calls))
        await somebody.wait()
        rest = [asyncio.create_task(heard(calls)) for _ in range(4)]
        assert [await each for each in (first, *rest)] == [([b"met"], None)] * 5


async def test_many_calls_at_once_get_as_many_connections_as_they_need() -> None:
    count, begun, together = 3 * CONNECTIONS_MAX, 0, asyncio.Event()

    async def meet(request: bytes, context: Any) -> AsyncIterator[bytes]:
        nonlocal begun
        begun += 1
        if begun == count:
            together.set()
        await together.wait()
        yield b"met"

    async with serving(meet, ("grpc.max_concurrent_streams", 3)) as (address, _), calling(address) as calls:
        assert await asyncio.gather(*(heard(calls) for _ in range(count))) == [([b"met"], None)] * count

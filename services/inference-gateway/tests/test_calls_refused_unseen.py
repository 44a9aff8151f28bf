"""Workers that refuse a call without having looked at it, by HTTP/2's own words: it is made again, whatever `attempts_max` is."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from inference_gateway.adapters import http2_frames as h2
from inference_gateway.adapters.worker import RpcWorker
from inference_gateway.domain.breaker import Breaker, BreakerLimits
from inference_gateway.domain.dispatch import UNBEGUN_MAX, Dispatch, DispatchLimits, NoFigures
from inference_gateway.domain.errors import CallNotBegun, WorkerLost
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import Generation, MemoryWish, Piece, Sampling, WorkerStatus
from inference_gateway.domain.member import Member
from inference_gateway.domain.routing import Ranking, RoutedBy
from inference_gateway.domain.served_model import WorkerWatch
from treadle.client import Endpoint
from treadle.contract import Deadline
from treadle.inference.v1 import worker_pb2 as pb

GENERATION = Generation("r", [1, 2], Sampling(), MemoryWish(), "", model="m")
GREETING = h2.frame(h2.SETTINGS, 0, 0)
HEAD = h2.header_block([(":status", "200"), ("content-type", "application/grpc")])
WELL = h2.header_block([("grpc-status", "0")])
SAID = pb.GenerateResponse(token_ids=[7], text_delta="a")
LAST = pb.GenerateResponse(finish_reason=pb.FINISH_REASON_STOP)
Says = Callable[[int], bytes]
Result = TypeVar("Result")


def answered(number: int) -> bytes:
    body = b"".join(h2.message(each.SerializeToString()) for each in (SAID, LAST))
    head, end = (h2.frame(h2.HEADERS, h2.END_HEADERS | more, number, block) for more, block in ((0, HEAD), (h2.END_STREAM, WELL)))
    return head + h2.frame(h2.DATA, 0, number, body) + end


def refused(number: int) -> bytes:
    return h2.frame(h2.RST_STREAM, 0, number, h2.number(h2.REFUSED))


def closed_before(number: int) -> bytes:
    return h2.frame(h2.GOAWAY, 0, 0, h2.number(number - 1) + h2.number(0))


def begun_and_refused(number: int) -> bytes:
    return h2.frame(h2.HEADERS, h2.END_HEADERS, number, HEAD) + refused(number)


def reset(number: int) -> bytes:
    return h2.frame(h2.RST_STREAM, 0, number, h2.number(h2.CANCEL))


class RawWorker(RpcWorker):
    """RpcWorker over a server that says to each call what a test laid down, then a whole answer; its status needs no server."""

    def __init__(self, address: str, calls: list[int]) -> None:
        super().__init__(Endpoint(address))
        self.calls = calls

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        return WorkerStatus("m", Path("/m"), "d", 64, False, "0", 1, requests_running_max=4)


@asynccontextmanager
async def raw_worker(*says: Says) -> AsyncIterator[RawWorker]:
    left, calls, serving = list(says), list[int](), set[asyncio.Task[Any]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())  # type: ignore[arg-type]  # there is one
        writer.write(GREETING)
        await reader.readexactly(len(h2.PREFACE))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                upper, lower, kind, flags, number = h2.HEAD.unpack(await reader.readexactly(h2.HEAD_BYTES))
                await reader.readexactly(upper << 8 | lower)
                if kind == h2.DATA and flags & h2.END_STREAM:
                    calls.append(number)
                    writer.write((left.pop(0) if left else answered)(number))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    worker = RawWorker(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", calls)
    try:
        yield worker
    finally:
        await worker.close()
        server.close()
        await asyncio.wait_for(asyncio.gather(*serving), 20)


class Counts(NoFigures):
    def __init__(self) -> None:
        self.seen = Counter[str]()

    def retried(self, reason: str) -> None:
        self.seen[reason] += 1


class ByName:
    """Fits Policy."""

    needs_blocks = False

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        return Ranking(sorted(members, key=lambda member: member.name), RoutedBy.LOAD)


@asynccontextmanager
async def dispatching(*workers: RawWorker, attempts: int = 1) -> AsyncGenerator[tuple[Dispatch, Counts], None]:
    async def in_thread(work: Callable[[], Result], /) -> Result:
        return work()

    def no_encoder(folder: Path, tokenizer_digest: str) -> Any:
        """No prompt is encoded here."""

    members = [
        Member("abc"[place], worker, WorkerWatch(worker, no_encoder, in_thread, interval_seconds=60), Breaker(BreakerLimits()))
        for place, worker in enumerate(workers)
    ]
    for member in members:
        await member.watch.poll()
    polling = [asyncio.create_task(member.watch.run()) for member in members]
    counts = Counts()
    try:
        yield Dispatch(Fleet(members, ByName()), DispatchLimits(attempts_max=attempts), counts, random.Random(0)), counts
    finally:
        for task in polling:
            task.cancel()
        await asyncio.wait(polling)


async def answer(dispatch: Dispatch) -> list[Piece]:
    async with aclosing(dispatch.pieces(GENERATION, Deadline.after(20))) as pieces:
        return [piece async for piece in pieces]


@pytest.mark.parametrize("unseen", [refused, closed_before])
async def test_a_call_that_was_refused_unseen_is_made_again_where_nothing_else_is(unseen: Says) -> None:
    async with raw_worker(unseen) as first, raw_worker() as second, dispatching(first, second) as (dispatch, counts):
        pieces = await answer(dispatch)
        assert (pieces[0].worker, pieces[0].token_ids, counts.seen) == ("b", (7,), {"not_begun": 1})
        assert (len(first.calls), len(second.calls)) == (1, 1)


@pytest.mark.parametrize("unseen", [refused, closed_before])
async def test_the_only_worker_is_asked_again(unseen: Says) -> None:
    async with raw_worker(unseen) as worker, dispatching(worker) as (dispatch, counts):
        assert (await answer(dispatch))[0].worker == "a"
        assert (worker.calls, counts.seen) == ([1, 3] if unseen is refused else [1, 1], {"not_begun": 1})


@pytest.mark.parametrize("seen", [reset, begun_and_refused])
async def test_a_call_that_may_have_been_looked_at_is_an_attempt(seen: Says) -> None:
    async with raw_worker(seen) as first, raw_worker() as second, dispatching(first, second) as (dispatch, counts):
        with pytest.raises(WorkerLost) as lost:
            await answer(dispatch)
        assert (type(lost.value), second.calls, counts.seen) == (WorkerLost, [], {})


async def test_a_worker_that_refuses_every_call_is_not_asked_for_ever() -> None:
    async with raw_worker(*[refused] * 9) as worker, dispatching(worker, attempts=2) as (dispatch, counts):
        with pytest.raises(CallNotBegun, match="did not take the call"):
            await answer(dispatch)
        assert (len(worker.calls), counts.seen["not_begun"]) == (UNBEGUN_MAX + 2, UNBEGUN_MAX + 1)


async def test_a_refused_call_takes_nothing_from_the_attempts_behind_it() -> None:
    async with (
        raw_worker(refused) as first, raw_worker(reset) as second, raw_worker() as third,
        dispatching(first, second, third, attempts=2) as (dispatch, counts),
    ):  # fmt: skip
        assert (await answer(dispatch))[0].worker == "c"
        assert counts.seen == {"not_begun": 1, "lost": 1}

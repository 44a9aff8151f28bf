"""The client of the load tests: what it calls whole is whole, and whatever is missing it notices."""

from __future__ import annotations

import asyncio

import pytest

from treadle_loadtests.calls import HttpCaller, Seen, count_calls
from treadle_loadtests.latency import added_ms
from treadle_loadtests.report import Report

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
FIRST = b'data: {"choices":[{"delta":{"content":"100:150 "},"finish_reason":null}]}\n\n'
SECOND = b'data: {"choices":[{"delta":{"content":"250 "},"finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"delta":{},"finish_reason":"length"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunks(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


END = b"0\r\n\r\n"
WHOLE = HEAD + chunks(FIRST, SECOND, LAST, DONE) + END


def answered(*pieces: bytes, close: bool = False, tokens: int = 2, calls: int = 1) -> list[Seen]:
    """What the client makes of a server that writes these pieces, each after the one before it was read."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(2)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if close:
                    return
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()

    async def talk() -> list[Seen]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            caller = HttpCaller(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
            request = caller.request("/", {})
            seen = [await asyncio.wait_for(caller.call(request, tokens), 5) for _ in range(calls)]
            caller.close()
            return seen

    return asyncio.run(talk())


def test_a_whole_answer_is_whole_however_it_is_cut_on_its_way() -> None:
    for pieces in ([WHOLE], [WHOLE[:9], WHOLE[9:150], WHOLE[150:]], [WHOLE[at : at + 7] for at in range(0, len(WHOLE), 7)]):
        (seen,) = answered(*pieces)
        assert seen.whole, seen.why
        assert (seen.reached_ns, list(seen.made_ns), len(seen.came_ns)) == (100, [150, 250], 2)


def test_a_connection_is_used_again_only_for_whole_answers() -> None:
    assert [seen.whole for seen in answered(WHOLE, calls=3)] == [True] * 3


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HEAD + chunks(FIRST, LAST, DONE) + END, "1 of 2 tokens"),
        (HEAD + chunks(FIRST, SECOND, DONE) + END, "finish reason False"),
        (HEAD + chunks(FIRST, SECOND, LAST) + END, "[DONE] False"),
        (HEAD + chunks(FIRST, SECOND, LAST, DONE), "closed before the end"),
        (HEAD + chunks(FIRST, b'data: {"error":{"message":"lost"}}\n\n', DONE) + END, "lost"),
        (b"HTTP/1.1 500 Oops\r\ncontent-length: 3\r\n\r\nbug", "status 500: bug"),
    ],
)
def test_what_is_missing_is_noticed(answer: bytes, why: str) -> None:
    (seen,) = answered(answer, close=True)
    assert not seen.whole
    assert why in seen.why
    report = Report("test", {})
    count_calls(report, "answers", [seen])
    assert (report.counts, report.reasons) == ({"answers": 1, "answers_failed": 1}, [seen.why])


def test_a_refusal_counts_as_one_only_if_it_says_when_to_come_back() -> None:
    for head, refused in ((b"retry-after: 1\r\n", True), (b"", False)):
        (seen,) = answered(b"HTTP/1.1 503 Busy\r\n" + head + b"content-length: 4\r\n\r\nbusy", close=True)
        assert (seen.whole, seen.refused) == (False, refused)


def test_a_server_that_is_not_there_is_told() -> None:
    async def nobody() -> Seen:
        server = await asyncio.start_server(_nothing, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        caller = HttpCaller(f"127.0.0.1:{port}")
        return await caller.call(caller.request("/", {}), 1)

    assert "cannot connect" in asyncio.run(nobody()).why


async def _nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.close()


def test_added_is_the_difference_of_percentiles_and_nothing_is_no_figure() -> None:
    assert added_ms([0.003, 0.005, 0.1], [0.001, 0.002, 0.01], 50) == pytest.approx(3.0)
    assert added_ms([], [0.001], 50) == float("inf")

"""Streamed calls against a worker that keeps to the letter of HTTP/2 in unusual ways, or does not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, cast

import grpc
import grpc.aio
import pytest
from hpack import Decoder

from inference_gateway.adapters import grpc_connection
from inference_gateway.adapters import http2_frames as h2
from inference_gateway.adapters.grpc_stream import StreamedCall

if TYPE_CHECKING:
    from tests.called_workers import CALL, GREETING, HEAD, METHOD, WELL, calling, heard, listening, saying
else:
    from called_workers import CALL, GREETING, HEAD, METHOD, WELL, calling, heard, listening, saying


async def test_padding_priorities_split_headers_and_unknown_frames_are_understood() -> None:
    body = h2.message(b"ab") + h2.message(b"cd")
    parts = [
        h2.frame(0x42, 0xFF, 7, b"unknown"), h2.frame(h2.PRIORITY, 0, 1, bytes(5)),
        h2.frame(h2.HEADERS, h2.PADDED | h2.WITH_PRIORITY, 1, b"\x03" + bytes(5) + HEAD[:4] + bytes(3)),
        h2.frame(h2.CONTINUATION, h2.END_HEADERS, 1, HEAD[4:]),
        h2.frame(h2.DATA, h2.PADDED, 1, b"\x02" + body[:9] + bytes(2)), h2.frame(h2.DATA, 0, 1, body[9:]),
        h2.frame(h2.DATA, 0, 99, b"of a call that there is not"), h2.frame(h2.PING, h2.ACK, 0, bytes(8)),
        h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, WELL),
    ]  # fmt: skip
    for cut in (1, 5, 9, 10_000):
        async with saying(GREETING + b"".join(parts), cut) as address, calling(address) as calls:
            assert await heard(calls) == ([b"ab", b"cd"], None)


async def test_large_messages_in_small_pieces_cost_time_in_proportion_to_their_size() -> None:
    async def taken(size: int) -> float:
        message = h2.message(bytes(size))
        call = StreamedCall(1, message, 0, lambda call: None, lambda number, count: None)
        pieces = [message[at : at + 1024] for at in range(0, len(message), 1024)]
        begin = time.process_time()
        for piece in pieces:
            call.came(piece, len(piece))
        while call.unsent:
            call.unsent = call.unsent[1024:]
        seconds = time.process_time() - begin
        assert await call.read() == bytes(size)
        return seconds

    small, large = [min([await taken(size) for _ in range(3)]) for size in (1 << 20, 8 << 20)]
    assert large < 24 * small  # 64 times, if each piece copied all before it


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "UNAVAILABLE"),
        (h2.frame(h2.PING, 0, 0, bytes(8)), "UNAVAILABLE"),  # before any greeting
        (GREETING + h2.HEAD.pack(0x111, 0, h2.DATA, 0, 1) + bytes(70_000), "UNAVAILABLE"),  # a longer frame than was allowed
        (GREETING + h2.frame(h2.HEADERS, 0, 1, HEAD) + h2.frame(h2.PING, 0, 0, bytes(8)), "UNAVAILABLE"),
        (GREETING + h2.frame(h2.HEADERS, 0, 1) + 9 * h2.frame(h2.CONTINUATION, 0, 1, bytes(16_000)), "UNAVAILABLE"),
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, b"\xff\xff\xff"), "UNAVAILABLE"),  # no header block
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS | h2.PADDED, 1, b"\x09" + HEAD[:2]), "UNAVAILABLE"),
        (GREETING, "UNAVAILABLE"),  # and closed
        (GREETING + h2.frame(h2.GOAWAY, 0, 0, bytes(8)), "UNAVAILABLE"),
        (GREETING + h2.frame(h2.RST_STREAM, 0, 1, h2.number(h2.REFUSED)), "UNAVAILABLE"),
        (GREETING + h2.frame(h2.RST_STREAM, 0, 1, h2.number(2)), "INTERNAL"),
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.header_block([(":status", "503")])), "UNAVAILABLE"),
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, h2.header_block([(":status", "404")])), "UNIMPLEMENTED"),
        (GREETING + h2.frame(h2.HEADERS, 0x5, 1, h2.header_block([(":status", "103")])), "INTERNAL"),
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS | h2.END_STREAM, 1, HEAD), "UNKNOWN"),  # no status of gRPC
        (GREETING + h2.frame(h2.HEADERS, h2.END_HEADERS, 1, HEAD) + h2.frame(h2.DATA, h2.END_STREAM, 1), "INTERNAL"),
        (GREETING + h2.frame(h2.DATA, 0, 1, b"\x01" + bytes(4)), "INTERNAL"),  # compressed
        (GREETING + h2.frame(h2.DATA, 0, 1, b"\x00\x7f" + bytes(3)), "INTERNAL"),  # two gigabytes are announced
        (GREETING + h2.frame(h2.DATA, 0, 1, b"\x00") + h2.frame(h2.HEADERS, 0x5, 1, WELL), "INTERNAL"),  # within a message
    ],
)
async def test_what_breaks_the_protocol_ends_the_call_with_an_error(said: bytes, code: str) -> None:
    async with saying(said) as address, calling(address) as calls:
        messages, error = await heard(calls)
        assert not messages
        assert error[0].name == code, error
        assert await heard(calls), "the next call begins anew"


async def test_a_worker_that_asks_without_end_and_does_not_read_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_connection, "UNSENT_BYTES_MAX", 1 << 16)

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readuntil(CALL)
        cast("asyncio.Transport", writer.transport).pause_reading()
        pings = h2.frame(h2.PING, 0, 0, bytes(8)) * 10_000
        while not writer.is_closing():
            writer.write(pings)
            await writer.drain()

    async with listening(flood) as address, calling(address) as calls:
        _, error = await heard(calls)
        assert error[0] is grpc.StatusCode.UNAVAILABLE
        assert "does not read" in error[1]


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (h2.frame(h2.HEADERS, 0, 1) + 64 * h2.frame(h2.CONTINUATION, 0, 1), "too many headers"),
        (h2.frame(h2.PUSH_PROMISE, h2.END_HEADERS, 1, h2.number(2)), "a promise, which was forbidden"),
        (h2.frame(h2.PING, 0, 0, bytes(7)), "a ping of 7 bytes"),
        (h2.frame(h2.WINDOW_UPDATE, 0, 0, h2.number(0)), "a window that grows by 0"),
        (h2.frame(h2.WINDOW_UPDATE, 0, 1, h2.number(1 << 31)), "a window that grows by 0"),  # the first bit is reserved
        (h2.frame(h2.SETTINGS, 0, 0, h2.settings({h2.FRAME_MAX: 0})), "setting 5 is 0"),
        (h2.frame(h2.SETTINGS, 0, 0, h2.settings({h2.FRAME_MAX: 1 << 24})), "setting 5 is 16777216"),
        (h2.frame(h2.SETTINGS, 0, 0, h2.settings({h2.INITIAL_WINDOW: 1 << 31})), "setting 4 is 2147483648"),
    ],
)
async def test_what_breaks_the_protocol_ends_the_connection(said: bytes, why: str) -> None:
    async with saying(GREETING + said) as address, calling(address) as calls:
        _, error = await heard(calls)
        assert error[:2] == (grpc.StatusCode.UNAVAILABLE, f"what came is no HTTP/2: {why}")


@pytest.mark.parametrize(
    "said",
    [
        h2.frame(h2.WINDOW_UPDATE, 0, 0, h2.number(h2.ID_MASK)),
        h2.frame(h2.WINDOW_UPDATE, 0, 1, h2.number(h2.ID_MASK)),
        h2.frame(h2.WINDOW_UPDATE, 0, 1, h2.number(1 << 30))
        + h2.frame(h2.SETTINGS, 0, 0, h2.settings({h2.INITIAL_WINDOW: h2.ID_MASK})),
    ],
)
async def test_a_worker_that_makes_a_window_too_large_is_left(said: bytes) -> None:
    async with saying(GREETING + said) as address, calling(address) as calls:
        _, error = await heard(calls)
        assert error[0] is grpc.StatusCode.UNAVAILABLE
        assert error[1].startswith("what came is no HTTP/2: a window of ")


async def test_a_worker_that_sends_more_than_the_window_of_a_call_is_left() -> None:
    over = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING)
        await reader.readuntil(CALL)
        writer.write(h2.frame(h2.DATA, 0, 1, h2.message(bytes(16_000))) * 5)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        over.set()

    async with listening(flood) as address, calling(address) as calls:
        call = await calls.begin(METHOD, b"", 10.0)
        await over.wait()
        assert [await call.read() for _ in range(4)] == [bytes(16_000)] * 4
        with pytest.raises(grpc.aio.AioRpcError, match="more than the window of a call"):
            await call.read()


async def test_a_reset_is_not_answered_though_the_request_was_not_sent_whole() -> None:
    after, told = b"", asyncio.Event()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal after
        writer.write(GREETING)
        await reader.readexactly(h2.WINDOW_BYTES)  # more does not come: heads and preface are within it
        writer.write(h2.frame(h2.RST_STREAM, 0, 1, h2.number(h2.REFUSED)) + h2.frame(h2.PING, 0, 0, b"thatsall"))
        after = await reader.readuntil(b"thatsall")
        told.set()
        await reader.read()

    async with listening(refuse) as address, calling(address) as calls:
        call = await calls.begin(METHOD, bytes(1 << 20), 10.0)
        for _ in range(2):  # whoever asks again does not hear that all was well
            with pytest.raises(grpc.aio.AioRpcError, match="reset"):
                await call.read()
        await told.wait()
    assert h2.frame(h2.RST_STREAM, 0, 1, h2.number(h2.CANCEL)) not in after


async def test_a_worker_that_remembers_no_headers_is_told_that_none_are_remembered() -> None:
    heads: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(h2.frame(h2.SETTINGS, 0, 0, h2.settings({1: 0})))
        decoder = Decoder()
        decoder.max_allowed_table_size = 0
        await reader.readexactly(len(h2.PREFACE))
        while len(heads) < 2:
            upper, lower, kind, _, number = h2.HEAD.unpack(await reader.readexactly(h2.HEAD_BYTES))
            payload = await reader.readexactly(upper << 8 | lower)
            if kind == h2.HEADERS:
                heads.extend(str(value) for name, value in decoder.decode(payload) if str(name) == ":path")
                writer.write(h2.frame(h2.HEADERS, h2.END_HEADERS, number, HEAD) + h2.frame(h2.HEADERS, 0x5, number, WELL))

    async with listening(serve) as address, calling(address) as calls:
        assert [await heard(calls) for _ in range(2)] == [([], None)] * 2
    assert heads == [METHOD] * 2

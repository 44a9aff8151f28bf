"""Calls of a load: one streamed answer each, by HTTP through the gateway or by gRPC straight to a worker, and what was seen of it.

Lean, so that the client is not what is measured: sockets and bytes, no HTTP library. Strict: an answer counts as whole only if
every token came, in order, with its finish reason, `[DONE]` and the end of the body.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc
from treadle_loadtests.report import Report

MODEL = "smollm2-135m"
QUESTION = "What is the capital of France, and why?"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
CALL_SECONDS_MAX = 120.0
_STAMP = re.compile(rb'"(?:content|text)":"(?:([0-9]+):)?([0-9]+) "')
_DONE = b"data: [DONE]"
_FINISHED = b'"finish_reason":"'  # an open one is null
_DEGRADED = b'"degraded":true'
ANY_NUMBER = -1  # of tokens, of a worker that has a model


@dataclass(slots=True)
class Seen:
    """One call. Moments are of CLOCK_MONOTONIC, ns; 0: never. `made_ns`, `came_ns`: of each token, at the worker and here."""

    request_id: str = ""
    tokens: int = 0
    sent_ns: int = 0
    status: int = 0
    reached_ns: int = 0
    made_ns: array[int] = field(default_factory=lambda: array("q"))
    came_ns: array[int] = field(default_factory=lambda: array("q"))
    ended_ns: int = 0
    left_ns: int = 0
    finished: bool = False
    done: bool = False
    degraded: bool = False
    trouble: str = ""
    retry_after: str = ""

    @property
    def whole(self) -> bool:
        """All of it came, and nothing else."""
        return self.finished and self.done and self.tokens in (len(self.came_ns), ANY_NUMBER) and not self.trouble

    @property
    def refused(self) -> bool:
        """It was told to come back later."""
        return self.status in (429, 503) and bool(self.retry_after)

    @property
    def why(self) -> str:
        """What is wrong with it, in words."""
        if self.trouble or self.status not in (0, 200):
            return f"status {self.status}: {self.trouble or 'refused'}"
        return f"{len(self.came_ns)} of {self.tokens} tokens, finish reason {self.finished}, [DONE] {self.done}"

    def first_token_seconds(self) -> float:
        """From sending to the first token."""
        return (self.came_ns[0] - self.sent_ns) / 1e9

    def first_added_seconds(self) -> float:
        """The same without what the worker took: the way there and the way back."""
        return (self.came_ns[0] - self.sent_ns - (self.made_ns[0] - self.reached_ns)) / 1e9

    def added_seconds(self) -> list[float]:
        """Of each token behind the first: from the worker's hand to ours."""
        return [(came - made) / 1e9 for made, came in zip(self.made_ns[1:], self.came_ns[1:], strict=True)]

    def token(self, match: re.Match[bytes], now_ns: int) -> None:
        """A token came."""
        if match[1] is not None:
            self.reached_ns = int(match[1])
        self.made_ns.append(int(match[2]))
        self.came_ns.append(now_ns)


def count_calls(report: Report, what: str, seen: Sequence[Seen]) -> None:
    """Count calls that should have come whole, those that did not, and why."""
    wrong = [call.why for call in seen if not call.whole]
    report.counts[what] = report.counts.get(what, 0) + len(seen)
    report.counts[f"{what}_failed"] = report.counts.get(f"{what}_failed", 0) + len(wrong)
    report.reasons = sorted({*report.reasons, *wrong})


def chat_body(tokens: int, *, stream: bool = True) -> dict[str, object]:
    """A short question whose answer is to have so many tokens."""
    message = {"role": "user", "content": QUESTION}
    return {"model": MODEL, "messages": [message], "max_tokens": tokens, "stream": stream}


class HttpCaller:
    """Calls one gateway over connections that are used again. Inside one event loop."""

    def __init__(self, address: str) -> None:
        self._host, _, port = address.rpartition(":")
        self._port, self._address = int(port), address
        self._idle: list[_Connection] = []
        self._all: set[_Connection] = set()

    def request(self, path: str, body: Mapping[str, Any], request_id: str = "", headers: Mapping[str, str] | None = None) -> bytes:
        """The bytes of a POST."""
        content = json.dumps(body, separators=(",", ":")).encode()
        lines = {
            "Host": self._address, "Content-Type": "application/json", "Content-Length": str(len(content)),
            **({"X-Request-Id": request_id} if request_id else {}), **(headers or {}),
        }  # fmt: skip
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content

    async def call(self, request: bytes, tokens: int, *, request_id: str = "", leave_after_seconds: float | None = None) -> Seen:
        """Send, and read until the answer ends, the connection does, or we leave by closing it."""
        seen = Seen(request_id, tokens, time.monotonic_ns())
        try:
            connection = self._idle.pop() if self._idle else await self._connect()
        except OSError as error:
            seen.trouble = f"cannot connect: {error}"
            return seen
        over = connection.send(request, seen)
        try:
            async with asyncio.timeout(leave_after_seconds or CALL_SECONDS_MAX):
                await over
        except TimeoutError:
            seen.left_ns = time.monotonic_ns()
            seen.trouble = "left" if leave_after_seconds else f"not over after {CALL_SECONDS_MAX:g} s"
            connection.leave()
            return seen
        if connection.reusable:
            self._idle.append(connection)
        return seen

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(lambda: _Connection(self._all), self._host, self._port)
        return connection

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._all):
            connection.leave()


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection: one call at a time."""

    def __init__(self, everyone: set[_Connection]) -> None:
        self._everyone = everyone
        self._transport: asyncio.Transport
        self._seen, self._over = Seen(), asyncio.get_running_loop().create_future()
        self._buffer = b""
        self._left = -1  # bytes of the body still to come; -1: the head is; -2: it comes in chunks
        self._body = b""  # of an answer in one piece
        self.reusable = False

    def send(self, request: bytes, seen: Seen) -> asyncio.Future[None]:
        """Write a request; the future is done once its answer is over."""
        self._seen, self._over, self.reusable = seen, asyncio.get_running_loop().create_future(), False
        self._buffer, self._left, self._body = b"", -1, b""
        if self._transport.is_closing():
            self._end("the connection was closed")
        else:
            self._transport.write(request)
        return self._over

    def leave(self) -> None:
        """Close the connection now, whatever is on its way."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._everyone.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._everyone.discard(self)
        self.reusable = False
        self._end("the connection was closed before the end of the answer")

    def data_received(self, data: bytes) -> None:
        now_ns, seen = time.monotonic_ns(), self._seen
        self._buffer = self._buffer + data if self._buffer else data
        if self._left == -1 and not self._head():
            return
        if self._left >= 0:
            self._body, self._buffer = self._body + self._buffer, b""
            if len(self._body) >= self._left:
                self._answer_in_one(now_ns)
            return
        position, buffer = 0, self._buffer
        while (line_end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:line_end], 16)
            end = line_end + 2 + size
            if len(buffer) < end + 2:
                break
            if size == 0:
                self.reusable = True
                self._end("")
                return
            self._events(buffer[line_end + 2 : end], seen, now_ns)
            position = end + 2
        self._buffer = buffer[position:]

    def _head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:])
        self._seen.status, self._seen.retry_after = int(lines[0].split()[1]), headers.get("retry-after", "")
        self._left = int(headers["content-length"]) if "content-length" in headers else -2
        self._buffer = self._buffer[end + 4 :]
        return True

    def _events(self, payload: bytes, seen: Seen, now_ns: int) -> None:
        """Whole events: the gateway writes none in two pieces."""
        match = _STAMP.search(payload)
        while match is not None:
            seen.token(match, now_ns)
            match = _STAMP.search(payload, match.end())
        if _FINISHED in payload:
            seen.finished = True
        if _DONE in payload:
            seen.done = True
        if _DEGRADED in payload:
            seen.degraded = True
        if b'"error":' in payload:
            seen.trouble = payload.decode(errors="replace")

    def _answer_in_one(self, now_ns: int) -> None:
        """An answer that is no stream: a refusal, or all tokens at once."""
        seen, body = self._seen, self._body
        if seen.status != 200:
            seen.trouble = body.decode(errors="replace")
        else:
            stamps = re.findall(rb"[0-9]+(?= )", body[: body.rfind(b'"finish_reason"')])
            for stamp in stamps:
                seen.made_ns.append(int(stamp))
                seen.came_ns.append(now_ns)
            seen.finished, seen.done, seen.degraded = _FINISHED in body, True, _DEGRADED in body
        self.reusable = True
        self._end("")

    def _end(self, trouble: str) -> None:
        if not self._over.done():
            self._seen.ended_ns = time.monotonic_ns()
            self._seen.trouble = self._seen.trouble or trouble
            self._over.set_result(None)


class GrpcCaller:
    """Calls workers themselves, one after the other: what a path costs that no gateway stands in."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._channels = [grpc.aio.insecure_channel(address) for address in addresses]
        self._stubs = [pb_grpc.WorkerServiceStub(channel) for channel in self._channels]
        self._calls = 0

    async def call(self, prompt: Sequence[int], tokens: int) -> Seen:
        """Send, and read until the end."""
        self._calls += 1
        request = pb.GenerateRequest(prompt_token_ids=prompt, sampling=pb.Sampling(max_tokens=tokens))
        seen = Seen(tokens=tokens, sent_ns=time.monotonic_ns())
        try:
            async for response in self._stubs[self._calls % len(self._stubs)].Generate(request, timeout=CALL_SECONDS_MAX):
                now_ns, text = time.monotonic_ns(), response.text_delta
                came, _, made = text.rpartition(":")
                seen.reached_ns = int(came) if came else seen.reached_ns
                seen.made_ns.append(int(made))
                seen.came_ns.append(now_ns)
                seen.finished = seen.done = response.finish_reason == pb.FINISH_REASON_LENGTH
        except grpc.aio.AioRpcError as error:
            seen.trouble = f"{error.code().name}: {error.details()}"
        seen.ended_ns = time.monotonic_ns()
        return seen

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels:
            await channel.close()

"""What happens around every RPC: key, limit on calls in progress, error table, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from typing import Any

import grpc
import grpc.aio
from prometheus_client import CollectorRegistry, Counter, Histogram

from treadle.chassis.bug_report import bug_report
from treadle.chassis.errors import status_of, trailing_details
from treadle.chassis.keys import key_digest
from treadle.chassis.tracing import annotate, server_span
from treadle.contract.errors import AccessDenied, ResourceExhausted
from treadle.contract.trace import TRACEPARENT, TRACESTATE, parse_trace

log = logging.getLogger("treadle.rpc")
_OPEN = ("/grpc.health.v1.Health/",)  # probes carry no key
_RETRY_AFTER_SECONDS = 0.1  # a call in progress ends within about that
DETAIL_BYTES_MAX = 4096  # of an error's text: it travels in a header, and gRPC refuses headers above 8 KiB
Context = Any  # grpc.aio.ServicerContext[Any, Any]: the stubs and the runtime disagree about its parameters


class RpcMetrics:
    """Counts and times RPCs by method and code."""

    def __init__(self, registry: CollectorRegistry, area: str) -> None:
        self.calls = Counter(
            f"treadle_{area}_rpc_calls", "RPCs ended, by method and status code", ["method", "code"], registry=registry
        )
        self.seconds = Histogram(f"treadle_{area}_rpc_seconds", "Seconds of an RPC, by method", ["method"], registry=registry)


class CallGuard(grpc.aio.ServerInterceptor):
    """Checks the key, bounds calls in progress, turns exceptions into statuses by `status`, and counts.

    keys:          as a file holds them, see chassis.keys
    key_digests:   sha256 of more keys that callers may show; without keys and digests nobody is asked for one
    words_in_logs: whether the log of a bug may hold the error's own words; not where these may be somebody's text
    begins_traces: a call without a trace context begins a trace; else it belongs to none
    """

    def __init__(
        self, *, status: Mapping[type[Exception], grpc.StatusCode], keys: frozenset[str], calls_max: int, metrics: RpcMetrics,
        key_digests: frozenset[bytes] = frozenset(), begins_traces: bool = False, words_in_logs: bool = True,
    ) -> None:  # fmt: skip
        self.begins_traces, self.words_in_logs = begins_traces, words_in_logs
        self._status, self._calls_max, self._metrics = status, calls_max, metrics
        self._digests = key_digests | {key_digest(key) for key in keys}
        self._calls = 0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        """Wrap the handler of a unary or streamed answer; calls to unknown methods pass through."""
        handler = await continuation(details)
        if handler is None:
            return None
        refusal = self._refusal(details)
        if details.method.startswith(_OPEN):
            return handler  # probes: no key, no limit, and handlers of another make
        if handler.response_streaming:
            inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
            make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
            return make(self._streaming(details.method, inner, refusal), handler.request_deserializer, handler.response_serializer)
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        return make(self._unary(details.method, inner, refusal), handler.request_deserializer, handler.response_serializer)

    def _refusal(self, details: grpc.HandlerCallDetails) -> Exception | None:
        if not self._digests:
            return None
        shown = next((str(value) for name, value in details.invocation_metadata or () if name == "authorization"), "")
        digest = hashlib.sha256(shown.removeprefix("Bearer ").encode()).digest() if shown.startswith("Bearer ") else b""
        known = [hmac.compare_digest(digest, key) for key in self._digests]  # all, in constant time
        return None if any(known) else AccessDenied("show a key: metadata `authorization: Bearer <key>`")

    def _unary(self, method: str, inner: Callable[..., Awaitable[Any]], refusal: Exception | None) -> Callable[..., Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            async with _Call(self, method, context, refusal):
                return await inner(request, context)

        return answer

    def _streaming(
        self, method: str, inner: Callable[..., AsyncGenerator[Any, None] | Awaitable[None]], refusal: Exception | None
    ) -> Callable[..., AsyncIterator[Any]]:
        async def answer(request: Any, context: Context) -> AsyncIterator[Any]:
            async with _Call(self, method, context, refusal):
                responses = inner(request, context)
                if isinstance(responses, Awaitable):
                    await responses  # it has written them to the context itself
                    return
                # Closed here and now when the caller leaves, not when the garbage collector comes by.
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        yield response

        return answer


class _Call:
    """One RPC in progress: admission on the way in, error table and metrics on the way out."""

    def __init__(self, guard: CallGuard, method: str, context: Context, refusal: Exception | None) -> None:
        self._guard, self._method, self._context, self._refusal = guard, method, context, refusal
        self._begun = time.monotonic()
        self._span = ExitStack()

    async def __aenter__(self) -> None:
        guard = self._guard
        shown = {name: value for name, value in self._context.invocation_metadata() or () if isinstance(value, str)}
        parent = parse_trace(shown.get(TRACEPARENT), shown.get(TRACESTATE))
        self._span.enter_context(server_span(self._method.removeprefix("/"), parent, begins=guard.begins_traces))
        full = guard._calls >= guard._calls_max
        guard._calls += 1
        try:
            if self._refusal is not None:
                raise self._refusal
            if full:
                raise ResourceExhausted(f"{guard._calls_max} calls in progress, the limit calls_max", _RETRY_AFTER_SECONDS)
        except Exception as error:
            await self.__aexit__(type(error), error, None)
            raise

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        guard = self._guard
        guard._calls -= 1
        code = self._code(error)
        guard._metrics.calls.labels(self._method, code.name).inc()
        guard._metrics.seconds.labels(self._method).observe(time.monotonic() - self._begun)
        annotate({"rpc.system": "grpc", "rpc.grpc.status_code": code.value[0]})
        failed = error if isinstance(error, Exception) else None
        self._span.__exit__(type(failed) if failed else None, failed, failed.__traceback__ if failed else None)
        if error is None or isinstance(error, (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError)):
            return
        if code is grpc.StatusCode.INTERNAL:
            if guard.words_in_logs:
                log.error("bug in a call", extra={"method": self._method}, exc_info=error)
            else:
                log.error("bug in a call", extra={"method": self._method, "bug": bug_report(error)})
            await self._context.abort(code, "internal error; the service's log has the details")
        assert isinstance(error, Exception)
        await self._context.abort(code, _short(str(error)), trailing_details(error))

    def _code(self, error: BaseException | None) -> grpc.StatusCode:
        if error is None:
            return grpc.StatusCode.OK
        if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            return grpc.StatusCode.CANCELLED
        if isinstance(error, grpc.aio.AbortError):
            return grpc.StatusCode.UNKNOWN
        code = status_of(error, self._guard._status) if isinstance(error, Exception) else None
        return code or grpc.StatusCode.INTERNAL


def _short(text: str) -> str:
    """`text`, cut in the middle where it would not fit a header."""
    if len(text.encode()) <= DETAIL_BYTES_MAX:
        return text
    half = DETAIL_BYTES_MAX // 8  # characters of up to 4 bytes
    return f"{text[:half]} … {text[-half:]}"

"""Which trace a piece of work belongs to, as W3C's Trace Context says it: what a caller showed, for those who are called next.

Owns the two headers and the context of the work in progress. Makes no spans (treadle.chassis.tracing), sends nothing.
Source: https://www.w3.org/TR/trace-context/, sections 3.2 and 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
STATE_CHARACTERS_MAX = 512  # what every participant must pass on; a longer one is left out whole, as the standard allows
_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE = re.compile(r"[\x20-\x7e]*")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace. trace_id: 32 hexadecimal digits, span_id: 16; sampled: somebody wants to see it; state: others' data."""

    trace_id: str
    span_id: str
    sampled: bool = False
    state: str = ""

    @property
    def traceparent(self) -> str:
        """The header of that name."""
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What a call carries on."""
        return ((TRACEPARENT, self.traceparent), *(((TRACESTATE, self.state),) if self.state else ()))


def parse_trace(traceparent: str | None, tracestate: str | None = None) -> TraceContext | None:
    """The context in two headers; None where there is none, or it is not well-formed: then a caller belongs to no trace."""
    match = _PARENT.fullmatch((traceparent or "").strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    state = (tracestate or "").strip()
    if len(state) > STATE_CHARACTERS_MAX or not _STATE.fullmatch(state):
        state = ""
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & 1), state)


_current: ContextVar[TraceContext | None] = ContextVar("treadle_trace", default=None)


def current_trace() -> TraceContext | None:
    """The span that the work in progress belongs to; None: to none."""
    return _current.get()


@contextmanager
def in_trace(context: TraceContext | None) -> Iterator[None]:
    """What the body does, and the tasks that it starts, belong to `context`."""
    before = _current.get()
    _current.set(context)
    try:
        yield
    finally:
        _current.set(before)  # no token: a generator may be closed by another task than the one that began it


def trace_headers() -> tuple[tuple[str, str], ...]:
    """What a call made now carries on; nothing outside of a trace."""
    context = _current.get()
    return () if context is None else context.headers

"""Spans of what a service does for a request, for whoever collects them by OTLP over HTTP.

Trace contexts are read and passed on by treadle.contract.trace, always. Spans are made only where OpenTelemetry's SDK is
installed (the extra `tracing`) and the settings name a collector. Attributes are names and counts: never prompts or answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from treadle.chassis.settings import WrongSetting
from treadle.contract.trace import TraceContext, in_trace

EXPORT_SECONDS_MAX = 2.0  # of one batch: a collector that does not answer delays the end of the process by no more
Attribute = str | int | float | bool | tuple[str, ...]
_span: ContextVar[Any] = ContextVar("treadle_span", default=None)
_tracer: Any = None  # opentelemetry's, once `exporting` made it: one for each process


@contextmanager
def exporting(service: str, endpoint: str, version: str) -> Iterator[None]:
    """While the body runs, spans of this process go to `endpoint`, a URL; "": none are made.

    Raises WrongSetting where the SDK is not installed.
    """
    global _tracer
    if not endpoint:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise WrongSetting("otlp_endpoint: spans need the extra: pip install 'treadle-chassis[tracing]'") from error
    resource = Resource.create({"service.name": f"treadle-{service}", "service.version": version})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS_MAX)))
    _tracer = provider.get_tracer("treadle")
    try:
        yield
    finally:
        _tracer = None
        provider.shutdown()


@contextmanager
def server_span(name: str, parent: TraceContext | None, *, begins: bool = False) -> Iterator[None]:
    """The body serves a call that `parent` made, and what it calls is a child of the span `name`.

    begins: without a parent a trace begins here; else the call belongs to none
    """
    if _tracer is None or (parent is None and not begins):
        with in_trace(parent):
            yield
        return
    from opentelemetry.trace import SpanKind, Status, StatusCode

    span = _tracer.start_span(name, context=_otel(parent), kind=SpanKind.SERVER)
    before = _span.get()
    _span.set(span)
    try:
        with in_trace(_ours(span.get_span_context())):
            yield
    except Exception as error:
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(Status(StatusCode.ERROR))  # without the error's text, which may name what was asked for
        raise
    finally:
        _span.set(before)
        span.end()


def annotate(attributes: Mapping[str, Attribute]) -> None:
    """Say something about the span in progress; nothing happens where there is none."""
    span = _span.get()
    if span is not None:
        span.set_attributes(dict(attributes))


def _otel(parent: TraceContext | None) -> Any:
    """OpenTelemetry's context with `parent` as the remote span."""
    from opentelemetry import context, trace
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState

    if parent is None:
        return context.Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state]) if parent.state else None
    remote = SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), is_remote=True, trace_flags=flags, trace_state=state)
    return trace.set_span_in_context(NonRecordingSpan(remote), context.Context())


def _ours(context: Any) -> TraceContext:
    return TraceContext(
        f"{context.trace_id:032x}", f"{context.span_id:016x}", bool(context.trace_flags.sampled), context.trace_state.to_header()
    )

"""Traces through the gateway: W3C contexts in, spans to a collector, contexts on to the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inference_gateway.settings import Settings
from treadle.chassis.settings import WrongSetting
from treadle.client import Endpoint
from treadle.client.gateway import Gateway
from treadle.contract.trace import parse_trace
from treadle.inference.v1 import gateway_pb2 as pb

wire = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="OpenTelemetry's SDK and OTLP exporter are not installed: pip install 'treadle-chassis[tracing]'",
)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=opaque"}
SECRET = "what nobody else may read"
CHAT = {"model": "tiny-chat", "messages": [{"role": "user", "content": SECRET}]}


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    """(its URL, the requests that came)."""
    came: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            came.append(wire.ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", came
    server.shutdown()
    server.server_close()
    thread.join()


def spans_of(came: list[Any]) -> list[Any]:
    return [span for request in came for group in request.resource_spans for scope in group.scope_spans for span in scope.spans]


def told(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_a_chat_is_a_span_between_its_caller_and_the_worker(
    worker: Any, start_gateway: Callable[..., Any], collector: tuple[str, list[Any]]
) -> None:
    url, came = collector
    gateway = start_gateway("--worker", worker.address, "--otlp-endpoint", url)
    gateway.wait_ready()
    assert (
        gateway.http.post("/v1/chat/completions", json=CHAT | {"n": 2}, headers=PARENT | {"x-request-id": "mine"}).status_code
        == 200
    )
    assert gateway.http.post("/v1/embeddings", json={"model": "tiny-chat", "input": "x"}).status_code == 200
    gateway.http.get("/v1/models", headers=PARENT)
    assert gateway.terminate() == 0
    chat, vectors = spans_of(came)
    assert bytes(chat.trace_id).hex() == TRACE
    assert bytes(chat.parent_span_id).hex() == SPAN
    assert chat.trace_state == "vendor=opaque"
    assert {parse_trace(shown).span_id for shown in worker.traces[:2]} == {bytes(chat.span_id).hex()}  # type: ignore[union-attr]
    attributes = told(chat)
    assert (attributes["gen_ai.operation.name"], attributes["gen_ai.request.model"]) == ("chat", "tiny-chat")
    assert (attributes["gen_ai.usage.output_tokens"], attributes["http.response.status_code"]) == (18, 200)
    assert attributes["treadle.request_id"] == "mine"
    assert [value.string_value for value in attributes["gen_ai.response.finish_reasons"].values] == ["stop", "stop"]
    assert not vectors.parent_span_id  # nobody showed a trace: one begins here
    assert told(vectors)["gen_ai.operation.name"] == "embeddings"
    assert SECRET not in str(came)


def test_without_a_collector_the_context_is_passed_on_as_it_came(gateway: Any, worker: Any) -> None:
    for headers, shown in ((PARENT, [PARENT["traceparent"]]), ({}, []), ({"traceparent": "00-nonsense"}, [])):
        worker.traces.clear()
        assert gateway.http.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 200
        assert worker.traces == shown


def test_a_call_of_the_service_is_a_span_too(
    worker: Any, start_gateway: Callable[..., Any], collector: tuple[str, list[Any]]
) -> None:
    url, came = collector
    served = start_gateway("--worker", worker.address, "--otlp-endpoint", url, "--grpc-listen", "127.0.0.1:0")
    served.wait_ready()
    with Gateway(Endpoint(served.ready["grpc"])) as gateway:
        list(gateway.chat(pb.ChatRequest(model="tiny-chat", messages=[pb.ChatMessage(role="user", content=SECRET)])))
    assert served.terminate() == 0
    (span,) = spans_of(came)
    assert span.name == "treadle.inference.v1.GatewayService/Chat"
    assert told(span)["gen_ai.usage.output_tokens"] == 9
    assert parse_trace(worker.traces[-1]).span_id == bytes(span.span_id).hex()  # type: ignore[union-attr]


def test_an_endpoint_that_is_no_url_stops_the_start() -> None:
    with pytest.raises(WrongSetting, match="otlp_endpoint"):
        Settings(otlp_endpoint="127.0.0.1:4318")

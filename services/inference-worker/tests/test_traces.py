"""One trace through worker and pool: two processes, OpenTelemetry's own SDK in each, and a collector that this test is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramPool
from treadle.client.worker import Worker
from treadle.contract.trace import TraceContext, in_trace
from treadle.inference.v1 import worker_pb2 as pb

pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk is not installed: pip install 'treadle-chassis[tracing]'")
wire = pytest.importorskip(
    "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
    reason="the OTLP exporter is not installed: treadle-chassis[tracing]",
)
CALLER = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True, "vendor=opaque")
FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
SECONDS = 60.0


class Collector:
    """Takes spans by OTLP over HTTP: (service, span) as they come."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.take(wire.ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def take(self, request: Any) -> None:
        for group in request.resource_spans:
            named = {entry.key: entry.value.string_value for entry in group.resource.attributes}
            self.spans += [(named["service.name"], span) for scope in group.scope_spans for span in scope.spans]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    taking = Collector()
    yield taking
    taking.close()


@pytest.fixture
def start(collector: Collector) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    with ExitStack() as stack:

        def run(module: str, *argv: str) -> tuple[subprocess.Popen[str], str]:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [sys.executable, "-m", module, *FREE, "--otlp-endpoint", collector.url, *argv]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(child.kill)
            assert child.stdout is not None
            return child, json.loads(child.stdout.readline())["listen"]

        yield run


def test_a_request_and_what_its_memory_asked_of_the_pool_are_one_trace(
    start: Callable[..., tuple[subprocess.Popen[str], str]], collector: Collector, fake_pool: Any, tiny_engram: Any, tiny_folder: Path,
    tmp_path: Path,
) -> None:  # fmt: skip
    pool, pool_address = start("engram_pool", "--segment-dir", str(tmp_path / "segments"))
    worker, listen = start("inference_worker", "--model", str(tiny_folder), "--engram-pool", pool_address)
    with EngramPool(Endpoint(pool_address)) as loads:
        loads.load_grown(fake_pool.grow("kjv").write(tmp_path / "kjv", tiny_engram[1]))
    request = pb.GenerateRequest(
        request_id="mine", prompt_token_ids=range(1, 41), sampling=pb.Sampling(max_tokens=4, ignore_eos=True),
        engram=pb.EngramChoice(model="kjv"), memory_policy=pb.MemoryPolicy(wait_seconds_max=5.0),
    )  # fmt: skip
    with Worker(Endpoint(listen)) as asks:
        with in_trace(CALLER):
            assert list(asks.generate(request, SECONDS))[-1].finish_reason == pb.FINISH_REASON_LENGTH
        list(asks.generate(request, SECONDS))  # belongs to no trace
    for child in (worker, pool):
        child.terminate()
        assert child.wait(SECONDS) == 0
    spans = {(service, span.name): span for service, span in collector.spans}
    assert {bytes(span.trace_id).hex() for _, span in collector.spans} == {CALLER.trace_id}
    generate = spans["treadle-inference-worker", "treadle.inference.v1.WorkerService/Generate"]
    assert bytes(generate.parent_span_id).hex() == CALLER.span_id
    assert generate.trace_state == CALLER.state
    below = [span for service, span in collector.spans if service == "treadle-engram-pool"]
    # Which calls it took depends on who was first to open the version: the request, or the worker ahead of it.
    assert {span.name.partition("/")[0] for span in below} == {"treadle.engram.v1.EngramPoolService"}
    assert {bytes(span.parent_span_id) for span in below} == {bytes(generate.span_id)}
    told = {entry.key: entry.value for entry in generate.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == 40
    assert told["gen_ai.usage.output_tokens"].int_value == 4
    assert told["treadle.memory"].string_value.startswith("kjv@")
    assert told["treadle.request_id"].string_value == "mine"


def test_a_dead_collector_delays_nothing_but_the_end(
    start: Callable[..., tuple[subprocess.Popen[str], str]], tiny_folder: Path
) -> None:
    worker, listen = start("inference_worker", "--model", str(tiny_folder), "--otlp-endpoint", "http://127.0.0.1:9/v1/traces")
    with Worker(Endpoint(listen)) as asks, in_trace(CALLER):
        began = time.monotonic()
        list(
            asks.generate(pb.GenerateRequest(prompt_token_ids=[1, 2], sampling=pb.Sampling(max_tokens=2, ignore_eos=True)), SECONDS)
        )
        assert time.monotonic() - began < 10
    worker.terminate()
    assert worker.wait(SECONDS) == 0

"""Rows by every transport, from a pool of one model on real gRPC: opened late, killed, and the same bits whatever the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray

from inference_worker.adapters.engram_pool import open_engram, read_key
from inference_worker.domain.answer import Answer
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.request import Piece, Request, Sampling
from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramHandle, fake_handle
from treadle.contract import PROTO_VERSION, AccessDenied, EngramModel, Late, NotFound, Transport, Unavailable, WaitPolicy, Windows
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc
from treadle.kernels import HashPlan, lookup
from treadle.kernels.segment import Segment, SegmentWriter
from treadle.nn.memory_fit import fusion_of
from treadle.nn.model import CausalLM

TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
Ask = Callable[..., list[Piece]]
Prompt = Callable[..., tuple[int, ...]]
MakeEngine = Callable[..., Engine]
PIECE_ROWS = 100  # of a Lookup message: whole rows, cut anywhere
GREEDY = Sampling(max_tokens=12, ignore_eos=True, top_logprobs=0)


class PoolOfOne(pb_grpc.EngramPoolServiceServicer):
    """Serves one model from segments in a folder, as a pool does."""

    def __init__(self, folder: Path, engram: TinyEngram) -> None:
        model, token_map, self._tables = engram
        tables, self._segments = {}, []
        for layer, rows in self._tables.items():
            path = folder / f"{layer}.safetensors"
            with SegmentWriter(path, rows=len(rows), row_bytes=model.row.bytes, token_map=token_map) as writer:
                writer.append(rows)
                tables[layer] = writer.table()
                writer.publish({"schema": "treadle.segment/1", "model": model.to_json().decode(), "layer": str(layer)})
            with Segment(path) as segment:
                self._segments.append(
                    pb.Segment(layer=layer, path=str(path), rows_offset_bytes=segment.rows_offset_bytes, rows=len(rows),
                               row_bytes=model.row.bytes, file_bytes=segment.file_bytes)
                )  # fmt: skip
        self.model = model.with_tables(tables)
        self._plans = {layer: HashPlan.from_model(self.model, layer, token_map) for layer in model.layers}
        self._lock = folder / "lock"
        self._lock.touch()

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802
        return pb.StatusResponse(proto_version=PROTO_VERSION)

    def OpenModel(self, request: pb.OpenModelRequest, context: Any) -> pb.OpenModelResponse:  # noqa: N802
        if request.ref.model != self.model.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no {request.ref.model}")
        ref = pb.ModelRef(model=self.model.name, version=self.model.version)
        model = pb.Model(ref=ref, current=True, manifest_json=self.model.to_json())
        return pb.OpenModelResponse(model=model, segments=self._segments, lock_path=str(self._lock))

    def Lookup(self, request: pb.LookupRequest, context: Any) -> Iterator[pb.LookupResponse]:  # noqa: N802
        depth = self.model.order_max - 1
        windows = Windows(
            tokens=np.frombuffer(request.windows.tokens, dtype=np.int64), starts=np.frombuffer(request.windows.starts, dtype=np.int32),
            lookback=np.frombuffer(request.windows.lookback, dtype=np.int64).reshape(-1, depth),
        )  # fmt: skip
        for layer in request.layers:
            out = np.empty((windows.token_count, self.model.columns, self.model.row.bytes), dtype=np.uint8)
            lookup(self._plans[layer], self._tables[layer], windows, out)
            flat = out.reshape(-1, self.model.row.bytes)
            for first in range(0, len(flat), PIECE_ROWS):
                yield pb.LookupResponse(layer=layer, data=flat[first : first + PIECE_ROWS].tobytes())


class RunningPool:
    """A pool on a port of its own, started and killed at will."""

    def __init__(self, servicer: PoolOfOne) -> None:
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        pb_grpc.add_EngramPoolServiceServicer_to_server(servicer, self._server)
        self.endpoint = Endpoint(f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}", timeout_seconds=5.0)
        self.started = False

    def start(self) -> None:
        self._server.start()
        self.started = True

    def kill(self) -> None:
        self._server.stop(0).wait(10)


@pytest.fixture
def pool(tiny_engram: TinyEngram, tmp_path: Path) -> Iterator[RunningPool]:
    running = RunningPool(PoolOfOne(tmp_path, tiny_engram))  # type: ignore[abstract]  # only for mypy: gRPC answers UNIMPLEMENTED
    yield running
    running.kill()


@pytest.fixture
def fused(tiny: CausalLM) -> Callable[..., EngramMemory]:
    """A memory on a handle, fused."""

    def make(handle: EngramHandle) -> EngramMemory:
        return EngramMemory(handle, fusion_of(handle.model, tiny.config.hidden, None), fused=True)

    return make


def logprobs_of(pieces: list[Piece]) -> list[float]:
    return [entry.logprob for piece in pieces for entry in piece.logprobs]


def test_neither_transport_nor_prefetch_changes_a_bit(
    pool: RunningPool, engines: MakeEngine, fused: Callable[..., EngramMemory], tiny_engram: TinyEngram, ask: Ask, prompt: Prompt
) -> None:
    pool.start()
    requests = [Request(prompt(length, length), GREEDY, policy=WaitPolicy(20.0)) for length in (3, 40, 90)]
    answers: dict[tuple[str, bool], list[float]] = {}
    for transport in ("mapped", "local", "rpc"):
        for prefetch in (True, False):
            with open_engram(pool.endpoint, "tiny", "", transport, 10.0) as handle:
                pieces = ask(engines(fused(handle), prefetch=prefetch, wait_seconds_max=20.0), *requests)
            reports = [piece.finish.memory[0] for piece in pieces if piece.finish is not None]
            assert [(report.transport, report.rows_missing) for report in reports] == [(transport, 0)] * 3
            answers[transport, prefetch] = logprobs_of(pieces)
    with fake_handle(*tiny_engram) as handle:
        expected = logprobs_of(ask(engines(fused(handle)), *requests))
    assert all(answer == expected for answer in answers.values())


def test_a_mapped_memory_outlives_its_pool_and_changes_no_token(
    pool: RunningPool, engines: MakeEngine, fused: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    pool.start()
    request = Request(prompt(40), Sampling(max_tokens=30, ignore_eos=True, top_logprobs=0))
    with open_engram(pool.endpoint, "tiny", "", "auto", 10.0) as handle:
        assert handle.transport is Transport.MAPPED
        expected = ask(engines(fused(handle)), request)
        engine, answer = engines(fused(handle)), Answer()
        engine.submit(request, answer)
        for _ in range(5):
            engine.step()
        pool.kill()
        while not answer.done:
            engine.step()
    assert not answer.piece.degraded
    assert logprobs_of([answer.piece]) == logprobs_of(expected)


def test_a_memory_by_rpc_that_loses_its_pool_degrades_and_says_so(
    pool: RunningPool, engines: MakeEngine, fused: Callable[..., EngramMemory], ask: Ask, prompt: Prompt
) -> None:
    pool.start()
    request = Request(prompt(40), Sampling(max_tokens=2, ignore_eos=True), policy=WaitPolicy(0.05, Late.MASK))
    with open_engram(pool.endpoint, "tiny", "", "rpc", 10.0) as handle:
        pool.kill()
        for prefetch in (True, False):
            (piece,) = ask(engines(fused(handle), prefetch=prefetch), request)
            assert piece.degraded
            assert piece.finish is not None
            assert piece.finish.memory[0].rows_missing == 2 * 4 * 41


def test_a_pool_that_starts_late_is_waited_for(pool: RunningPool) -> None:
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            pool.start()

    impatient = replace(pool.endpoint, timeout_seconds=0.2)  # its port is taken, but nobody answers there yet
    with open_engram(impatient, "tiny", "", "auto", 60.0, sleep) as handle:
        assert handle.model.name == "tiny"
    assert pauses[:3] == [0.1, 0.2, 0.4]


def test_a_pool_or_model_that_never_comes_is_named_in_the_refusal(pool: RunningPool) -> None:
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1"):
        open_engram(Endpoint("127.0.0.1:1"), "tiny", "", "auto", 0.0)
    pool.start()
    with pytest.raises(NotFound, match="other-model"):
        open_engram(pool.endpoint, "other-model", "", "auto", 0.0)


def test_the_key_is_the_first_line_that_is_no_comment(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("# for the pool\n\nsecret\nother\n")
    assert read_key(path) == "secret"
    assert read_key(None) is None
    path.write_text("# nothing\n")
    for wrong in (path, tmp_path / "absent"):
        with pytest.raises(AccessDenied, match="engram_key_file"):
            read_key(wrong)

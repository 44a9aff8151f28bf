"""WorkerService over real gRPC on loopback, with the SDK's own client."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from inference_worker.adapters.prometheus import WorkerMetrics
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine import Engine
from inference_worker.domain.engine_thread import EngineThread
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_status import NoCatalogue
from inference_worker.domain.request import Piece, TokenLogprob
from inference_worker.domain.resident_versions import Choice
from inference_worker.domain.text import Vocabulary
from inference_worker.server import STATUS, ModelCard, WorkerServer, write_piece
from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.client.endpoint import Endpoint
from treadle.client.engram import StepPrefetcher, fake_handle
from treadle.client.worker import AsyncWorker
from treadle.contract import PROTO_VERSION, EngramModel
from treadle.contract.errors import (
    DataLoss,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from treadle.contract.policy import WaitPolicy
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc
from treadle.nn.memory_fit import fusion_of
from treadle.nn.model import CausalLM

Serve = Callable[..., Any]
TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
Eventually = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def serve(tiny: CausalLM, tiny_vocabulary: Vocabulary, registry: CollectorRegistry) -> Serve:
    """Serves the tiny model; gives a client and the engine."""

    @asynccontextmanager
    async def run(
        memories: Catalogue | NoCatalogue | None = None, *, open_seconds_max: float = 30.0, **limits: int
    ) -> AsyncIterator[tuple[AsyncWorker, Engine]]:
        metrics = WorkerMetrics(registry)
        chosen = Limits(**{"step_tokens_max": 64, "context_tokens_max": 200} | limits)
        engine = Engine(tiny, tiny_vocabulary, chosen, prefetcher=StepPrefetcher(), observer=metrics)
        metrics.watch(engine)
        guard = CallGuard(status=STATUS, keys=frozenset(), calls_max=100, metrics=RpcMetrics(registry, "worker"))
        server = grpc.aio.server(interceptors=[guard])
        with EngineThread(engine) as thread:
            card = ModelCard("tiny", Path("/models/tiny"), "0" * 64, "1.2.3")
            servicer = WorkerServer(thread, card, WaitPolicy(), memories, open_seconds_max=open_seconds_max)
            pb_grpc.add_WorkerServiceServicer_to_server(servicer, server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            async with AsyncWorker(Endpoint(f"127.0.0.1:{port}")) as worker:
                yield worker, engine
            await server.stop(0)

    return run


def request(tokens: int = 10, **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r1",
        prompt_token_ids=range(1, 1 + tokens),
        sampling=pb.Sampling(**{"max_tokens": 8, "ignore_eos": True} | sampling),
    )


async def whole(worker: AsyncWorker, asked: pb.GenerateRequest, seconds: float = 30.0) -> list[pb.GenerateResponse]:
    return [response async for response in worker.generate(asked, seconds)]


async def test_an_answer_has_ids_text_reason_and_usage(serve: Serve) -> None:
    async with serve() as (worker, _):
        responses = await whole(worker, request(40, top_logprobs=2))
        again = await whole(worker, request(40, top_logprobs=2))
    ids = [token for response in responses for token in response.token_ids]
    logprobs = [entry for response in responses for entry in response.logprobs]
    assert len(ids) == len(logprobs) == 8
    assert [entry.token_id for entry in logprobs] == ids
    assert all(len(entry.top) == 2 and entry.logprob <= 0 for entry in logprobs)
    text = b"".join(entry.text for entry in logprobs).decode(errors="replace")
    assert "".join(response.text_delta for response in responses) == text
    last = responses[-1]
    assert last.finish_reason == pb.FINISH_REASON_LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (40, 8, 0)
    assert again[-1].usage.cached_tokens == 32
    assert all(response.finish_reason == pb.FINISH_REASON_UNSPECIFIED for response in responses[:-1])


async def test_the_status_says_which_engine_runs_and_how_long_a_new_request_would_wait(serve: Serve) -> None:
    async with serve(sequences_max=3) as (worker, _):
        status = await worker.status()
    assert (status.engine, status.engine_version, status.dtype) == ("embedded", "1.2.3", "float32")
    assert (status.requests_running_max, status.wait_seconds_predicted) == (3, 0.0)


async def test_prompt_logprobs_come_in_the_first_message(serve: Serve) -> None:
    async with serve() as (worker, _):
        responses = await whole(worker, request(20, prompt_logprobs=True))
    assert [entry.token_id for entry in responses[0].prompt_logprobs] == list(range(2, 21))
    assert not any(response.prompt_logprobs for response in responses[1:])
    assert not any(response.logprobs for response in responses)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (pb.GenerateRequest(), "prompt_token_ids"),
        (pb.GenerateRequest(prompt_token_ids=[100_000]), "prompt_token_ids"),
        (request(200), "prompt_token_ids"),
        (request(temperature=-1), "temperature"),
        (request(top_p=2), "top_p"),
        (request(stop=["x"] * 20), "stop"),
        (request(top_logprobs=21), "top_logprobs"),
        (pb.GenerateRequest(prompt_token_ids=[1], memory_policy=pb.MemoryPolicy(wait_seconds_max=99)), "wait_seconds_max"),
    ],
)
async def test_a_bad_request_is_refused_naming_the_field(serve: Serve, asked: pb.GenerateRequest, field: str) -> None:
    async with serve() as (worker, engine):
        with pytest.raises(InvalidArgument, match=field):
            await whole(worker, asked)
        assert engine.totals.steps == 0


async def test_a_caller_who_leaves_stops_the_generation(
    serve: Serve, registry: CollectorRegistry, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, counted = threading.Event(), WorkerMetrics.step

    def held(metrics: WorkerMetrics, report: Any) -> None:  # the second step ends once it is known that nobody reads any more
        counted(metrics, report)
        if registry.get_sample_value("treadle_worker_steps_total") == 2:
            left.wait(30)

    monkeypatch.setattr(WorkerMetrics, "step", held)
    async with serve() as (worker, engine):
        stream = worker.generate(request(max_tokens=0), 30.0)
        await anext(stream)
        await stream.aclose()
        await eventually(lambda: all(each.cancelled for each in engine._scheduler.running))
        left.set()
        await eventually(lambda: not engine.load.requests_running)
        assert engine.totals.completion_tokens <= 2
    assert registry.get_sample_value("treadle_worker_requests_total", {"outcome": "cancelled"}) == 1


async def test_the_calls_deadline_bounds_the_generation(serve: Serve, eventually: Eventually) -> None:
    async with serve(sequences_max=1) as (worker, engine):
        with pytest.raises(DeadlineExceeded):
            await whole(worker, request(max_tokens=0), 0.02)
        await eventually(lambda: not engine.load.requests_running)


async def test_a_full_queue_says_when_to_come_back(serve: Serve, registry: CollectorRegistry) -> None:
    async with serve(sequences_max=1, requests_waiting_max=1) as (worker, _):
        streams = [worker.generate(request(max_tokens=0), 30.0) for _ in range(8)]
        results = await asyncio.gather(*(anext(stream) for stream in streams), return_exceptions=True)
        refused = [result for result in results if isinstance(result, ResourceExhausted)]
        assert refused
        assert all(error.retry_after_seconds is not None and error.retry_after_seconds > 0 for error in refused)
        for stream in streams:
            await stream.aclose()
    assert registry.get_sample_value("treadle_worker_requests_total", {"outcome": "refused"}) == len(refused)


async def test_a_draining_worker_refuses_with_unavailable_and_says_so(serve: Serve) -> None:
    async with serve() as (worker, engine):
        engine.close_door()
        with pytest.raises(Unavailable, match="stopping"):
            await whole(worker, request())
        assert (await worker.status()).draining


async def test_status_tells_model_and_load(serve: Serve) -> None:
    async with serve() as (worker, engine):
        await whole(worker, request())
        status = await worker.status()
    assert (status.model, status.model_dir, status.tokenizer_digest) == ("tiny", "/models/tiny", "0" * 64)
    assert (status.build_version, status.proto_version) == ("1.2.3", PROTO_VERSION)
    assert (status.context_tokens_max, list(status.eos_token_ids)) == (200, [256])
    assert (status.prompt_tokens, status.completion_tokens, status.steps) == (10, 8, engine.totals.steps)
    assert (status.engram_model, len(status.engram_layers)) == ("", 0)


async def test_metrics_count_steps_tokens_and_outcomes(serve: Serve, registry: CollectorRegistry) -> None:
    async with serve() as (worker, engine):
        await whole(worker, request())
        seen = {
            name: registry.get_sample_value(f"treadle_worker_{name}", labels)
            for name, labels in (
                ("steps_total", {}),
                ("step_seconds_count", {}),
                ("prompt_tokens_total", {}),
                ("completion_tokens_total", {}),
                ("requests_running", {}),
                ("requests_total", {"outcome": "length"}),
            )
        }
        assert list(seen.values()) == [8, 8, 10, 8, 0, 1], seen
        assert engine.totals.steps == 8


@pytest.fixture
def shadowed(tiny: CausalLM, tiny_engram: TinyEngram, catalogues: Callable[..., Catalogue]) -> Callable[[float], Catalogue]:
    """Makes catalogues with a shadowed default memory whose rows come after a delay in seconds."""

    def make(delay_seconds: float) -> Catalogue:
        handle = fake_handle(*tiny_engram, delay_seconds)
        catalogue = catalogues(default=Choice("tiny"), heard=False)
        catalogue.adopt_default(EngramMemory(handle, fusion_of(handle.model, tiny.config.hidden, None), fused=False))
        return catalogue

    return make


async def test_status_and_the_last_message_tell_what_the_engram_did(
    serve: Serve, shadowed: Callable[[float], Catalogue], registry: CollectorRegistry
) -> None:
    async with serve(shadowed(0.0)) as (worker, _):
        responses = await whole(worker, request())
        status = await worker.status()
    (report,) = responses[-1].memory
    assert (report.kind, report.name, report.transport, report.shadowed, report.tickets) == ("engram", "tiny", "fake", True, 16)
    assert (status.engram_model, status.engram_version, status.engram_transport) == ("tiny", report.version, "fake")
    assert not status.engram_fused
    assert [(layer.layer, layer.tickets, layer.rows_missing) for layer in status.engram_layers] == [(1, 8, 0), (2, 8, 0)]
    outcomes = [
        registry.get_sample_value("treadle_worker_engram_tickets_total", {"layer": "1", "outcome": x}) for x in ("in_time", "late")
    ]
    assert sum(count or 0 for count in outcomes) == 8
    assert registry.get_sample_value("treadle_worker_engram_slack_seconds_count", {"layer": "2"}) == 8
    fake = {"transport": "fake"}
    rows = sum(layer.row_bytes for layer in status.engram_layers) // 32
    assert registry.get_sample_value("treadle_worker_engram_rows_total", fake) == rows
    assert registry.get_sample_value("treadle_worker_engram_gathers_total", fake | {"outcome": "ok"}) == 16
    assert registry.get_sample_value("treadle_worker_engram_gather_seconds_count", fake) == 16


async def test_a_caller_chooses_between_a_degraded_answer_and_none(
    serve: Serve, shadowed: Callable[[float], Catalogue], registry: CollectorRegistry
) -> None:
    brief = pb.MemoryPolicy(wait_seconds_max=0.001, late=pb.LATE_POLICY_MASK)
    async with serve(shadowed(5.0)) as (worker, _):
        masked = request(max_tokens=2)
        masked.memory_policy.CopyFrom(brief)
        responses = await whole(worker, masked)
        assert all(response.degraded for response in responses)
        assert responses[-1].memory[0].rows_missing == 2 * 4 * 11
        assert responses[-1].memory[0].missing_because == "late"
        masked.memory_policy.late = pb.LATE_POLICY_FAIL
        with pytest.raises(Unavailable, match="rows missing"):
            await whole(worker, masked)
    assert registry.get_sample_value("treadle_worker_requests_total", {"outcome": "memory_missing"}) == 1
    assert registry.get_sample_value("treadle_worker_engram_tickets_total", {"layer": "1", "outcome": "missing"}) == 3
    assert registry.get_sample_value("treadle_worker_engram_gathers_total", {"transport": "fake", "outcome": "missing"}) == 6
    assert registry.get_sample_value("treadle_worker_engram_gather_seconds_count", {"transport": "fake"}) is None


def choosing(name: str, version: str = "", **sampling: Any) -> pb.GenerateRequest:
    asked = request(**sampling)
    asked.engram.CopyFrom(pb.EngramChoice(model=name, version=version))
    return asked


async def test_a_request_chooses_its_memory_and_status_lists_them(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue]
) -> None:
    kjv, law = fake_pool.grow("kjv"), fake_pool.grow("law", seed=1)
    async with serve(catalogues()) as (worker, _):
        chosen = await whole(worker, choosing("kjv", kjv.version[:8].upper()))
        without = await whole(worker, choosing(""))
        silent = await whole(worker, request())
        status = await worker.status()
    (report,) = chosen[-1].memory
    assert (report.name, report.version, report.shadowed, report.tickets) == ("kjv", kjv.version, False, 16)
    assert not without[-1].memory
    assert not silent[-1].memory
    listed = [(each.model, each.version, each.default, each.open, each.requests, each.tokens) for each in status.engram_models]
    assert listed == [("kjv", kjv.version, False, True, 0, 17), ("law", law.version, False, False, 0, 0)]
    assert [(each.transport, each.fused, each.refusal) for each in status.engram_models] == [("fake", True, ""), ("", True, "")]
    assert status.engram_model == ""  # there is no default
    assert [(layer.layer, layer.tickets) for layer in status.engram_layers] == [(1, 8), (2, 8)]  # of all memories


async def test_tickets_of_all_memories_are_summed_by_layer(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue]
) -> None:
    for seed, name in enumerate(("kjv", "law")):
        fake_pool.grow(name, seed)
    async with serve(catalogues(open_max=1)) as (worker, _):
        for name in ("kjv", "law"):  # the second closes the first
            await whole(worker, choosing(name))
        status = await worker.status()
    assert [(layer.layer, layer.tickets) for layer in status.engram_layers] == [(1, 16), (2, 16)]
    assert sum(layer.row_bytes for layer in status.engram_layers) == 2 * 2 * 17 * 4 * 32


async def test_a_memory_is_had_at_once_after_its_load_though_the_watch_is_silent(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue]
) -> None:
    async with serve(catalogues()) as (worker, _):
        kjv = fake_pool.grow("kjv")
        (report,) = (await whole(worker, choosing("kjv")))[-1].memory
    assert report.version == kjv.version


async def test_a_choice_that_cannot_be_had_is_refused_with_its_own_code(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue]
) -> None:
    kjv = fake_pool.grow("kjv")
    fake_pool.failures["broken"] = DataLoss("torn")
    fake_pool.grow("broken", seed=1)
    fake_pool.put(replace(kjv, model=replace(kjv.model, name="foreign", token_map="0" * 64)))
    async with serve(catalogues()) as (worker, engine):
        for name, error, words in (
            ("bible", NotFound, "'broken', 'kjv'"), ("foreign", FingerprintMismatch, "token_map"), ("broken", DataLoss, "'broken'.*torn"),
        ):  # fmt: skip
            with pytest.raises(error, match=words):
                await whole(worker, choosing(name))
        (listed,) = [each for each in (await worker.status()).engram_models if each.model == "broken"]
        assert "torn" in listed.refusal
        with pytest.raises(InvalidArgument, match=r"engram\.version"):
            await whole(worker, choosing("kjv", "abc"))
        assert engine.totals.steps == 0
        assert await whole(worker, choosing("kjv"))


async def test_a_worker_without_a_pool_has_no_memory_to_choose(serve: Serve) -> None:
    async with serve() as (worker, _):
        with pytest.raises(NotFound, match="without an Engram pool"):
            await whole(worker, choosing("kjv"))
        assert not (await worker.status()).engram_models


async def test_an_opening_that_hangs_ends_its_own_request_in_time_and_leaves_no_lease_behind(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue], take: Callable[..., Any], eventually: Eventually
) -> None:
    for seed, name in enumerate(("kjv", "stuck")):
        fake_pool.grow(name, seed)
    fake_pool.hanging["stuck"] = threading.Event()
    catalogue = catalogues()
    take(catalogue, "kjv").release()  # open: the short time for openings is not its own
    async with serve(catalogue, open_seconds_max=0.2) as (worker, engine):
        stuck = asyncio.create_task(whole(worker, choosing("stuck")))
        hasty = asyncio.create_task(whole(worker, choosing("stuck"), 0.05))
        assert (await whole(worker, choosing("kjv")))[-1].memory[0].name == "kjv"
        with pytest.raises(DeadlineExceeded, match="'stuck' is still being opened"):
            await stuck
        with pytest.raises(DeadlineExceeded):
            await hasty
        fake_pool.hanging["stuck"].set()
        await eventually(lambda: catalogue.open_count == 2)
        assert [memory.requests for memory in catalogue.memories()] == [0, 0]
        assert engine.totals.completion_tokens == 8


async def test_a_bad_request_opens_nothing_and_a_refused_one_lets_go(
    serve: Serve, fake_pool: Any, catalogues: Callable[..., Catalogue]
) -> None:
    fake_pool.grow("kjv")
    catalogue = catalogues()
    async with serve(catalogue) as (worker, engine):
        with pytest.raises(InvalidArgument, match="top_p"):
            await whole(worker, choosing("kjv", top_p=2))
        assert fake_pool.opened == []
        engine.close_door()
        with pytest.raises(Unavailable, match="stopping"):
            await whole(worker, choosing("kjv"))
    assert [memory.requests for memory in catalogue.memories()] == [0]


async def test_metrics_count_openings_and_open_memories_without_naming_any(
    fake_pool: Any, catalogues: Callable[..., Catalogue], take: Callable[..., Any], registry: CollectorRegistry
) -> None:
    metrics = WorkerMetrics(registry)
    fake_pool.grow("kjv")
    fake_pool.grow("broken", seed=1)
    fake_pool.failures["broken"] = DataLoss("torn")
    catalogue = catalogues(observer=metrics)
    metrics.watch_memories(catalogue)
    take(catalogue, "kjv")
    with pytest.raises(DataLoss):
        take(catalogue, "broken")
    opens = [registry.get_sample_value("treadle_worker_engram_opens_total", {"outcome": each}) for each in ("ok", "failed")]
    assert opens == [1, 1]
    assert registry.get_sample_value("treadle_worker_engram_open_seconds_count") == 2
    with pytest.raises(NotFound):
        take(catalogue, "bible")
    assert registry.get_sample_value("treadle_worker_engram_choices_refused_total", {"reason": "unknown"}) == 1
    assert registry.get_sample_value("treadle_worker_engram_memories_open") == 1
    assert registry.get_sample_value("treadle_worker_engram_pool_answers") == 1
    assert not any("kjv" in sample.labels.values() for family in registry.collect() for sample in family.samples)


def test_log_probabilities_of_a_long_prompt_are_cut_into_messages_below_a_mebibyte() -> None:
    top = tuple(TokenLogprob(token, b"x" * 20, -1.0) for token in range(20))
    prompt = [TokenLogprob(token, b"y" * 20, -1.0, top) for token in range(5000)]
    answer = [TokenLogprob(token, b"z", -1.0, top) for token in range(300)]
    messages = list(write_piece(Piece(list(range(300)), "text", answer, prompt)))
    assert len(messages) > 2
    assert all(message.ByteSize() < 1 << 20 for message in messages)
    assert [entry.token_id for message in messages for entry in message.prompt_logprobs] == list(range(5000))
    assert all(list(message.token_ids) == [entry.token_id for entry in message.logprobs] for message in messages)
    assert sum(len(message.token_ids) for message in messages) == 300


async def test_vectors_come_over_the_wire_in_their_order(serve: Serve, tiny: CausalLM) -> None:
    async with serve() as (worker, _):
        status = await worker.status()
        one = pb.EmbedInput(token_ids=[5, 6, 7])
        answer = await worker.embed(pb.EmbedRequest(inputs=[one, pb.EmbedInput(token_ids=[9]), one]), 30.0)
        with pytest.raises(InvalidArgument, match=r"inputs\[0\]"):
            await worker.embed(pb.EmbedRequest(inputs=[pb.EmbedInput()]), 30.0)
    vectors = [np.frombuffer(each.values, dtype="<f4") for each in answer.embeddings]
    assert {len(vector) for vector in vectors} == {status.embedding_dim} == {tiny.config.hidden}
    assert vectors[0].tolist() == vectors[2].tolist() != vectors[1].tolist()


async def test_bias_and_penalties_reach_the_choice_of_tokens(serve: Serve) -> None:
    async with serve() as (worker, _):
        forced = await whole(worker, request(4, max_tokens=3, logit_bias={65: 100.0}))
        varied = await whole(worker, request(4, max_tokens=3, logit_bias={65: 9.0, 66: 8.9}, presence_penalty=2.0))
        with pytest.raises(InvalidArgument, match="logit_bias"):
            await whole(worker, request(4, logit_bias={100000: 1.0}))
    assert [token for each in forced for token in each.token_ids] == [65, 65, 65]
    assert len({token for each in varied for token in each.token_ids}) > 1


class Blocks:
    """What a watcher of a worker's blocks knows, by name."""

    def __init__(self, worker: AsyncWorker) -> None:
        self._stream = worker.watch_blocks(60)
        self.there: dict[bytes, pb.CachedBlock] = {}
        self.complete = False

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not holds():
                change = await anext(self._stream)
                if change.cleared:
                    self.there.clear()
                for name in change.removed:
                    del self.there[name]
                for block in change.stored:
                    assert not block.parent or block.parent in self.there
                    self.there[block.name] = block
                self.complete = self.complete or change.snapshot_complete

    def tokens(self, block: pb.CachedBlock) -> list[int]:
        """All tokens up to the block's end."""
        before = self.tokens(self.there[block.parent]) if block.parent else []
        return [*before, *block.token_ids]


async def test_blocks_of_the_prefix_cache_are_told_with_what_they_depend_on(
    serve: Serve, shadowed: Callable[[float], Catalogue]
) -> None:
    async with serve(shadowed(0.0)) as (worker, engine):
        status = await worker.status()
        assert status.block_tokens == 32
        asked = request(100)
        asked.cache_salt = "tenant"
        responses = await whole(worker, asked)
        (report,) = responses[-1].memory
        blocks = Blocks(worker)  # it finds what was there before it came
        await blocks.until(lambda: blocks.complete)
        assert sorted(len(blocks.tokens(block)) for block in blocks.there.values()) == [32, 64, 96]
        assert {(block.cache_salt, block.memory) for block in blocks.there.values()} == {("tenant", f"tiny@{report.version}")}
        longest = max(blocks.there.values(), key=lambda block: len(blocks.tokens(block)))
        assert blocks.tokens(longest) == list(range(1, 97))
        asked.engram.CopyFrom(pb.EngramChoice(model=""))
        again = await whole(worker, asked)
        assert again[-1].usage.cached_tokens == 0
        await blocks.until(lambda: len(blocks.there) == 6)
        assert [block.memory for block in blocks.there.values()].count("") == 3
        assert (await whole(worker, asked))[-1].usage.cached_tokens == 96
        engine.close_door()
        with pytest.raises(Unavailable):
            await blocks.until(lambda: False)


async def test_blocks_that_made_room_are_told(serve: Serve) -> None:
    async with serve(prefix_cache_bytes_max=600_000) as (worker, engine):
        blocks = Blocks(worker)
        for first in range(0, 150, 10):
            asked = request(100)
            asked.prompt_token_ids[:] = range(first, first + 100)
            await whole(worker, asked)
        await blocks.until(lambda: set(blocks.there) == set(engine.block_log.names))
        assert 0 < len(blocks.there) < 45
        assert engine.load.prefix_cache_bytes <= 600_000


async def test_blocks_of_a_degraded_answer_are_not_told(serve: Serve, shadowed: Callable[[float], Catalogue]) -> None:
    async with serve(shadowed(5.0)) as (worker, engine):
        masked = request(100)
        masked.memory_policy.CopyFrom(pb.MemoryPolicy(wait_seconds_max=0.001, late=pb.LATE_POLICY_MASK))
        assert (await whole(worker, masked))[-1].degraded
        assert len(engine.block_log) == 0


async def test_a_worker_without_a_prefix_cache_tells_of_none(serve: Serve) -> None:
    async with serve(prefix_cache_bytes_max=0) as (worker, _):
        assert (await worker.status()).block_tokens == 0

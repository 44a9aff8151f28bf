"""WorkerService: messages in, engine calls, messages out, and the error table."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from inference_worker.domain.cached_blocks import BlockChanges
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine_port import RunningEngine
from inference_worker.domain.errors import MemoryMissing, NoVectors, StepFailed
from inference_worker.domain.memory_status import MemoryStatus, NoCatalogue
from inference_worker.domain.ports import LayerFigures
from inference_worker.domain.prefix_catalogue import NoPrefixes, PrefixCatalogue, PrefixStatus
from inference_worker.domain.request import Finish, FinishReason, Piece, Request, Sampling, TokenLogprob
from inference_worker.domain.request_leases import LeaseDesk
from inference_worker.domain.resident_versions import Choice
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.chassis.tracing import Attribute, annotate
from treadle.contract import PROTO_VERSION
from treadle.contract.deadline import Deadline
from treadle.contract.errors import DeadlineExceeded, InvalidArgument
from treadle.contract.policy import Late, WaitPolicy
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc

STATUS: dict[type[Exception], grpc.StatusCode] = CONTRACT_STATUS | {
    MemoryMissing: grpc.StatusCode.UNAVAILABLE,  # the caller's policy: rather no answer than a degraded one
    NoVectors: grpc.StatusCode.FAILED_PRECONDITION,  # another engine could
    StepFailed: grpc.StatusCode.INTERNAL,  # our bug, logged with its traceback where it happened
}
MESSAGE_BYTES = 768 << 10  # of log-probabilities in one message: with tokens and text it stays below 1 MiB
OPEN_SECONDS_MAX = 60.0  # a request waits so long for a memory that is being opened, unless the settings say otherwise
ITEM_BYTES = 8  # a token id, or the framing of a log-probability
_FINISH = {FinishReason.STOP: pb.FINISH_REASON_STOP, FinishReason.LENGTH: pb.FINISH_REASON_LENGTH}
_LATE = {pb.LATE_POLICY_MASK: Late.MASK, pb.LATE_POLICY_FAIL: Late.FAIL}
Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What this worker says of its model."""

    name: str
    folder: Path
    tokenizer_digest: str
    build_version: str


class WorkerServer(pb_grpc.WorkerServiceServicer):
    """Serves one engine, whichever it is.

    policy:           what requests that say nothing want done about late memory
    memories:         what requests may choose
    open_seconds_max: longest wait of a request for its memory to be opened; its own deadline may be sooner
    prefixes:         the long prefixes that they may choose
    """

    def __init__(
        self, engine: RunningEngine, card: ModelCard, policy: WaitPolicy, memories: Catalogue | NoCatalogue | None = None, *,
        open_seconds_max: float = OPEN_SECONDS_MAX, prefixes: PrefixCatalogue | NoPrefixes | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._card, self._policy = engine, card, policy
        self._memories, self._prefixes = memories or NoCatalogue(), prefixes or NoPrefixes()
        self._desk = LeaseDesk(self._memories, self._prefixes, open_seconds_max)
        self._leaving = False

    def leave(self) -> None:
        """Say from now on that it drains; what comes is served until the engine's door closes."""
        self._leaving = True

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """See the proto."""
        asked = read_request(request, self._policy, context.time_remaining())
        self._engine.check(asked)
        asked, leases = await self._desk.take(asked, read_choice(request), read_prefix(request))
        try:
            generation = self._engine.begin(asked, leases)
        except BaseException:
            leases.release()
            raise
        # Whatever ends the call ends the generation: an answer that nobody reads costs steps.
        context.add_done_callback(lambda _: generation.cancel())
        async for piece in generation.pieces():
            if piece.finish is not None:
                annotate(_span_attributes(asked, piece.finish, piece.degraded, self._card.name))
            for message in write_piece(piece):
                yield message

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802
        """See the proto."""
        if not self._engine.facts.embedding_dim:
            raise NoVectors(f"the engine {self._engine.facts.engine!r} makes no vectors of texts")
        vectors = await self._engine.embed([tuple(each.token_ids) for each in request.inputs])
        return pb.EmbedResponse(embeddings=[pb.Embedding(values=vector.astype("<f4").tobytes()) for vector in vectors])

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        """See the proto."""
        engine, facts, card = self._engine, self._engine.facts, self._card
        load, totals, memory = engine.load, engine.totals, self._memories.default_memory
        status = pb.StatusResponse(
            build_version=card.build_version, proto_version=PROTO_VERSION, pid=os.getpid(), model=card.name, model_dir=str(card.folder),
            tokenizer_digest=card.tokenizer_digest, context_tokens_max=facts.context_tokens_max, eos_token_ids=sorted(facts.eos_token_ids),
            requests_running=load.requests_running, requests_waiting=load.requests_waiting,
            requests_waiting_max=facts.requests_waiting_max, requests_running_max=facts.requests_running_max,
            wait_seconds_predicted=engine.wait_seconds_predicted, engine=facts.engine,
            engine_version=facts.version or card.build_version, dtype=facts.dtype, steps=totals.steps, step_seconds=totals.step_seconds,
            prompt_tokens=totals.prompt_tokens, completion_tokens=totals.completion_tokens, cached_tokens=totals.cached_tokens,
            draining=engine.draining or self._leaving, block_tokens=facts.block_tokens, embedding_dim=facts.embedding_dim,
        )  # fmt: skip
        if memory is not None:
            status.engram_model, status.engram_version = memory.model.name, memory.version
            status.engram_transport, status.engram_fused = memory.transport, memory.fused
        status.engram_layers.extend(_write_figures(layer, of_layer) for layer, of_layer in engine.layer_figures().items())
        status.engram_models.extend(_write_memory(each) for each in self._memories.memories())
        status.prefixes.extend(_write_prefix(each) for each in self._prefixes.prefixes())
        return status

    async def WatchBlocks(self, request: pb.WatchBlocksRequest, context: Context) -> AsyncIterator[pb.WatchBlocksResponse]:  # noqa: N802
        """See the proto."""
        async with aclosing(self._engine.watch_blocks()) as changes:
            async for change in changes:
                yield write_changes(change)


def _span_attributes(asked: Request, finish: Finish, degraded: bool, model: str) -> dict[str, Attribute]:
    """What a span says of a generation: names and counts."""
    told: dict[str, Attribute] = {
        "gen_ai.request.model": model, "treadle.request_id": asked.request_id, "treadle.degraded": degraded,
        "gen_ai.usage.input_tokens": finish.usage.prompt_tokens, "gen_ai.usage.output_tokens": finish.usage.completion_tokens,
        "gen_ai.response.finish_reasons": (finish.reason.value,), "treadle.cached_tokens": finish.usage.cached_tokens,
    }  # fmt: skip
    for memory in finish.memory:
        if memory.kind == "prefix":
            told |= {"treadle.prefix": f"{memory.name}@{memory.version[:12]}", "treadle.lookups": memory.lookups}
            told |= {"treadle.lookups_outside": memory.lookups_outside, "treadle.fell_back": memory.fell_back}
            continue
        told |= {"treadle.memory": f"{memory.name}@{memory.version[:12]}", "treadle.tickets": memory.tickets}
        told |= {"treadle.tickets_in_time": memory.tickets_in_time, "treadle.rows_missing": memory.rows_missing}
    return told


def read_request(message: pb.GenerateRequest, default: WaitPolicy, seconds_left: float | None) -> Request:
    """A request from its message. Raises InvalidArgument naming the field, DeadlineExceeded if no time is left."""
    wanted, memory = message.sampling, message.memory_policy
    if seconds_left is not None and seconds_left <= 0:
        raise DeadlineExceeded("the call's deadline had passed before it began")
    bounded = seconds_left is not None and math.isfinite(seconds_left) and seconds_left < 1e9
    return Request(
        prompt=tuple(message.prompt_token_ids), request_id=message.request_id, cache_salt=message.cache_salt,
        priority=message.priority,
        sampling=Sampling(
            max_tokens=wanted.max_tokens, temperature=wanted.temperature, top_p=wanted.top_p or 1.0,
            seed=wanted.seed if wanted.HasField("seed") else None, stop=tuple(wanted.stop), stop_token_ids=frozenset(wanted.stop_token_ids),
            ignore_eos=wanted.ignore_eos, top_logprobs=wanted.top_logprobs if wanted.HasField("top_logprobs") else None,
            prompt_logprobs=wanted.prompt_logprobs, logit_bias=dict(wanted.logit_bias), presence_penalty=wanted.presence_penalty,
            frequency_penalty=wanted.frequency_penalty, repetition_penalty=wanted.repetition_penalty or 1.0, top_k=wanted.top_k,
            min_p=wanted.min_p,
        ),
        policy=WaitPolicy(memory.wait_seconds_max or default.wait_seconds_max, _LATE.get(memory.late, default.late)),
        deadline=Deadline.after(seconds_left) if bounded and seconds_left is not None else None,
    )  # fmt: skip


def read_choice(message: pb.GenerateRequest) -> Choice | None:
    """The memory that a request chooses; None: the default."""
    return Choice(message.engram.model, message.engram.version.lower()) if message.HasField("engram") else None


def read_prefix(message: pb.GenerateRequest) -> Choice | None:
    """The long prefix that a request chooses; None: none. Raises InvalidArgument for one without a name."""
    if not message.HasField("prefix"):
        return None
    if not message.prefix.name:
        raise InvalidArgument("prefix.name: a name expected; leave `prefix` out for none")
    return Choice(message.prefix.name, message.prefix.version.lower())


def write_piece(piece: Piece) -> Iterator[pb.GenerateResponse]:
    """A piece as messages below 1 MiB: one, but for log-probabilities of very long prompts, which come in several first ones."""
    message, size = pb.GenerateResponse(), 0
    # Each log-probability travels with its token, so that a reader may look at one message at a time.
    answer: list[TokenLogprob | None] = [*piece.logprobs] or [None] * len(piece.token_ids)
    for token, logprob in (*((None, each) for each in piece.prompt_logprobs), *zip(piece.token_ids, answer, strict=True)):
        written = None if logprob is None else _write_logprob(logprob)
        size += ITEM_BYTES + (written.ByteSize() if written is not None else 0)
        if size > MESSAGE_BYTES:
            yield message
            message, size = pb.GenerateResponse(), 0
        if token is not None:
            message.token_ids.append(token)
        if written is not None:
            (message.prompt_logprobs if token is None else message.logprobs).append(written)
    message.text_delta, message.degraded = piece.text, piece.degraded
    if piece.finish is not None:
        _write_finish(message, piece.finish)
    yield message


def _write_finish(message: pb.GenerateResponse, finish: Finish) -> None:
    message.finish_reason = _FINISH[finish.reason]
    usage = finish.usage
    message.usage.CopyFrom(
        pb.Usage(prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, completion_tokens=usage.completion_tokens)
    )
    for memory in finish.memory:
        message.memory.add(
            kind=memory.kind, name=memory.name, version=memory.version, transport=memory.transport, tickets=memory.tickets,
            tickets_in_time=memory.tickets_in_time, rows_missing=memory.rows_missing, shadowed=memory.shadowed,
            missing_because=memory.missing_because, lookups=memory.lookups, lookups_outside=memory.lookups_outside,
            fell_back=memory.fell_back, prefix_tokens=memory.prefix_tokens,
        )  # fmt: skip


def _write_logprob(logprob: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=logprob.token_id, text=logprob.text, logprob=logprob.logprob, top=[_write_logprob(top) for top in logprob.top]
    )


def _write_memory(memory: MemoryStatus) -> pb.EngramModelStatus:
    return pb.EngramModelStatus(
        model=memory.model, version=memory.version, default=memory.default, open=memory.open, requests=memory.requests,
        tokens=memory.tokens, transport=memory.transport, fused=memory.fused, refusal=memory.refusal,
    )  # fmt: skip


def _write_prefix(prefix: PrefixStatus) -> pb.PrefixStatus:
    return pb.PrefixStatus(
        name=prefix.name, version=prefix.version, prefix_tokens=prefix.tokens, open=prefix.open, requests=prefix.requests,
        mapped_bytes=prefix.mapped_bytes, refusal=prefix.refusal, fallbacks=prefix.fallbacks,
    )  # fmt: skip


def write_changes(changes: BlockChanges) -> pb.WatchBlocksResponse:
    """A message below 1 MiB: changes come in small portions."""
    stored = [
        pb.CachedBlock(
            name=block.name, parent=block.parent, token_ids=block.token_ids, cache_salt=block.cache_salt, memory=block.memory
        )
        for block in changes.stored
    ]  # fmt: skip
    return pb.WatchBlocksResponse(
        stored=stored, removed=changes.removed, cleared=changes.cleared, snapshot_complete=changes.snapshot_complete
    )


def _write_figures(layer: int, figures: LayerFigures) -> pb.EngramLayerStatus:
    return pb.EngramLayerStatus(
        layer=layer, tickets=figures.tickets, tickets_in_time=figures.tickets_in_time, gather_seconds_p50=figures.gather_seconds_p50,
        gather_seconds_p99=figures.gather_seconds_p99, slack_seconds_p50=figures.slack_seconds_p50,
        slack_seconds_p01=figures.slack_seconds_p01, stall_seconds=figures.stall_seconds, row_bytes=figures.row_bytes,
        rows_missing=figures.rows_missing,
    )  # fmt: skip

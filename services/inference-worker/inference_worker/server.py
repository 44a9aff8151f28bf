"""WorkerService: messages in, engine calls, messages out, and the error table."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine_thread import EngineThread
from inference_worker.domain.errors import MemoryMissing, StepFailed
from inference_worker.domain.lease import Lease
from inference_worker.domain.memory_status import MemoryStatus, NoCatalogue
from inference_worker.domain.ports import LayerFigures
from inference_worker.domain.request import Finish, FinishReason, Piece, Request, Sampling, TokenLogprob
from inference_worker.domain.resident_versions import Choice
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.contract import PROTO_VERSION
from treadle.contract.deadline import Deadline
from treadle.contract.errors import DeadlineExceeded
from treadle.contract.policy import Late, WaitPolicy
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc

STATUS: dict[type[Exception], grpc.StatusCode] = CONTRACT_STATUS | {
    MemoryMissing: grpc.StatusCode.UNAVAILABLE,  # the caller's policy: rather no answer than a degraded one
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
    """Serves one engine.

    policy:           what requests that say nothing want done about late memory
    memories:         what requests may choose
    open_seconds_max: longest wait of a request for its memory to be opened; its own deadline may be sooner
    """

    def __init__(
        self, thread: EngineThread, card: ModelCard, policy: WaitPolicy, memories: Catalogue | NoCatalogue | None = None, *,
        open_seconds_max: float = OPEN_SECONDS_MAX,
    ) -> None:  # fmt: skip
        self._thread, self._card, self._policy = thread, card, policy
        self._memories, self._open_seconds_max = memories or NoCatalogue(), open_seconds_max

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """See the proto."""
        asked = read_request(request, self._policy, context.time_remaining())
        lease = await self._leased(asked, read_choice(request))
        try:
            stream, sequence = self._thread.submit(asked, lease)
        except BaseException:
            lease.release()
            raise
        # Whatever ends the call ends the generation: an answer that nobody reads costs steps.
        context.add_done_callback(lambda _: self._thread.engine.cancel(sequence))
        async for piece in stream.pieces():
            for message in write_piece(piece):
                yield message

    async def _leased(self, asked: Request, choice: Choice | None) -> Lease:
        """The memory that a request uses, its version fixed now; waits for its opening within the request's own time."""
        self._thread.engine.check(asked)
        taken = self._memories.take(choice)
        left = asked.deadline.remaining_seconds() if asked.deadline is not None else self._open_seconds_max
        try:
            return await asyncio.wait_for(asyncio.wrap_future(taken), min(left, self._open_seconds_max))
        except BaseException as error:
            taken.add_done_callback(_give_back)  # it may have come just now: nobody would ever release it
            if not isinstance(error, TimeoutError):
                raise
            name = choice.model if choice is not None else ""
            raise DeadlineExceeded(f"engram memory {name!r} is still being opened; try again soon") from error

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        """See the proto."""
        engine, card = self._thread.engine, self._card
        load, totals, memory = engine.load, engine.totals, self._memories.default_memory
        status = pb.StatusResponse(
            build_version=card.build_version, proto_version=PROTO_VERSION, pid=os.getpid(), model=card.name, model_dir=str(card.folder),
            tokenizer_digest=card.tokenizer_digest, context_tokens_max=engine.context_tokens_max, eos_token_ids=sorted(engine.eos_token_ids),
            requests_running=load.requests_running, requests_waiting=load.requests_waiting,
            requests_waiting_max=engine.limits.requests_waiting_max, steps=totals.steps, step_seconds=totals.step_seconds,
            prompt_tokens=totals.prompt_tokens, completion_tokens=totals.completion_tokens, cached_tokens=totals.cached_tokens,
            draining=engine.draining,
        )  # fmt: skip
        if memory is not None:
            status.engram_model, status.engram_version = memory.model.name, memory.version
            status.engram_transport, status.engram_fused = memory.transport, memory.fused
        figures = engine.prefetcher.layer_figures() if engine.prefetcher is not None else {}
        status.engram_layers.extend(_write_figures(layer, of_layer) for layer, of_layer in figures.items())
        status.engram_models.extend(_write_memory(each) for each in self._memories.memories())
        return status


def read_request(message: pb.GenerateRequest, default: WaitPolicy, seconds_left: float | None) -> Request:
    """A request from its message. Raises InvalidArgument naming the field, DeadlineExceeded if no time is left."""
    wanted, memory = message.sampling, message.memory_policy
    if seconds_left is not None and seconds_left <= 0:
        raise DeadlineExceeded("the call's deadline had passed before it began")
    bounded = seconds_left is not None and math.isfinite(seconds_left) and seconds_left < 1e9
    return Request(
        prompt=tuple(message.prompt_token_ids), request_id=message.request_id, cache_salt=message.cache_salt,
        sampling=Sampling(
            max_tokens=wanted.max_tokens, temperature=wanted.temperature, top_p=wanted.top_p or 1.0,
            seed=wanted.seed if wanted.HasField("seed") else None, stop=tuple(wanted.stop), stop_token_ids=frozenset(wanted.stop_token_ids),
            ignore_eos=wanted.ignore_eos, top_logprobs=wanted.top_logprobs if wanted.HasField("top_logprobs") else None,
            prompt_logprobs=wanted.prompt_logprobs,
        ),
        policy=WaitPolicy(memory.wait_seconds_max or default.wait_seconds_max, _LATE.get(memory.late, default.late)),
        deadline=Deadline.after(seconds_left) if bounded and seconds_left is not None else None,
    )  # fmt: skip


def read_choice(message: pb.GenerateRequest) -> Choice | None:
    """The memory that a request chooses; None: the default."""
    return Choice(message.engram.model, message.engram.version.lower()) if message.HasField("engram") else None


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


def _give_back(taken: Future[Lease]) -> None:
    if not taken.cancelled() and taken.exception() is None:
        taken.result().release()


def _write_figures(layer: int, figures: LayerFigures) -> pb.EngramLayerStatus:
    return pb.EngramLayerStatus(
        layer=layer, tickets=figures.tickets, tickets_in_time=figures.tickets_in_time, gather_seconds_p50=figures.gather_seconds_p50,
        gather_seconds_p99=figures.gather_seconds_p99, slack_seconds_p50=figures.slack_seconds_p50,
        slack_seconds_p01=figures.slack_seconds_p01, stall_seconds=figures.stall_seconds, row_bytes=figures.row_bytes,
        rows_missing=figures.rows_missing,
    )  # fmt: skip

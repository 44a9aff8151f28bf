"""An inference worker behind gRPC as the port that the domain asks for: what streams by calls of our own, the rest by the SDK's.

Owns the two conversions: generation to request, response to piece. Retries nothing: whom to ask again is dispatch's.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import cast

import grpc.aio
from google.protobuf.message import DecodeError

from inference_gateway.adapters.grpc_calls import StreamingCalls
from inference_gateway.adapters.grpc_stream import StreamedCall
from inference_gateway.adapters.prefixes import prefix_error, prefix_message, prefixes_of
from inference_gateway.adapters.worker_figures import figures_of
from inference_gateway.domain.block_index import BlockChanges, CachedBlock
from inference_gateway.domain.errors import CallNotBegun, MemoryDamaged, MemoryRefused, RequestRefused, WorkerLost
from inference_gateway.domain.generation import (
    FinishReason,
    Generation,
    MemoryReport,
    MemoryWish,
    Piece,
    Priority,
    Sampling,
    TokenLogprob,
    Usage,
    WorkerStatus,
)
from inference_gateway.domain.memories import Memory, MemoryChoice
from treadle.client import Endpoint
from treadle.client.errors import from_rpc
from treadle.client.worker import AsyncWorker
from treadle.contract import Late
from treadle.contract.errors import (
    AccessDenied,
    DataLoss,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ProtocolMismatch,
    TreadleError,
)
from treadle.inference.v1 import worker_pb2

_GENERATE = f"/{worker_pb2.DESCRIPTOR.services_by_name['WorkerService'].full_name}/Generate"
_FINISH = {worker_pb2.FINISH_REASON_STOP: FinishReason.STOP, worker_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
_LATE = {Late.MASK: worker_pb2.LATE_POLICY_MASK, Late.FAIL: worker_pb2.LATE_POLICY_FAIL, None: worker_pb2.LATE_POLICY_UNSPECIFIED}
_NO_WAIT_SECONDS = 1e-6  # on the wire 0 leaves the wait to the worker, so "no wait" is the shortest one
_DRAINING = "Draining"  # the worker's name for its stop; its other refusals are about one request
_PROMPT = "prompt_token_ids: "  # how the worker begins what it says of a prompt
_PRIORITIES = {Priority.HIGH: 50, Priority.NORMAL: 0, Priority.LOW: -50}  # of -100 to 100: others may stand between
_SEED_MASK = (1 << 64) - 1  # OpenAI's seeds may be negative, the worker's are 64 bits without sign


class RpcWorker:
    """Fits domain.ports.Worker. Make it inside the loop that uses it; `await close()`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.address
        self._calls, self._worker = StreamingCalls(endpoint), AsyncWorker(endpoint)
        self._closed = False

    async def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; closing the generator cancels the call."""
        if self._closed:  # it left between the choice and the call
            raise WorkerLost("the worker has left")
        call: StreamedCall | None = None
        try:
            call = await self._calls.begin(_GENERATE, request_of(generation).SerializeToString(), timeout_seconds)
            while (message := await call.read()) is not None:
                yield piece_of(worker_pb2.GenerateResponse.FromString(message))
        except DecodeError as decode_error:
            raise TreadleError("the worker sent what is no GenerateResponse") from decode_error
        except grpc.aio.AioRpcError as rpc_error:
            if call is not None and call.not_begun:
                raise CallNotBegun("the worker did not take the call") from rpc_error
            error = from_rpc(rpc_error, self._address)
            if (refused := prefix_error(generation.memory.prefix, error)) is not None:
                raise refused from rpc_error
            if generation.engram.name and isinstance(error, DataLoss):
                raise MemoryDamaged(str(error)) from rpc_error
            if generation.engram.name and _is_about_memory(error):
                raise MemoryRefused(str(error)) from rpc_error
            raise self._for_strangers(error) from rpc_error
        finally:
            if call is not None:
                call.close()

    async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
        """Vectors of texts, float32 little-endian, in their order."""
        request = worker_pb2.EmbedRequest(request_id=request_id, inputs=[worker_pb2.EmbedInput(token_ids=text) for text in texts])
        try:
            answer = await self._worker.embed(request, timeout_seconds)
        except TreadleError as error:
            raise self._for_strangers(error) from error
        return [each.values for each in answer.embeddings]

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        """What it runs now."""
        try:
            return status_of(await self._worker.status(timeout_seconds))
        except TreadleError as error:
            raise self._for_strangers(error) from error

    async def watch_blocks(self, timeout_seconds: float) -> AsyncGenerator[BlockChanges, None]:
        """What lies in its prefix cache: first everything, then what changes."""
        stream = cast("AsyncGenerator[worker_pb2.WatchBlocksResponse, None]", self._worker.watch_blocks(timeout_seconds))
        async with aclosing(stream):
            async for response in stream:
                yield changes_of(response)

    async def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
        self._closed = True
        self._calls.close()
        await self._worker.close()

    def _for_strangers(self, error: TreadleError) -> TreadleError:
        """The error in words that mean something to whoever calls the gateway; the cause keeps the worker's address."""
        if isinstance(error, AccessDenied):
            return WorkerLost("the worker refuses the gateway's key, see worker_key_file")
        if isinstance(error, InvalidArgument) and str(error).startswith(_PROMPT):
            return RequestRefused(f"'prompt': {str(error).removeprefix(_PROMPT)}", param="prompt", code="invalid_value")
        if error.origin == _DRAINING:
            return WorkerLost(str(error))
        if not str(error).startswith(self._address):
            return error
        if isinstance(error, DeadlineExceeded):
            text = str(error).removeprefix(f"{self._address}: ")
            return DeadlineExceeded(f"the worker did not finish in time: {text}", error.predicted_finish_seconds)
        return WorkerLost("the worker does not answer")


def _is_about_memory(error: TreadleError) -> bool:
    """Whether the worker says NOT_FOUND or FAILED_PRECONDITION, which it does of the memory alone."""
    # Another class than its own name: a FAILED_PRECONDITION without a field, which the SDK has no better word for.
    told = isinstance(error, ProtocolMismatch) and error.origin not in (None, ProtocolMismatch.__name__)
    return told or isinstance(error, NotFound | FingerprintMismatch)


def request_of(generation: Generation) -> worker_pb2.GenerateRequest:
    """The request that stands for a generation."""
    return worker_pb2.GenerateRequest(
        request_id=generation.request_id,
        prompt_token_ids=generation.prompt_token_ids,
        sampling=_sampling_of(generation.sampling),
        cache_salt=generation.cache_salt,
        memory_policy=_policy_of(generation.memory),
        engram=_engram_of(generation.engram),
        prefix=prefix_message(generation.memory.prefix),
        priority=_PRIORITIES[generation.priority],
    )


def _engram_of(choice: MemoryChoice) -> worker_pb2.EngramChoice | None:
    """None, an absent field, leaves it to the worker."""
    return None if choice.name is None else worker_pb2.EngramChoice(model=choice.name, version=choice.version)


def _sampling_of(sampling: Sampling) -> worker_pb2.Sampling:
    return worker_pb2.Sampling(
        max_tokens=sampling.tokens_max or 0,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=None if sampling.seed is None else sampling.seed & _SEED_MASK,
        stop=sampling.stop,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        top_logprobs=sampling.top_logprobs,
        logit_bias=dict(sampling.logit_bias),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def _policy_of(memory: MemoryWish) -> worker_pb2.MemoryPolicy:
    wait_seconds = 0.0 if memory.wait_seconds_max is None else max(memory.wait_seconds_max, _NO_WAIT_SECONDS)
    return worker_pb2.MemoryPolicy(wait_seconds_max=wait_seconds, late=_LATE[memory.late])


def piece_of(response: worker_pb2.GenerateResponse) -> Piece:
    """The piece that a response carries."""
    if not (response.finish_reason or response.degraded or response.logprobs or response.HasField("usage")):
        return Piece(tuple(response.token_ids), response.text_delta)  # all but the last, mostly: worth being short
    return Piece(
        token_ids=tuple(response.token_ids),
        text=response.text_delta,
        logprobs=_logprobs_of(response.logprobs),
        finish_reason=_FINISH.get(response.finish_reason),
        usage=_usage_of(response.usage) if response.HasField("usage") else None,
        degraded=response.degraded,
        memory=tuple(_report_of(report) for report in response.memory),
    )


def _logprobs_of(logprobs: Sequence[worker_pb2.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(item.token_id, item.text, item.logprob, _logprobs_of(item.top)) for item in logprobs)


def _usage_of(usage: worker_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def _report_of(report: worker_pb2.MemoryReport) -> MemoryReport:
    return MemoryReport(
        kind=report.kind,
        name=report.name,
        version=report.version,
        transport=report.transport,
        tickets=report.tickets,
        tickets_in_time=report.tickets_in_time,
        rows_missing=report.rows_missing,
        shadowed=report.shadowed,
        missing_because=report.missing_because,
        lookups=report.lookups,
        lookups_outside=report.lookups_outside,
        fell_back=report.fell_back,
        prefix_tokens=report.prefix_tokens,
    )


def status_of(response: worker_pb2.StatusResponse) -> WorkerStatus:
    """The status that a response carries."""
    return WorkerStatus(
        model=response.model,
        model_dir=Path(response.model_dir),
        tokenizer_digest=response.tokenizer_digest,
        context_tokens_max=response.context_tokens_max,
        draining=response.draining,
        build_version=response.build_version,
        pid=response.pid,
        memories=_memories_of(response),
        requests_running=response.requests_running,
        requests_running_max=response.requests_running_max,
        requests_waiting=response.requests_waiting,
        requests_waiting_max=response.requests_waiting_max,
        wait_seconds_predicted=response.wait_seconds_predicted,
        block_tokens=response.block_tokens,
        embedding_dim=response.embedding_dim,
        engine=response.engine,
        figures=figures_of(response),
        prefixes=prefixes_of(response),
    )


def changes_of(response: worker_pb2.WatchBlocksResponse) -> BlockChanges:
    """The changes that a response carries."""
    stored = [CachedBlock(item.name, item.parent, item.token_ids, item.cache_salt, item.memory) for item in response.stored]
    return BlockChanges(stored, response.removed, response.cleared, response.snapshot_complete)


def _memories_of(response: worker_pb2.StatusResponse) -> tuple[Memory, ...]:
    """What there is to choose; a worker that lists nothing may still have one memory for all requests."""
    if not response.engram_models and response.engram_model:
        return (Memory(response.engram_model, response.engram_version, default=True, open=True),)
    return tuple(Memory(item.model, item.version, item.default, item.open, item.refusal) for item in response.engram_models)

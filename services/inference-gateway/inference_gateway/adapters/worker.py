"""An inference worker behind gRPC as the port that the domain asks for.

Owns the two conversions: generation to request, response to piece. Retries nothing: a generation is not repeated behind
the caller's back.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import cast

from inference_gateway.domain.errors import MemoryDamaged, MemoryRefused, RequestRefused, WorkerLost
from inference_gateway.domain.generation import (
    FinishReason,
    Generation,
    MemoryReport,
    MemoryWish,
    Piece,
    Sampling,
    TokenLogprob,
    Usage,
    WorkerStatus,
)
from inference_gateway.domain.memories import Memory, MemoryChoice
from treadle.client import Endpoint
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

_FINISH = {worker_pb2.FINISH_REASON_STOP: FinishReason.STOP, worker_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
_LATE = {Late.MASK: worker_pb2.LATE_POLICY_MASK, Late.FAIL: worker_pb2.LATE_POLICY_FAIL, None: worker_pb2.LATE_POLICY_UNSPECIFIED}
_NO_WAIT_SECONDS = 1e-6  # on the wire 0 leaves the wait to the worker, so "no wait" is the shortest one
_DRAINING = "Draining"  # the worker's name for its stop; its other refusals are about one request
_PROMPT = "prompt_token_ids: "  # how the worker begins what it says of a prompt
_SEED_MASK = (1 << 64) - 1  # OpenAI's seeds may be negative, the worker's are 64 bits without sign


class RpcWorker:
    """Fits domain.ports.Worker. Make it inside the loop that uses it; `await close()`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._address = endpoint.address
        self._worker = AsyncWorker(endpoint)

    async def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        """Pieces as they come; closing the generator cancels the call."""
        stream = cast(
            "AsyncGenerator[worker_pb2.GenerateResponse, None]", self._worker.generate(request_of(generation), timeout_seconds)
        )
        try:
            async for response in stream:
                yield piece_of(response)
        except TreadleError as error:
            if generation.engram.name and isinstance(error, DataLoss):
                raise MemoryDamaged(str(error)) from error
            if generation.engram.name and _is_about_memory(error):
                raise MemoryRefused(str(error)) from error
            raise self._for_strangers(error) from error
        finally:
            await stream.aclose()

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        """What it runs now."""
        try:
            return status_of(await self._worker.status(timeout_seconds))
        except TreadleError as error:
            raise self._for_strangers(error) from error

    async def close(self) -> None:
        """Close the channel; calls in progress are cancelled."""
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
    )


def _policy_of(memory: MemoryWish) -> worker_pb2.MemoryPolicy:
    wait_seconds = 0.0 if memory.wait_seconds_max is None else max(memory.wait_seconds_max, _NO_WAIT_SECONDS)
    return worker_pb2.MemoryPolicy(wait_seconds_max=wait_seconds, late=_LATE[memory.late])


def piece_of(response: worker_pb2.GenerateResponse) -> Piece:
    """The piece that a response carries."""
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
    )


def _memories_of(response: worker_pb2.StatusResponse) -> tuple[Memory, ...]:
    """What there is to choose; a worker that lists nothing may still have one memory for all requests."""
    if not response.engram_models and response.engram_model:
        return (Memory(response.engram_model, response.engram_version, default=True, open=True),)
    return tuple(Memory(item.model, item.version, item.default, item.open, item.refusal) for item in response.engram_models)

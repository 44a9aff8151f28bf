"""One answer of vLLM under way: its pieces within the deadline, its end counted once, and its second beginning.

Owns a request's way through vLLM. Does not own the engine (`vllm_engine`) or what an output means (`vllm_answer`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.outputs import RequestOutput
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from inference_worker.adapters.vllm_answer import BeginsAnew
from inference_worker.adapters.vllm_sampling import sampling_params
from inference_worker.domain.errors import Draining, MemoryMissing, StepFailed
from inference_worker.domain.request import Piece, Request
from inference_worker.domain.request_leases import Leases
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, Unavailable
from treadle.vllm.salt import cache_salt

if TYPE_CHECKING:
    from inference_worker.adapters.vllm_engine import VllmEngine

log = logging.getLogger("treadle.worker")
DEAD = "the engine's process has died or stands still; the worker stops, and whoever runs it starts it again"


class VllmGeneration:
    """See Generation. It releases its lease and is counted exactly once, however it ends."""

    def __init__(self, engine: VllmEngine, name: str, request: Request, leases: Leases) -> None:
        self._engine, self._name, self._request, self._leases, self._lease = engine, name, request, leases, leases.engram
        self._answer, self._prefix = engine.answer_for(request), leases.prefix.memory
        params = self._sampling()
        self._began, self._over = time.monotonic(), False
        self._abort: asyncio.Task[None] | None = None
        self._outputs = self._asked(params)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self._began

    def cancel(self) -> None:
        """See Generation."""
        if not self._over:
            self._end("cancelled")
            self._abort = asyncio.get_running_loop().create_task(self._engine.llm.abort(self._name))

    async def pieces(self) -> AsyncIterator[Piece]:
        """See Generation."""
        outcome = "cancelled"
        try:
            async for piece in self._read():
                if piece.finish is not None:
                    self._end(piece.finish.reason.value)  # before the reader has it: who has an answer finds it counted
                yield piece
        except Exception as error:
            outcome = _outcome_of(error)
            raise _ours(error) from error
        finally:
            self._end(outcome)
            await self._outputs.aclose()  # ends it in the engine too, where it has not ended

    async def _read(self) -> AsyncIterator[Piece]:
        """Pieces from vLLM's outputs, within the request's deadline."""
        deadline = self._request.deadline
        while True:
            try:
                async with asyncio.timeout(None if deadline is None else max(deadline.remaining_seconds(), 0.0)):
                    output = await anext(self._outputs)
            except TimeoutError as error:
                raise DeadlineExceeded(f"the deadline passed after {self._answer.generated} tokens of the answer") from error
            except StopAsyncIteration as error:
                if self._over or self._engine.draining:
                    raise Draining("the worker stopped before the answer was whole") from error
                raise StepFailed("vllm ended the answer without saying so") from error
            begun = self._answer.begun
            try:
                piece = self._answer.take(output)
            except BeginsAnew:
                await self._begin_behind_exact_kv()
                continue
            if not begun:
                self._engine.first_output(self._answer.cached)
            yield piece
            if piece.finish is not None:
                return

    async def _begin_behind_exact_kv(self) -> None:
        """The request is off the task of its prefix's dictionary: asked again, under another name."""
        assert self._prefix is not None, "only a request with a prefix begins anew"
        await self._outputs.aclose()
        if self._over:
            raise Draining("the worker stopped before the answer was whole")
        self._prefix.fallbacks += 1
        self._name = f"{self._name}-exact"
        self._outputs = self._asked(self._sampling(exact=True))

    def _asked(self, params: SamplingParams) -> AsyncGenerator[RequestOutput, None]:
        request, engine = self._request, self._engine
        # The salt is wrapped, so that no caller can give one that means another's memory; the scheduler adds that of this one.
        outputs: AsyncGenerator[RequestOutput, None] = engine.llm.generate(
            tokens_input(list(request.prompt), cache_salt=cache_salt(request.cache_salt, None)),
            params, self._name, priority=round(request.turn_seconds(self._began) * 1000),  # the smallest first
        )  # fmt: skip
        return outputs

    def _sampling(self, *, exact: bool = False) -> SamplingParams:
        """Raises InvalidArgument for what the embedded engine takes and vLLM does not, as a temperature above 2."""
        request, engine = self._request, self._engine
        room = request.tokens_max(engine.own_tokens_max(self._prefix)) - len(request.prompt)
        prefix = self._prefix.ref if self._prefix is not None else ""
        try:
            return sampling_params(request, room, engine.stops_of(request), self._lease.memory, prefix, exact=exact)
        except (VLLMClientError, ValueError) as error:
            raise InvalidArgument(f"the engine vllm refuses: {error}") from error

    def _end(self, outcome: str) -> None:
        if self._over:
            return
        self._over = True
        if self._lease.memory is not None:
            self._lease.memory.tokens += self._answer.tokens_run
        self._leases.release()
        self._engine.over(self, outcome, self._answer.prefix)


def _outcome_of(error: Exception) -> str:
    """As metrics say it."""
    return "deadline" if isinstance(error, DeadlineExceeded) else "memory_missing" if isinstance(error, MemoryMissing) else "failed"


def _ours(error: Exception) -> Exception:
    """vLLM's errors as ours."""
    if isinstance(error, EngineDeadError):
        return Unavailable(DEAD)
    if isinstance(error, VLLMClientError):
        return InvalidArgument(str(error))
    if isinstance(error, EngineGenerateError):
        log.error("vllm could not answer a request", exc_info=error)
        return StepFailed("the engine failed in this request; the worker's log has the details")
    return error

"""Calls to the process that runs the model for vLLM, from threads that may wait; and its errors, which come as text.

Knows no memory (`vllm_memories`, `vllm_prefixes`).
"""

from __future__ import annotations

import asyncio
import logging

from vllm.v1.engine.async_llm import AsyncLLM

from treadle.contract import errors
from treadle.contract.errors import DeadlineExceeded, TreadleError, Unavailable

log = logging.getLogger("treadle.worker")
ANSWER_SECONDS_MAX = 10.0  # one answer: at most a step of a large batch comes first


class VllmProcess:
    """One engine's process; `loop` is vLLM's. What is asked there answers with text, and raises nothing."""

    def __init__(self, llm: AsyncLLM, loop: asyncio.AbstractEventLoop) -> None:
        self._llm, self._loop = llm, loop

    def ask(self, method: str, *args: object) -> str:
        """What its worker's `method` says. Raises DeadlineExceeded after ANSWER_SECONDS_MAX: it may do it yet, Unavailable."""
        call = self._llm.collective_rpc(method, args=args)
        try:
            (answer,) = asyncio.run_coroutine_threadsafe(call, self._loop).result(ANSWER_SECONDS_MAX)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the engine's process does not answer within {ANSWER_SECONDS_MAX:g} s") from error
        except Exception as error:
            raise Unavailable(f"the engine's process cannot do {method}: {error}") from error
        return str(answer)

    def tell(self, method: str, name: str) -> None:
        """Have its worker's `method` run, and wait for nothing."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._told(method, name), self._loop)

    async def _told(self, method: str, name: str) -> None:
        try:
            await self._llm.collective_rpc(method, args=(name,))
        except Exception as error:  # an engine that is gone has closed all; one that lives closes it for lack of places
            log.info("the engine's process was not told %s of %s: %s", method, name, error)


def error_of_answer(answer: str) -> TreadleError:
    """`Kind: message` as the error of that kind."""
    kind, _, message = answer.partition(": ")
    named = getattr(errors, kind, None)
    fits = isinstance(named, type) and issubclass(named, TreadleError) and named is not errors.FingerprintMismatch
    return named(message) if fits and named is not None else Unavailable(f"the engine's process cannot open it: {answer}")

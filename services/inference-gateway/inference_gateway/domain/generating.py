"""From a wish to pieces of an answer: checks it against the model, encodes the prompt, asks the worker.

Owns the order of these steps and the refusals between them. Does not know how wishes are written (request_parsing) or how
answers are (answers).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from inference_gateway.domain.api_keys import Caller
from inference_gateway.domain.errors import MemoryDamaged, MemoryRefused, RequestRefused, WorkerLost
from inference_gateway.domain.generation import ChatPrompt, Generation, Piece, Prompt, TextPrompt, Wish
from inference_gateway.domain.memories import Chosen, alias_choice, choose, damaged, find, refusal, uses_memory
from inference_gateway.domain.ports import InThread, Worker
from inference_gateway.domain.served_model import ServedModel, WorkerWatch
from treadle.contract import Deadline
from treadle.contract.errors import Unavailable


@dataclass(frozen=True, slots=True)
class Plan:
    """A wish that can be served: by which model, under which name, with which memory, and what its worker will be asked."""

    model: ServedModel
    asked_model: str
    chosen: Chosen
    generation: Generation

    @property
    def uses_memory(self) -> bool:
        """Whether it will be answered with a memory, as far as is known before."""
        return uses_memory(self.chosen.memory, self.model.memories)


class Generating:
    """Serves wishes with one worker."""

    def __init__(self, worker: Worker, watch: WorkerWatch, in_thread: InThread) -> None:
        self._worker, self._watch, self._in_thread = worker, watch, in_thread

    async def plan(self, wish: Wish, *, request_id: str, caller: Caller) -> Plan:
        """Check and encode a wish.

        Raises ModelNotFound, RequestRefused (naming the field) and Unavailable (no worker).
        """
        model, chosen = await self._settled(wish, caller)
        token_ids = await self._encode(model, wish.prompt)
        _check_fits(model, wish, len(token_ids))
        generation = Generation(request_id, token_ids, wish.sampling, wish.memory, caller.tenant, chosen.memory)
        return Plan(model, wish.model, chosen, generation)

    async def pieces(self, plan: Plan, deadline: Deadline) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as the worker makes them. Closing the generator stops the worker.

        Raises what the worker raises: InvalidArgument, ResourceExhausted, DeadlineExceeded, Unavailable …
        """
        deadline.check(before="the generation")
        complete = degraded = False
        try:
            async with aclosing(self._worker.generate(plan.generation, deadline.remaining_seconds())) as pieces:
                async for piece in pieces:
                    complete = complete or piece.finish_reason is not None
                    degraded = degraded or piece.degraded
                    yield replace(piece, degraded=degraded)  # once memory was missing, the answer stays degraded
        except WorkerLost:
            self._watch.lost()
            raise
        except MemoryRefused as error:
            self._watch.look_again()
            raise refusal(plan.chosen, plan.asked_model, f"the worker cannot use it: {error}") from error
        except MemoryDamaged as error:
            self._watch.look_again()
            raise damaged(plan.chosen, f"the worker cannot use it: {error}") from error
        if not complete:
            raise Unavailable("the worker ended its stream without a last message")

    async def _settled(self, wish: Wish, caller: Caller) -> tuple[ServedModel, Chosen]:
        """The model, and the memory to use with it. Whether that is there the worker decides, who hears of changes first."""
        model = await self._watch.confirmed()
        chosen = choose(wish.memory.engram, alias_choice(wish.model, model.name), caller.memory, model.memories)
        if chosen.memory.name and find(chosen.memory.name, model.memories) is None:
            self._watch.look_again()  # it may just have come, and should be listed soon
        return model, chosen

    async def _encode(self, model: ServedModel, prompt: Prompt) -> list[int]:
        if isinstance(prompt, ChatPrompt):
            return await self._in_thread(lambda: model.encoder.encode_chat(prompt.messages, model.context_tokens_max))
        if isinstance(prompt, TextPrompt):
            return await self._in_thread(lambda: model.encoder.encode_text(prompt.text, model.context_tokens_max))
        return list(prompt.token_ids)


def _check_fits(model: ServedModel, wish: Wish, prompt_tokens: int) -> None:
    """Refuse a prompt that is empty, or that leaves no room for what was asked."""
    field = "messages" if isinstance(wish.prompt, ChatPrompt) else "prompt"
    if prompt_tokens == 0:
        raise RequestRefused(f"'{field}': at least one token is needed", param=field)
    limit, wanted = model.context_tokens_max, wish.sampling.tokens_max
    if prompt_tokens + (wanted or 1) <= limit:
        return
    alone = prompt_tokens >= limit
    raise RequestRefused(
        f"this model's maximum context length is {limit} tokens; the {field} has {prompt_tokens}"
        + (f" and {wanted} were asked for" if wanted else "")
        + (f"; shorten the {field}" if alone else "; shorten it or ask for fewer"),
        param=field if alone else "max_tokens",
        code="context_length_exceeded",
    )

"""From a wish to pieces of an answer: checks it against the model, encodes the prompt, asks a worker.

Owns the order of these steps and the refusals between them. Does not know how wishes are written (request_parsing) or how
answers are (answers).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from inference_gateway.domain.api_keys import Caller, cache_salt
from inference_gateway.domain.dispatch import Dispatch
from inference_gateway.domain.errors import MemoryDamaged, MemoryRefused, RequestRefused
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import ChatPrompt, Generation, Piece, Priority, Prompt, TokenPrompt, Wish
from inference_gateway.domain.memories import Chosen, alias_choice, choose, damaged, find, looked_up, refusal, uses_memory
from inference_gateway.domain.ports import Hints, InThread, NoHints
from inference_gateway.domain.served_model import ServedModel
from treadle.contract import Deadline

# Of a prompt that is encoded on the event loop: that takes 0.2 ms, and on a busy loop a way to a thread and back takes longer.
HERE_CHARACTERS_MAX = 1000
TURN_CHARACTERS = 20  # what a turn costs beside its text


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
    """Serves wishes with the workers of a fleet."""

    def __init__(
        self, fleet: Fleet, in_thread: InThread, dispatch: Dispatch | None = None, hints: Hints | None = None
    ) -> None:  # fmt: skip
        """hints: told of every prompt whose memory is known; None: nobody is"""
        self._fleet, self._in_thread, self._dispatch = fleet, in_thread, dispatch or Dispatch(fleet)
        self._hints = hints or NoHints()

    async def plan(self, wish: Wish, *, request_id: str, caller: Caller) -> Plan:
        """Check and encode a wish.

        Raises ModelNotFound, RequestRefused (naming the field), Unavailable (no worker) and ResourceExhausted (busy ones).
        """
        priority = _priority(wish, caller)
        model, chosen = await self._settled(wish, caller)
        self._dispatch.check(model.name, priority)
        token_ids = await self._encode(model, wish.prompt)
        _check_fits(model, wish, len(token_ids))
        generation = Generation(
            request_id, token_ids, wish.sampling, wish.memory, cache_salt(caller.tenant, wish.cache_salt), chosen.memory,
            model=model.name, session=wish.session, priority=priority,
        )  # fmt: skip
        return Plan(model, wish.model, chosen, generation)

    async def pieces(
        self, plan: Plan, deadline: Deadline, let_in: Callable[[], None] | None = None, *, tells: bool = True
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as the worker makes them. Closing the generator stops the worker. let_in: see Dispatch.

        tells: False for another choice of the same prompt. Pools are told of the prompt first: only now it is certain that its key may ask, and it still may wait in line.
        Raises what the worker raises: InvalidArgument, ResourceExhausted, DeadlineExceeded, Unavailable …
        """
        if tells and (memory := looked_up(plan.chosen.memory, plan.model.memories)) is not None:
            self._hints.tell(*memory, plan.generation.prompt_token_ids)
        try:
            async with aclosing(self._dispatch.pieces(plan.generation, deadline, let_in)) as pieces:
                async for piece in pieces:
                    yield piece
        except MemoryRefused as error:
            raise refusal(plan.chosen, plan.asked_model, f"the worker cannot use it: {error}") from error
        except MemoryDamaged as error:
            raise damaged(plan.chosen, f"the worker cannot use it: {error}") from error

    async def _settled(self, wish: Wish, caller: Caller) -> tuple[ServedModel, Chosen]:
        """The model, and the memory to use with it. Whether that is there the worker decides, who hears of changes first."""
        model = await self._fleet.confirmed(wish.model)
        chosen = choose(wish.memory.engram, alias_choice(wish.model, model.name), caller.memory, model.memories)
        if chosen.memory.name and find(chosen.memory.name, model.memories) is None:
            self._fleet.look_again(model.name)  # it may just have come, and should be listed soon
        return model, chosen

    async def _encode(self, model: ServedModel, prompt: Prompt) -> list[int]:
        limit = model.context_tokens_max
        if isinstance(prompt, TokenPrompt):
            return list(prompt.token_ids)
        if isinstance(prompt, ChatPrompt):
            if _is_short(prompt):
                return model.encoder.encode_chat(prompt, limit)
            return await self._in_thread(lambda: model.encoder.encode_chat(prompt, limit))
        if len(prompt.text) <= HERE_CHARACTERS_MAX:
            return model.encoder.encode_text(prompt.text, limit)
        return await self._in_thread(lambda: model.encoder.encode_text(prompt.text, limit))


def _is_short(prompt: ChatPrompt) -> bool:
    """Whether all that a template may write of it is little. Of tools and their calls that is not known without a look at them."""
    if prompt.tools or any(message.tool_calls for message in prompt.messages):
        return False
    written = ((turn.content, turn.name or "", turn.tool_call_id or "") for turn in prompt.messages)
    return sum(TURN_CHARACTERS + sum(map(len, texts)) for texts in written) <= HERE_CHARACTERS_MAX


def _priority(wish: Wish, caller: Caller) -> Priority:
    """The class that a request asks for, else its key's. A key that has one gives no higher one."""
    own = Priority(caller.priority) if caller.priority else None
    classes = list(Priority)  # the highest first
    if wish.priority and own and classes.index(wish.priority) < classes.index(own):
        raise RequestRefused(
            f"'treadle.priority': this key's requests have the priority {own.value!r} or a lower one",
            param="treadle.priority", code="priority_not_allowed",
        )  # fmt: skip
    return wish.priority or own or Priority.NORMAL


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

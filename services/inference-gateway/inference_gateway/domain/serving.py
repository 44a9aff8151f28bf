"""One request of several prompts and choices, from its wishes to the pieces of all of them: what every door does alike.

Owns how a request becomes generations and how these are counted. Does not know how requests are written or answers read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inference_gateway.domain.api_keys import Caller
from inference_gateway.domain.generating import Generating, Plan
from inference_gateway.domain.generation import ChatPrompt, Wish
from inference_gateway.domain.lifetime import Lifetime
from inference_gateway.domain.ports import Figures
from inference_gateway.domain.several import Ends, Pieces, interleaved, once, without_prompt
from inference_gateway.domain.tally import charged, tallied


@dataclass(frozen=True, slots=True)
class Asking:
    """Who asks, and under which name. `begun_seconds`: time.monotonic() when the request came."""

    request_id: str
    caller: Caller
    begun_seconds: float


@dataclass(frozen=True, slots=True)
class Served:
    """A request that can be served. `pieces`: of all choices; whoever takes them closes them and shows each to `ends`."""

    plan: Plan
    pieces: Pieces
    ends: Ends
    reads_calls: bool


class Serving:
    """Makes generations of requests."""

    def __init__(self, generating: Generating, figures: Figures) -> None:
        self._generating, self._figures = generating, figures

    async def begin(self, wishes: Sequence[Wish], choices: int, asking: Asking, lifetime: Lifetime) -> Served:
        """Check and encode the wishes, `choices` answers to each. Nothing is asked of a worker before the first piece is.

        Raises ModelNotFound, RequestRefused (naming the field), ResourceExhausted and Unavailable (no worker).
        """
        plans = await self._plans(wishes, asking)
        self._figures.memory_chosen(plans[0].chosen.by, plans[0].uses_memory)
        let_in = [asyncio.Event() for _ in range(len(plans) * choices)]
        parts, prompt_tokens = [], []
        for place in range(len(let_in)):
            plan, counts = plans[place // choices], place % choices == 0
            prompt_tokens.append(len(plan.generation.prompt_token_ids) if counts else 0)
            choice = _choice(plan, place, choices, len(plans))
            pieces = self._generating.pieces(choice, lifetime.deadline, let_in[place].set, tells=counts)
            if place:  # one of them stands in line at a time: nobody else waits for all of them
                pieces = once(let_in[place - 1], pieces)
            part = tallied(
                pieces if counts else without_prompt(pieces),
                self._figures,
                prompt_tokens=prompt_tokens[-1],
                begun_seconds=asking.begun_seconds,
            )
            parts.append(part)
        prompt = wishes[0].prompt
        reads_calls = isinstance(prompt, ChatPrompt) and bool(prompt.tools) and plans[0].model.encoder.tool_form is not None
        together = parts[0] if len(parts) == 1 else interleaved(parts)
        pieces = charged(together, asking.caller, self._figures, prompt_tokens=sum(prompt_tokens))
        return Served(plans[0], pieces, Ends(prompt_tokens), reads_calls)

    async def _plans(self, wishes: Sequence[Wish], asking: Asking) -> list[Plan]:
        async def plan(wish: Wish) -> Plan:
            return await self._generating.plan(wish, request_id=asking.request_id, caller=asking.caller)

        if len(wishes) == 1:
            return [await plan(wishes[0])]
        async with _ErrorsAlone() as group:
            tasks = [group.create_task(plan(wish)) for wish in wishes]
        return [task.result() for task in tasks]


class _ErrorsAlone(asyncio.TaskGroup):
    """A group whose first error is raised as it is."""

    async def __aexit__(self, *exc: object) -> None:
        try:
            await super().__aexit__(*exc)  # type: ignore[arg-type]  # as it was given
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None


def _choice(plan: Plan, place: int, choices: int, prompts: int) -> Plan:
    """The plan of one choice: with a name and a seed of its own where there are several."""
    if choices == prompts == 1:
        return plan
    generation, sampling = plan.generation, plan.generation.sampling
    if sampling.seed is not None:
        sampling = replace(sampling, seed=sampling.seed + place % choices)
    name = f"{generation.request_id}-{place}"
    return replace(plan, generation=replace(generation, request_id=name, sampling=sampling, joins=place > 0))

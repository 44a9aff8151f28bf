"""The workers behind the gateway: which models they serve together, who of them can take a request, and who is asked first.

Owns membership, the grouping by model, and what is said of a worker that is left out. What one worker is, is member's; which
of the usable ones is best is a policy's (routing); calling one is dispatch's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from inference_gateway.domain.errors import ModelNotFound
from inference_gateway.domain.generation import Generation, WorkerStatus
from inference_gateway.domain.member import Member
from inference_gateway.domain.memories import TEXT_TOLD_MAX, Memory, MemoryChoice, find
from inference_gateway.domain.prefixes import is_known
from inference_gateway.domain.routing import LeastLoaded, Policy
from inference_gateway.domain.served_model import CONFIRM_SECONDS_MAX, ServedModel
from treadle.contract.errors import ResourceExhausted, Unavailable

log = logging.getLogger("treadle.gateway.fleet")
MEMBERS_MAX = 256  # of one gateway; each is polled, and may have its blocks indexed
SAME_FIELDS = ("model", "tokenizer_digest", "context_tokens_max")  # in these all members of a model agree


class RoutingFigures(Protocol):
    """Counts where requests go."""

    def routed(self, by: str, cached_tokens: int, possible_tokens: int) -> None:
        """A request was given its order of workers; of its prompt the first, and the best, has so many tokens cached."""
        ...


class Fleet:
    """All on the event loop."""

    def __init__(
        self, members: Sequence[Member] = (), policy: Policy | None = None, *, figures: RoutingFigures | None = None,
        follow: Callable[[Member], Coroutine[Any, Any, None]] | None = None,
    ) -> None:  # fmt: skip
        """policy: None: the least loaded first; follow: what is done for each member beside its watch, until cancelled."""
        self._members: dict[str, Member] = {}
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._policy = policy or LeastLoaded()
        self._figures, self._follow_more = figures, follow
        self._running = False
        for member in members:
            self.add(member)

    @property
    def members(self) -> Sequence[Member]:
        """All of them, usable or not, in the order in which they came."""
        return tuple(self._members.values())

    def add(self, member: Member) -> None:
        """A worker joins. Raises ResourceExhausted beyond MEMBERS_MAX."""
        if len(self._members) >= MEMBERS_MAX:
            raise ResourceExhausted(f"{MEMBERS_MAX} workers are the most that one gateway serves; {member.name!r} is left out")
        self._members[member.name] = member
        if self._running:
            self._follow(member)

    def remove(self, name: str) -> Member | None:
        """A worker leaves the list; what runs there goes on. None: it was not there."""
        if (polling := self._polls.pop(name, None)) is not None:
            polling.cancel()
        return self._members.pop(name, None)

    def usable(self, model: str = "") -> list[Member]:
        """Members that may get a request now, of the model of that name; "": of any.

        Those that failed again and again rest while another one of their model serves, and are better than none.
        """
        self._compare()
        fit = [member for member in self._members.values() if member.not_usable_because() is None and model in ("", _name(member))]
        well = [member for member in fit if member.breaker.allows()]
        if len(well) == len(fit):
            return fit
        served = {_name(member) for member in well}
        return [member for member in fit if member in well or _name(member) not in served]

    def ranked(self, generation: Generation, avoid: Collection[Member] = ()) -> list[Member]:
        """Members that may serve `generation`, the best first; may be empty. Counted where nobody is to be avoided."""
        members = [member for member in self.usable(generation.model) if member not in avoid]
        # Whoever knows the memories before whoever would have to look for them.
        knowing = [member for member in members if _knows_all(member, generation)] or members
        ranking = self._policy.rank(knowing, generation)
        if ranking.members and not avoid and self._figures is not None:
            self._figures.routed(ranking.by, ranking.cached_tokens, ranking.possible_tokens)
        if len(knowing) == len(members):
            return ranking.members
        others = [member for member in members if member not in knowing]
        return ranking.members + self._policy.rank(others, generation).members

    def models(self) -> list[ServedModel]:
        """The last known model of each name, even if its workers are away now, in the order in which they came."""
        self._compare()
        groups: dict[str, list[Member]] = {}
        for member in self._members.values():
            if member.watch.last_known is not None:
                groups.setdefault(_name(member), []).append(member)
        return [model for group in groups.values() if (model := _together(group)) is not None]

    async def confirmed(self, asked: str) -> ServedModel:
        """The model that the name `asked` means, itself or by an alias. Waits for one poll of workers that were lost.

        Raises ModelNotFound for a name that no worker serves, Unavailable while those that do are away.
        """
        found = self._serving(asked)
        if not found:
            away = [member for member in self._members.values() if member.not_usable_because() and _may_serve(member, asked)]
            polls = {asyncio.create_task(member.watch.next_poll(CONFIRM_SECONDS_MAX)) for member in away}
            try:
                while polls and not found:
                    _, polls = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
                    found = self._serving(asked)
            finally:
                for poll in polls:
                    poll.cancel()
        if model := _together(found):
            return model
        names = sorted({_name(member) for member in self.usable()})
        if not names or any(_may_serve(member, asked) and member.watch.last_known for member in self._members.values()):
            raise Unavailable(f"no worker is ready: {self._reason(asked)}")
        raise _not_served(asked, names)

    def not_ready_because(self) -> str | None:
        """Why every request would be refused now; None: a worker takes requests."""
        return None if self.usable() else self._reason()

    def look_again(self, model: str) -> None:
        """Something about the workers of `model` has changed: poll them now."""
        for member in self._members.values():
            if _name(member) == model:
                member.watch.look_again()

    async def run(self) -> None:
        """Follow all members, those that join later too, until cancelled."""
        self._running = True
        try:
            for member in self._members.values():
                self._follow(member)
            await asyncio.Event().wait()
        finally:
            self._running = False
            for polling in self._polls.values():
                polling.cancel()
            if self._polls:
                await asyncio.wait(self._polls.values())
            self._polls.clear()

    def _follow(self, member: Member) -> None:
        async def follow() -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(member.watch.run())
                if self._follow_more is not None:
                    tasks.create_task(self._follow_more(member))

        self._polls[member.name] = asyncio.create_task(follow())

    def _serving(self, asked: str) -> list[Member]:
        """Usable members of the model that `asked` means: of the longest name that fits."""
        fitting = [member for member in self.usable() if _fits(_name(member), asked)]
        name = max((_name(member) for member in fitting), key=len, default="")
        return [member for member in fitting if _name(member) == name]

    def _reason(self, asked: str = "") -> str:
        reasons = [member.not_usable_because() for member in self._members.values() if not asked or _may_serve(member, asked)]
        told = [reason for reason in reasons if reason]
        if not self._members:
            return "there is none yet"
        more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
        return f"{told[0]}{more}" if told else "none of them is usable"

    def _compare(self) -> None:
        """Leave out members that differ from the first ready one of their model, so that any of a model can serve its requests."""
        first: dict[str, WorkerStatus] = {}
        for member in self._members.values():
            status = member.watch.status
            if status is None or member.leaving or member.watch.not_ready_because() is not None:
                continue
            leader = first.setdefault(_name(member), status)
            differs = next((name for name in SAME_FIELDS if getattr(status, name) != getattr(leader, name)), "")
            if differs != member.differs:
                fields = {"worker": member.name, "field": differs or member.differs}
                log.log(*((logging.ERROR, "worker left out") if differs else (logging.INFO, "worker fits again")), extra=fields)
                member.differs = differs


def meant(asked: str, models: Sequence[ServedModel]) -> ServedModel:
    """The model that a name means, itself or by an alias: the longest name that fits. Raises ModelNotFound."""
    fitting = [model for model in models if _fits(model.name, asked)]
    if not fitting:
        raise _not_served(asked, [model.name for model in models])
    return max(fitting, key=lambda model: len(model.name))


def _not_served(asked: str, names: Sequence[str]) -> ModelNotFound:
    there = ", ".join(repr(name) for name in names)
    return ModelNotFound(f"the model {asked[:TEXT_TOLD_MAX]!r} is not served here; {there} {'is' if len(names) == 1 else 'are'}")


def _name(member: Member) -> str:
    model = member.watch.last_known
    return "" if model is None else model.name


def _fits(name: str, asked: str) -> bool:
    return bool(name) and (asked == name or asked.startswith(f"{name}+"))


def _may_serve(member: Member, asked: str) -> bool:
    """Whether a member that is away could serve the name: it does by its last word, or has said nothing yet."""
    return member.watch.last_known is None or _fits(_name(member), asked)


def _knows_all(member: Member, generation: Generation) -> bool:
    """Whether a member can use the Engram memory and the prefix of a request, as far as it has told."""
    status = member.watch.status
    prefixes = status.prefixes if status is not None else ()
    return _knows(member, generation.engram) and is_known(generation.memory.prefix, prefixes)


def _knows(member: Member, choice: MemoryChoice) -> bool:
    """Whether it lists the memory of a choice as one that can be had."""
    if not choice.name:
        return True
    model = member.watch.last_known
    found = None if model is None else find(choice.name, model.memories)
    return found is not None and not found.refusal


def _together(members: Sequence[Member]) -> ServedModel | None:
    """The model of these members, with the memories that any of them has; the first one's word counts where they differ."""
    models = [model for member in members if (model := member.watch.last_known) is not None and not member.differs]
    if not models or all(model.memories == models[0].memories for model in models):
        return models[0] if models else None
    merged: dict[str, Memory] = {}
    for model in models:
        for memory in model.memories:
            known = merged.get(memory.name)
            if known is None:
                merged[memory.name] = replace(memory, default=memory.default and model is models[0])
            elif known.refusal and not memory.refusal:
                merged[memory.name] = replace(memory, default=known.default)
    if not all(find("", model.memories) for model in models):
        merged.pop("", None)  # one of them knows what there is
    return replace(models[0], memories=tuple(sorted(merged.values(), key=lambda memory: memory.name)))

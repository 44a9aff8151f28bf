"""One generation over the fleet: waits for its place, asks a worker, and another one while nothing has been answered yet.

Owns retries, hedges and the lines before the workers. A generation is never repeated once a piece of it was handed on: what a
client has read stays true. Which worker is best the fleet says; how long one may be silent is calls'.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace

from inference_gateway.domain.calls import Call, PieceLimits, retry_reason
from inference_gateway.domain.errors import CallNotBegun, WorkerLost
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import Generation, Piece, Priority
from inference_gateway.domain.hedging import HedgeBudget, Race
from inference_gateway.domain.member import Member
from inference_gateway.domain.ports import DispatchFigures
from inference_gateway.domain.waiting_line import LineLimits, WaitingLine
from treadle.contract import Deadline
from treadle.contract.errors import TreadleError, Unavailable

UNBEGUN_MAX = 2  # calls that a worker refused unseen and that are no attempts
REST_SECONDS_FIRST, REST_SECONDS_MAX = 0.02, 0.5  # before a retry, doubled with each, and drawn from the upper half


@dataclass(frozen=True, slots=True)
class DispatchLimits:
    """All are settings.

    attempts_max:  workers asked for one generation, one after the other; a call that a worker refused unseen is made again all the same
    hedge_seconds: without a first piece for so long a second worker is asked beside the first; 0: never
    headroom:      generations given to each worker beyond its batch, so that its next one is there when a place is free
    """

    pieces: PieceLimits = field(default_factory=PieceLimits)
    line: LineLimits = field(default_factory=LineLimits)
    attempts_max: int = 3
    hedge_seconds: float = 0.0
    headroom: int = 1


class NoFigures:
    """Fits DispatchFigures: counts nothing."""

    def waited(self, seconds: float) -> None:
        """Counts nothing."""

    def refused(self, reason: str) -> None:
        """Counts nothing."""

    def retried(self, reason: str) -> None:
        """Counts nothing."""

    def hedged(self, outcome: str) -> None:
        """Counts nothing."""

    def stalled(self, when: str) -> None:
        """Counts nothing."""


class Dispatch:
    """All on the event loop."""

    def __init__(
        self, fleet: Fleet, limits: DispatchLimits | None = None, figures: DispatchFigures | None = None,
        chance: random.Random | None = None,
    ) -> None:  # fmt: skip
        """chance: spreads retries, so that those who lost the same worker do not come back at once."""
        self._fleet, self._limits = fleet, limits or DispatchLimits()
        self._figures, self._chance = figures or NoFigures(), chance or random.Random()
        self._budget = HedgeBudget()
        self._lines: dict[str, WaitingLine] = {}

    @property
    def lines(self) -> dict[str, WaitingLine]:
        """The lines by name of the model."""
        return dict(self._lines)

    def check(self, model: str, priority: Priority) -> None:
        """Raise ResourceExhausted for a request that would wait too long: asked before work is spent on it."""
        self._line(model).check(priority, Deadline.never())

    async def pieces(
        self, generation: Generation, deadline: Deadline, let_in: Callable[[], None] | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of the answer as they come, the first with its worker's name. Closing the generator stops the worker.

        let_in: called once the generation has its place, before a worker is asked.
        Raises what workers raise, WorkerStalled for one that is silent, ResourceExhausted where the wait would be too long.
        """
        deadline.check(before="the generation")
        line = self._line(generation.model)
        async with line.place(generation.priority, deadline, joins=generation.joins):
            if let_in is not None:
                let_in()
            call, first = await self._answering(line, generation, deadline)
            try:
                piece: Piece | None = replace(first, worker=call.member.name)
                degraded = False
                while piece is not None:
                    degraded = degraded or piece.degraded  # once memory was missing, the answer stays degraded
                    yield replace(piece, degraded=True) if degraded and not piece.degraded else piece
                    piece = await call.following()
            finally:
                await call.close()

    async def _answering(self, line: WaitingLine, generation: Generation, deadline: Deadline) -> tuple[Call, Piece]:
        """A call that has begun to answer, and its first piece. Raises the last failure once nobody else can be asked."""
        self._budget.earn()
        tried: list[Member] = []
        failure: TreadleError | None = None
        unbegun = 0
        while True:
            member = await self._chosen(generation, tried, failure)
            if failure is not None:
                self._figures.retried(retry_reason(failure) or "")
                await self._rest(len(tried), deadline)
            tried.append(member)
            try:
                return await self._begun(member, line, generation, tried, deadline)
            except TreadleError as error:
                unbegun += isinstance(error, CallNotBegun) and unbegun < UNBEGUN_MAX
                if retry_reason(error) is None or len(tried) - unbegun >= self._limits.attempts_max:
                    raise
                failure = error

    async def _chosen(self, generation: Generation, tried: list[Member], failure: TreadleError | None) -> Member:
        """The best of those that were not tried; of all, where a worker was lost that may be back. Raises `failure`, or Unavailable."""
        ranked = self._fleet.ranked(generation, tried)
        if not ranked and (failure is None or isinstance(failure, WorkerLost)):
            try:
                await self._fleet.confirmed(generation.model)
            except TreadleError as error:
                raise failure or error from error
            ranked = self._fleet.ranked(generation)
        if not ranked:
            raise failure or Unavailable(f"no worker is ready: {self._fleet.not_ready_because() or 'none of this model'}")
        return ranked[0]

    async def _begun(
        self, member: Member, line: WaitingLine, generation: Generation, tried: list[Member], deadline: Deadline
    ) -> tuple[Call, Piece]:
        """A call of `member`, or of a second one that was quicker."""
        call = self._call(member, generation, tried, deadline)
        if not self._limits.hedge_seconds:
            try:
                return call, await call.first()
            except BaseException:
                await call.close()
                raise
        spares: list[Member] = []

        def second() -> Call | None:
            ranked = self._fleet.ranked(generation, tried)
            if not ranked or not line.take_spare():
                return None
            if not self._budget.spend():
                line.give_back()
                return None
            spares.append(ranked[0])
            tried.append(ranked[0])
            return self._call(ranked[0], generation, tried, deadline)

        try:
            async with Race(self._figures.hedged) as race:
                return await race.run(call, second, self._limits.hedge_seconds)
        finally:
            for _ in spares:
                line.give_back()

    def _call(self, member: Member, generation: Generation, tried: list[Member], deadline: Deadline) -> Call:
        def elsewhere() -> bool:
            others = (other for other in self._fleet.usable(generation.model) if other not in tried)
            return len(tried) < self._limits.attempts_max and any(others)

        return Call(member, generation, deadline, self._limits.pieces, self._figures, elsewhere)

    async def _rest(self, attempts: int, deadline: Deadline) -> None:
        seconds = min(REST_SECONDS_FIRST * 2 ** (attempts - 1), REST_SECONDS_MAX) * self._chance.uniform(0.5, 1.0)
        await asyncio.sleep(min(seconds, deadline.remaining_seconds()))

    def _line(self, model: str) -> WaitingLine:
        line = self._lines.get(model)
        if line is None:
            empty = [name for name, other in self._lines.items() if not other.taken and not other.waiting]
            for name in empty:  # of models that are served no more; one that is gets a new line
                del self._lines[name]
            line = self._lines[model] = WaitingLine(self._limits.line, lambda: self._slots(model), self._figures)
        return line

    def _slots(self, model: str) -> int | None:
        """Generations that the workers of a model take at once; None where one of them does not tell, or none is there."""
        slots = 0
        for member in self._fleet.usable(model):
            status = member.watch.status
            if status is None or not status.requests_running_max:
                return None
            slots += status.requests_running_max + self._limits.headroom
        return slots or None

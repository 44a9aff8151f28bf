"""One call of one worker, piece by piece, each within its time; and what an error says about the worker.

Owns the idle timeouts and what a call tells the worker's breaker and watch. Whom to ask instead is dispatch's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from inference_gateway.domain.errors import CallNotBegun, MemoryDamaged, MemoryRefused, WorkerLost, WorkerStalled
from inference_gateway.domain.generation import Generation, Piece
from inference_gateway.domain.member import Member
from inference_gateway.domain.patience import Patience
from inference_gateway.domain.ports import DispatchFigures
from treadle.contract import Deadline
from treadle.contract.errors import ResourceExhausted, TreadleError, Unavailable


@dataclass(frozen=True, slots=True)
class PieceLimits:
    """first_seconds_max: longest wait for a worker's first piece. idle_seconds_max: longest wait for each one after it."""

    first_seconds_max: float = 60.0
    idle_seconds_max: float = 30.0


class Call:
    """Begins with its making; whoever makes it calls `close`, which ends it at the worker, whatever that is doing."""

    def __init__(
        self, member: Member, generation: Generation, deadline: Deadline, limits: PieceLimits, figures: DispatchFigures,
        elsewhere: Callable[[], bool],
    ) -> None:  # fmt: skip
        """elsewhere: whether another worker could be asked now, were this call given up before its first piece."""
        self.member, self._elsewhere = member, elsewhere
        self._limits, self._figures = limits, figures
        self._stream = member.worker.generate(generation, deadline.remaining_seconds())
        self._decided = self._complete = False
        self._patience = Patience()
        member.begin()
        self._probe = member.breaker.began()

    async def first(self) -> Piece:
        """The first piece. Raises what the worker raises, and WorkerStalled when it takes too long; sooner when the worker answers
        no status either and another one can be asked. Of one that answers others meanwhile it is ResourceExhausted: a place in its
        queue is no silence.
        """
        self.member.first_waits.add(self._give_up)
        try:
            piece = await self._within(self._limits.first_seconds_max, "first")
        finally:
            self.member.first_waits.discard(self._give_up)
        self._decided = True
        self.member.breaker.succeeded()
        return piece

    async def following(self) -> Piece | None:
        """The next piece; None after the last one. Raises as `first`."""
        return None if self._complete else await self._within(self._limits.idle_seconds_max, "between")

    async def close(self) -> None:
        """End the call. Nobody may be waiting for a piece."""
        self._patience.close()
        self.member.end()
        if not self._decided:
            self.member.breaker.undecided(self._probe)
        await self._stream.aclose()

    async def _within(self, seconds: float, when: str) -> Piece:
        begun = time.monotonic()
        try:
            piece = await self._patience.within(seconds, anext(self._stream))
        except StopAsyncIteration:
            raise self._noted(WorkerLost("the worker ended its stream without a last message")) from None
        except TimeoutError as error:
            if not self._patience.lost:
                raise
            waited = time.monotonic() - begun
            if when == "first" and self.member.spoke_seconds > begun:
                raise ResourceExhausted(
                    f"the worker answers others; it began no answer within {waited:.3g} seconds", waited
                ) from error
            self._figures.stalled(when)
            where = "before its answer" if when == "first" else "in the middle of its answer"
            raise self._noted(WorkerStalled(f"the worker sent nothing for {waited:.3g} seconds, {where}")) from error
        except TreadleError as error:
            self._noted(error)
            raise
        self.member.spoke_seconds = time.monotonic()
        self._complete = piece.finish_reason is not None
        return piece

    def _give_up(self) -> None:
        """No longer wait for a first piece, where another worker can be asked for it."""
        if self._elsewhere():
            self._patience.lose()

    def _noted(self, error: TreadleError) -> TreadleError:
        """The same error, its meaning for the worker written down."""
        if blames_worker(error):
            self._decided = True
            self.member.breaker.failed(self._probe)
        if isinstance(error, WorkerLost | WorkerStalled):
            self.member.watch.lost()
        elif isinstance(error, MemoryRefused | MemoryDamaged):
            self.member.watch.look_again()
        return error


def blames_worker(error: TreadleError) -> bool:
    """Whether an error is the worker's fault: it is gone, stands still or is broken. Those of a request never are, nor is a full queue."""
    return isinstance(error, WorkerLost | WorkerStalled) or type(error) is TreadleError


def retry_reason(error: TreadleError) -> str | None:
    """Why another worker may do better, as a metric's label; None: it would not, or must not be tried."""
    if isinstance(error, WorkerStalled):
        return "stalled"
    if isinstance(error, CallNotBegun):
        return "not_begun"
    if isinstance(error, WorkerLost):
        return "lost"
    if isinstance(error, ResourceExhausted):
        return "busy"
    return "unavailable" if isinstance(error, Unavailable) else None

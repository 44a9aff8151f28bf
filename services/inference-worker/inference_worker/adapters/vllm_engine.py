"""The RunningEngine over vLLM's AsyncLLM: the model runs in a process of vLLM's own, requests and answers cross over here.

Owns requests under way and the queue's limit, the figures of the engine core, and noticing its death. Does not own arguments and
environment (`vllm_arguments`), text (`vllm_answer`) or memories (the catalogue here, `treadle.vllm` there).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

import psutil
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from inference_worker.adapters.vllm_answer import PrefixOutcome, VllmAnswer
from inference_worker.adapters.vllm_blocks import VllmBlocks
from inference_worker.adapters.vllm_generation import DEAD, VllmGeneration
from inference_worker.adapters.vllm_steps import Steps
from inference_worker.domain.cached_blocks import BlockChanges, BlockLog
from inference_worker.domain.engine_port import EngineFacts, Vector
from inference_worker.domain.errors import Draining, NoVectors
from inference_worker.domain.limits import Limits
from inference_worker.domain.ports import LayerFigures, Observer
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.queue_wait import QueueWait
from inference_worker.domain.report import EngineLoad, EngineTotals, LayerReport
from inference_worker.domain.request import Request
from inference_worker.domain.request_leases import Leases
from inference_worker.domain.text import Vocabulary
from treadle.client.engram import LayerFigures as Figures
from treadle.contract.errors import ResourceExhausted, Unavailable
from treadle.vllm.outcomes import EngineReports

log = logging.getLogger("treadle.worker")
LOOK_SECONDS = 0.5  # between two looks at the engine core: does it live, what have its Engram layers done
SHUTDOWN_SECONDS = 2.0  # for each way of ending vLLM's processes; nothing runs in them any more
TRACKER = "resource_tracker"  # Python's own, which ends with this process
SILENT_SECONDS_MAX = 120.0  # far above the longest step and the longest opening of a memory within one


class TicketObserver(Observer, Protocol):
    """An Observer that hears of Engram tickets apart from their step."""

    def tickets(self, layers: tuple[LayerReport, ...]) -> None:
        """Tickets of steps that were told already."""


class VllmEngine:
    """One AsyncLLM. An asynchronous context manager: leaving it ends what still runs, with Draining, and vLLM's processes.

    llm:        owned from here on
    steps:      hears what the engine core reports
    token_count: ids from it on are padding of the output matrix
    events:     where it publishes what its prefix cache holds; empty: it does not
    silent_seconds_max: an engine core that answers nothing for so long stands still, and is taken for dead
    positions_max: of the model, which a long prefix takes a part of
    """

    def __init__(
        self, llm: AsyncLLM, steps: Steps, facts: EngineFacts, vocabulary: Vocabulary, limits: Limits, token_count: int,
        observer: TicketObserver, events: str = "", silent_seconds_max: float = SILENT_SECONDS_MAX, *, positions_max: int,
    ) -> None:  # fmt: skip
        self._silent_seconds_max, self._positions_max = silent_seconds_max, positions_max
        self.llm, self.facts, self.limits = llm, facts, limits
        self.died = asyncio.Event()
        self._steps, self._vocabulary, self._observer, self._token_count = steps, vocabulary, observer, token_count
        self._under_way: set[VllmGeneration] = set()
        self._open, self._count = True, 0
        self._wait = QueueWait(limits.sequences_max)
        self._figures: Mapping[int, LayerFigures] = {}
        self._figures_missed = False
        self._blocks, self._events = BlockLog(), events
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> VllmEngine:
        self._tasks.append(asyncio.create_task(self._look()))
        if self._events:
            self._tasks.append(asyncio.create_task(VllmBlocks(self._events, self._blocks).run()))
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close_door()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in list(self._under_way):
            generation.cancel()
        await asyncio.to_thread(self._end_processes)

    @property
    def load(self) -> EngineLoad:
        """See RunningEngine."""
        return EngineLoad(len(self._under_way) - self._waiting, self._waiting, 0)

    @property
    def totals(self) -> EngineTotals:
        """See RunningEngine."""
        return self._steps.totals

    @property
    def wait_seconds_predicted(self) -> float:
        """See RunningEngine."""
        free = not self._waiting and len(self._under_way) < self.limits.sequences_max
        return 0.0 if free else self._wait.seconds(self._waiting)

    @property
    def draining(self) -> bool:
        """See RunningEngine."""
        return not self._open or self.died.is_set()

    def layer_figures(self) -> Mapping[int, LayerFigures]:
        """See RunningEngine; as of the last look, two LOOK_SECONDS ago or less where steps are short."""
        return self._figures

    def close_door(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        self._open = False
        self._blocks.close()  # a watch lasts for ever, and the drain would wait for it

    def watch_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        """See RunningEngine; from vLLM's own KV events."""
        return self._blocks.watch()

    def check(self, request: Request, prefix: OpenPrefix | None = None) -> None:
        """See RunningEngine. prefix: that the request stands behind, once it is open"""
        request.check(vocabulary=self._token_count, context_tokens_max=self.own_tokens_max(prefix))
        if request.deadline is not None:
            request.deadline.check(before="the request was queued")

    def begin(self, request: Request, leases: Leases) -> VllmGeneration:
        """See RunningEngine."""
        self.check(request, leases.prefix.memory)
        if self.died.is_set():
            raise Unavailable(DEAD)
        if not self._open:
            raise Draining("the worker is stopping and takes no new requests")
        if self._waiting >= self.limits.requests_waiting_max:
            self._observer.ended("refused")
            raise ResourceExhausted(
                f"requests_waiting_max: {self._waiting} requests wait already, the limit is {self.limits.requests_waiting_max}",
                self._wait.retry_after_seconds(self._waiting),
            )
        self._count += 1
        generation = VllmGeneration(self, f"treadle-{self._count}", request, leases)
        self._under_way.add(generation)
        return generation

    async def embed(self, texts: Sequence[Sequence[int]]) -> Sequence[Vector]:
        """See RunningEngine: one AsyncLLM runs one kind of model, and this one generates."""
        raise NoVectors("the engine vllm makes no vectors; a worker of the engine embedded does")

    def answer_for(self, request: Request) -> VllmAnswer:
        """An empty answer to a request."""
        return VllmAnswer(request, self._vocabulary, self.stops_of(request))

    def own_tokens_max(self, prefix: OpenPrefix | None) -> int:
        """Most tokens of prompt and answer: behind a prefix the model's positions leave less room."""
        before = prefix.positions_before if prefix is not None else 0
        return min(self.facts.context_tokens_max, self._positions_max - before)

    def stops_of(self, request: Request) -> frozenset[int]:
        """Every token that ends an answer."""
        wanted = request.sampling
        return wanted.stop_token_ids if wanted.ignore_eos else wanted.stop_token_ids | self.facts.eos_token_ids

    def over(self, generation: VllmGeneration, outcome: str, prefix: PrefixOutcome | None) -> None:
        """A generation has ended; said once by each."""
        self._under_way.discard(generation)
        if prefix is not None:
            self._observer.prefix_used(prefix.answered, prefix.used.lookups, prefix.used.lookups_outside)
        self._wait.ended(generation.seconds)
        self._observer.ended(outcome)

    def first_output(self, cached: int) -> None:
        """A request has its first output."""
        if cached:
            self._steps.hit()

    @property
    def _waiting(self) -> int:
        """Requests without a place in the batch: those for whom there is none, and those that vLLM itself keeps waiting (for KV)."""
        return max(len(self._under_way) - self.limits.sequences_max, min(self._steps.waiting, len(self._under_way)), 0)

    def _end_processes(self) -> None:
        """vLLM kills its engine core and leaves the process that runs the model to notice: what is left of them ends here."""
        theirs = [each for each in psutil.Process().children(recursive=True) if _must_end(each)]
        self.llm.shutdown(timeout=SHUTDOWN_SECONDS)
        _, left = psutil.wait_procs(theirs, timeout=SHUTDOWN_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=SHUTDOWN_SECONDS)

    async def _look(self) -> None:
        """Watch the engine core until it dies or stands still, and take what its Engram layers report."""
        asked: asyncio.Task[None] | None = None
        answered = time.monotonic()
        try:
            while not self.llm.errored and (silent := time.monotonic() - answered) < self._silent_seconds_max:
                asked = asked or asyncio.create_task(self._take_reports())  # one that was given up would lose its tickets
                await asyncio.wait({asked}, timeout=LOOK_SECONDS)
                if asked.done():
                    self._heard(asked)
                    asked = None
                    await asyncio.sleep(LOOK_SECONDS)
                    answered = time.monotonic()
        finally:
            if asked is not None:
                asked.cancel()
        requests = len(self._under_way)
        if self.llm.errored:
            log.error("the engine's process has died", extra={"requests": requests})
        else:
            log.error("the engine's process stands still", extra={"requests": requests, "silent_seconds": round(silent, 1)})
        self.died.set()

    def _heard(self, asked: asyncio.Task[None]) -> None:
        """What kept the figures from coming is said once; the figures that were there stay."""
        error = asked.exception()
        if error is not None and not isinstance(error, EngineDeadError) and not self._figures_missed:
            log.warning("the engine's figures cannot be read", exc_info=error)
        self._figures_missed = error is not None

    async def _take_reports(self) -> None:
        (taken,) = await self.llm.collective_rpc("take_engram_reports")
        reports = EngineReports.from_dict(taken)
        self._figures = {layer: Figures(**figures) for layer, figures in reports.figures.items()}  # type: ignore[arg-type]
        if reports.tickets_dropped:
            log.warning("engram tickets were not counted", extra={"tickets": reports.tickets_dropped})
        self._observer.tickets(tuple(LayerReport(*_fields(ticket)) for ticket in reports.tickets))


def _must_end(process: psutil.Process) -> bool:
    """Whether it lives and is vLLM's."""
    try:
        return TRACKER not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or it is dead and nobody has asked how it ended
        return False


def _fields(ticket: Any) -> tuple[Any, ...]:
    return (
        ticket.layer, ticket.transport, ticket.in_time, ticket.rows, ticket.rows_missing, ticket.stall_seconds, ticket.slack_seconds,
        ticket.gather_seconds,
    )  # fmt: skip

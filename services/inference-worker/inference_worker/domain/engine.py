"""The embedded engine: continuous batching over one model, one step at a time.

Owns the batch, the queue before it, KV and prefix cache. Does not choose tokens (`choosing`), own a thread (`engine_thread`, or
whoever calls `step`), nor does it know gRPC. `submit`, `cancel` and the read-only properties may be called from any thread;
`step` from one.
"""

from __future__ import annotations

import logging
import threading
import time

import torch
from torch import Tensor

from inference_worker.domain import sampling
from inference_worker.domain.cached_blocks import BlockLog
from inference_worker.domain.choosing import Chooser
from inference_worker.domain.embedding import Embedder
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.engram_step import WAIT_SECONDS_MAX, EngramStep, by_memory, groups_of, hint_prompt
from inference_worker.domain.errors import Draining, MemoryMissing, StepFailed
from inference_worker.domain.kv_blocks import KVBlocks
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.outbox import Outbox
from inference_worker.domain.ports import Observer, Prefetcher, Sink
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_guard import PrefixGuard, failure_of, uses_of
from inference_worker.domain.prefix_run import run_of
from inference_worker.domain.queue_wait import QueueWait
from inference_worker.domain.report import EngineLoad, EngineTotals, LayerReport, StepReport
from inference_worker.domain.request import Request
from inference_worker.domain.scheduler import Scheduler, Slot
from inference_worker.domain.sequence import Sequence, kv_of
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, TreadleError
from treadle.contract.policy import WaitPolicy
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import OUTSIDE_SHARE_MAX

log = logging.getLogger("treadle.worker")


class Engine:
    """One model and its batch.

    limits:     named limits; the model's own positions lower `context_tokens_max`
    memory:     Engram memory of requests that are submitted without a lease; None: none. The caller's, who closes it
    prefetcher: looks up the rows of all memories; needed where requests use any
    engram_wait_seconds_max: longest wait of a step at one Engram layer
    name:       what the model is called; part of the prefix cache's keys
    prefix_outside_share_max: see PrefixRun.judge
    """

    def __init__(
        self, model: CausalLM, vocabulary: Vocabulary, limits: Limits, memory: EngramMemory | None = None, *,
        prefetcher: Prefetcher | None = None, engram_wait_seconds_max: float = WAIT_SECONDS_MAX, name: str = "model",
        observer: Observer | None = None, prefix_outside_share_max: float = OUTSIDE_SHARE_MAX,
    ) -> None:  # fmt: skip
        self.limits, self.memory, self.prefetcher = limits, memory, prefetcher
        self._engram_wait_seconds_max = WaitPolicy(engram_wait_seconds_max).wait_seconds_max  # checked there
        self._check_usable(memory)
        self.context_tokens_max = min(limits.context_tokens_max, model.config.positions_max)
        self.totals = EngineTotals()
        self._model, self._vocabulary, self._observer = model, vocabulary, observer
        self.chooser = Chooser(model, vocabulary)
        self.embedder = Embedder(model, vocabulary=self.chooser.token_count, context_tokens_max=self.context_tokens_max)
        self._blocks = KVBlocks(model, limits.prefix_cache_bytes_max, name)
        self._scheduler = Scheduler(limits)
        self._guard = PrefixGuard(prefix_outside_share_max, limits.kv_tokens_max)
        self._work = threading.Condition()  # its lock guards the scheduler's queue and the door
        self._open, self._awake = True, False
        self._wait = QueueWait(limits.sequences_max)
        self._outbox = Outbox()

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What ends an answer."""
        return self.chooser.eos_token_ids

    @property
    def load(self) -> EngineLoad:
        """How busy it is now."""
        return EngineLoad(len(self._scheduler.running), len(self._scheduler.waiting), self._blocks.byte_count)

    @property
    def block_log(self) -> BlockLog:
        """What lies in the prefix cache."""
        return self._blocks.log

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of the prefix cache; 0: there is none."""
        return self._blocks.block_tokens

    @property
    def dtype(self) -> str:
        """Number format of weights and KV."""
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def wait_seconds_predicted(self) -> float:
        """How long a request that came now would wait for its place in the batch, as far as it can be told."""
        if not self._scheduler.waiting and len(self._scheduler.running) < self.limits.sequences_max:
            return 0.0
        return self._wait.seconds(len(self._scheduler.waiting))

    def submit(
        self, request: Request, sink: Sink, lease: Lease[EngramMemory] | None = None, prefix_lease: Lease[OpenPrefix] | None = None
    ) -> Sequence:
        """Queue a request; its answer goes to `sink`. Any thread.

        lease: on the memory that it uses to its end, or on none; the engine releases it then, but not where this raises.
               None: the engine's own `memory`.
        prefix_lease: the same, on the long prefix that it is answered behind; None: none
        Returns what `cancel` wants. Raises InvalidArgument naming the field, ResourceExhausted when the queue is full,
        DeadlineExceeded when there is no time left, Draining.
        """
        lease = Lease(self.memory) if lease is None else lease
        prefix_lease = Lease[OpenPrefix]() if prefix_lease is None else prefix_lease
        self._check_usable(lease.memory)
        self.check(request, prefix_lease.memory)
        sequence = Sequence(
            request, sink, TextStream(self._vocabulary, request.sampling.stop), list(request.prompt),
            request.tokens_max(self._own_tokens_max(prefix_lease.memory)), lease=lease, prefix_lease=prefix_lease,
            prefix=run_of(prefix_lease.memory), generator=sampling.generator_of(request.sampling), degraded=bool(request.missing),
            started_ns=time.monotonic_ns(),
        )  # fmt: skip
        self._hint(sequence)  # before the engine has it: the lease is certainly held
        with self._work:
            if not self._open:
                raise Draining("the worker is stopping and takes no new requests")
            try:
                self._scheduler.enqueue(sequence, self._wait.retry_after_seconds(len(self._scheduler.waiting)))
            except TreadleError:
                self._count_end("refused")
                raise
            self._work.notify_all()
        return sequence

    def _hint(self, sequence: Sequence) -> None:
        """The prompt is tokenised: rows that are far can come nearer until its first step. What keeps them from it, the step will meet."""
        if self.prefetcher is None:
            return
        try:
            tokens = hint_prompt(self.prefetcher, sequence)
        except TreadleError as error:
            log.debug("no hint", extra={"request": sequence.request.request_id, "reason": str(error)})
            return
        if tokens and self._observer is not None:
            self._observer.hinted(tokens)

    def check(self, request: Request, prefix: OpenPrefix | None = None) -> None:
        """Raise InvalidArgument, naming the field, for a request that this engine cannot run; DeadlineExceeded if its time is over."""
        request.check(vocabulary=self.chooser.token_count, context_tokens_max=self._own_tokens_max(prefix))
        if request.deadline is not None:
            request.deadline.check(before="the request was queued")

    def _own_tokens_max(self, prefix: OpenPrefix | None) -> int:
        """Most tokens of prompt and answer: behind a prefix the model's positions leave less room."""
        before = prefix.positions_before if prefix is not None else 0
        return min(self.context_tokens_max, self._model.config.positions_max - before)

    def cancel(self, sequence: Sequence) -> None:
        """End a request before the next step; its place is free then. Nothing more is delivered. Any thread."""
        sequence.cancelled = True
        self.wake()

    def abandon(self, error: Exception) -> None:
        """End every request, waiting ones too, with `error`. Only while nobody runs steps, or by whoever does."""
        with self._work:
            leaving = self._scheduler.take_out(lambda _: True)
        for sequence in leaving:
            self._let_go(sequence)
            self._count_end("failed")
            self._outbox.put(sequence.sink, error)
        self._outbox.hand_out()

    def close_door(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        with self._work:
            self._open = False
        self._blocks.log.close()  # a watch lasts for ever, and the drain would wait for it

    @property
    def draining(self) -> bool:
        """True once the door is closed."""
        return not self._open

    def wake(self) -> None:
        """End a `wait_for_work` early, also one that has not begun."""
        with self._work:
            self._awake = True
            self._work.notify_all()

    def wait_for_work(self, seconds_max: float) -> None:
        """Wait until there may be something to do."""
        with self._work:
            if not (self._scheduler.waiting or self._scheduler.running or self._awake):
                self._work.wait(seconds_max)
            self._awake = False

    @torch.inference_mode()
    def step(self) -> StepReport | None:
        """Run one step; None if there was nothing to do. An error inside fails the step's requests, not the engine."""
        began = time.monotonic()
        self._dismiss()
        with self._work:
            joined = self._scheduler.join()
        self._admit(joined)
        slots = by_memory(self._scheduler.plan())
        if not slots:
            self._outbox.hand_out()
            return None
        counts = sum(slot.count for slot in slots), sum(slot.prompt_tokens for slot in slots)
        completion_tokens, layers, failed = self._run(slots)
        report = StepReport(
            time.monotonic() - began, len(slots), counts[1], counts[0] - counts[1], completion_tokens,
            sum(sequence.cached for sequence in joined), sum(sequence.cached > 0 for sequence in joined), layers, failed,
        )  # fmt: skip
        self.totals.add(report)
        if self._observer is not None:
            self._observer.step(report)
        self._outbox.hand_out()
        return report

    def _admit(self, joined: list[Sequence]) -> None:
        """Give sequences that got a place their KV; one for which that fails leaves again."""
        for sequence in joined:
            try:
                self._blocks.admit(sequence)
            except Exception as error:
                log.exception("a request could not begin", extra={"request": sequence.request.request_id})
                self._fail(sequence, _step_failed(error), "failed")

    def _run(self, slots: list[Slot]) -> tuple[int, tuple[LayerReport, ...], bool]:
        """Compute a step: (tokens chosen, Engram tickets, whether it failed)."""
        memory_step: EngramStep | None = None
        chosen, failed = 0, False
        try:
            memory_step = self._begin_memories(slots)
            hidden = self._forward(slots, memory_step)
            chosen = self._answer(slots, hidden, memory_step)
        except Exception as error:
            log.exception("a step failed", extra={"requests": len(slots)})
            failed = True
            for slot in slots:
                self._fail(slot.sequence, _step_failed(error), "failed")
        finally:
            if memory_step is not None:
                memory_step.finish()
        return chosen, tuple(memory_step.reports) if memory_step is not None else (), failed

    def _begin_memories(self, slots: list[Slot]) -> EngramStep | None:
        """Start looking up the rows of a step; None where none of its requests uses a memory."""
        groups = groups_of(slots)
        if not groups or self.prefetcher is None:
            return None
        return EngramStep(self.prefetcher, groups, sum(slot.count for slot in slots), self._engram_wait_seconds_max)

    def _forward(self, slots: list[Slot], memory_step: EngramStep | None) -> Tensor:
        """Hidden states [T, hidden] of the step's tokens; each sequence's KV grows by its slot."""
        tokens: list[int] = []
        positions: list[int] = []
        starts = [0]
        for slot in slots:
            tokens += slot.sequence.tokens[slot.first : slot.first + slot.count]
            first = slot.sequence.position_offset + slot.first
            positions += range(first, first + slot.count)
            starts.append(len(tokens))
        hidden = self._model.forward(
            torch.tensor(tokens, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64), starts,
            [kv_of(slot.sequence) for slot in slots], memory_step.before_layer if memory_step is not None else None, uses_of(slots),
        )  # fmt: skip
        for slot in slots:
            slot.sequence.computed += slot.count
        return hidden

    def _answer(self, slots: list[Slot], hidden: Tensor, memory_step: EngramStep | None) -> int:
        """Choose the next token of every sequence that is complete, and hand out pieces; returns the tokens chosen."""
        missing = memory_step.failed if memory_step is not None else {}
        start, rows, choosing = 0, [], []
        for slot in slots:
            sequence = slot.sequence
            if sequence in missing:
                self._fail(sequence, missing[sequence], "memory_missing")
            elif (broken := failure_of(sequence)) is not None:
                log.error("a lookup failed", extra={"request": sequence.request.request_id}, exc_info=broken)
                self._fail(sequence, _step_failed(broken), "failed")
            else:
                self.chooser.add_prompt_logprobs(slot, hidden[start : start + slot.count])
                if slot.completes and self._goes_on(sequence):
                    rows.append(start + slot.count - 1)
                    choosing.append(sequence)
            start += slot.count
        if choosing:
            logits = self._model.logits(hidden[rows])
            for sequence, row in zip(choosing, logits, strict=True):
                self._advance(sequence, row)
        return len(choosing)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether a sequence gets its next token now: not where it begins anew on the exact KV of its prefix, or fails without."""
        try:
            starts_anew = self._guard.sends_back(sequence)
        except MemoryMissing as error:
            self._fail(sequence, error, "memory_missing")
            return False
        if starts_anew:
            with self._work:
                self._scheduler.put_back(sequence)
        return not starts_anew

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        """Choose a token, deliver it with its text, and end the sequence where it is over."""
        piece = self.chooser.next_piece(sequence, logits)
        if sequence.generated == 1 or piece.finish is not None:
            self._blocks.publish(sequence)
        if piece.finish is not None:
            self._leave(sequence, piece.finish.reason.value)
        self._outbox.put(sequence.sink, piece)

    def _dismiss(self) -> None:
        """Let go of requests that nobody waits for any more."""
        now_ns = time.monotonic_ns()

        def unwanted(sequence: Sequence) -> bool:
            return sequence.cancelled or (sequence.request.deadline is not None and sequence.request.deadline.at_ns <= now_ns)

        with self._work:
            leaving = self._scheduler.take_out(unwanted)
        for sequence in leaving:
            self._let_go(sequence)
            if sequence.cancelled:
                self._count_end("cancelled")
            else:
                self._count_end("deadline")
                error = DeadlineExceeded(f"the deadline passed after {sequence.generated} tokens of the answer")
                self._outbox.put(sequence.sink, error)
        self._outbox.hand_out()

    def _fail(self, sequence: Sequence, error: Exception, outcome: str) -> None:
        if not any(running is sequence for running in self._scheduler.running):  # it had its whole answer before the step failed
            return
        self._leave(sequence, outcome)
        self._outbox.put(sequence.sink, error)

    def _leave(self, sequence: Sequence, outcome: str) -> None:
        """Free the place and the KV of a sequence that is over."""
        with self._work:
            self._scheduler.take_out(lambda other: other is sequence)
        self._let_go(sequence)
        self._wait.ended((time.monotonic_ns() - sequence.started_ns) / 1e9)
        self._count_end(outcome)

    def _let_go(self, sequence: Sequence) -> None:
        """Free what a sequence that is over has held; its memory only after the step, whose tickets may still read it."""
        sequence.kv = None
        self._outbox.let_go(sequence.lease)
        self._outbox.let_go(sequence.prefix_lease)
        if sequence.prefix is not None and self._observer is not None:
            self._observer.prefix_used(sequence.prefix.outcome, *sequence.prefix.counted)

    def _check_usable(self, memory: EngramMemory | None) -> None:
        if memory is not None and self.prefetcher is None:
            raise InvalidArgument("engine: made without a prefetcher, so that its requests can use no Engram memory")

    def _count_end(self, outcome: str) -> None:
        if self._observer is not None:
            self._observer.ended(outcome)


def _step_failed(error: Exception) -> StepFailed:
    return StepFailed(f"the engine failed in a step of this request ({type(error).__name__}); the worker's log has the details")

"""The embedded engine: continuous batching over one model, one step at a time.

Owns the batch, the queue before it, KV, prefix cache and the answers' state. Does not own a thread (`engine_thread`, or
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
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.engram_step import WAIT_SECONDS_MAX, EngramStep, by_memory, groups_of, hint_prompt
from inference_worker.domain.errors import Draining, StepFailed
from inference_worker.domain.kv_blocks import KVBlocks
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.ports import Observer, Prefetcher, Sink
from inference_worker.domain.report import EngineLoad, EngineTotals, LayerReport, StepReport
from inference_worker.domain.request import Finish, FinishReason, MemoryReport, Piece, Request
from inference_worker.domain.scheduler import Scheduler, Slot
from inference_worker.domain.sequence import Sequence, kv_of
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, TreadleError
from treadle.contract.policy import WaitPolicy
from treadle.nn.model import CausalLM

log = logging.getLogger("treadle.worker")
LOGPROB_ROWS = 64  # rows of logits at once for prompt log-probabilities: 12 MiB at 49,152 tokens
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.5, 60.0
RECENT = 0.1  # weight of the newest request in the mean that retry-after is made from


class Engine:
    """One model and its batch.

    limits:     named limits; the model's own positions lower `context_tokens_max`
    memory:     Engram memory of requests that are submitted without a lease; None: none. The caller's, who closes it
    prefetcher: looks up the rows of all memories; needed where requests use any
    engram_wait_seconds_max: longest wait of a step at one Engram layer
    name:       what the model is called; part of the prefix cache's keys
    """

    def __init__(
        self, model: CausalLM, vocabulary: Vocabulary, limits: Limits, memory: EngramMemory | None = None, *,
        prefetcher: Prefetcher | None = None, engram_wait_seconds_max: float = WAIT_SECONDS_MAX, name: str = "model",
        observer: Observer | None = None,
    ) -> None:  # fmt: skip
        self.limits, self.memory, self.prefetcher = limits, memory, prefetcher
        self._engram_wait_seconds_max = WaitPolicy(engram_wait_seconds_max).wait_seconds_max  # checked there
        self._check_usable(memory)
        self.context_tokens_max = min(limits.context_tokens_max, model.config.positions_max)
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        self.totals = EngineTotals()
        self._model, self._vocabulary, self._observer = model, vocabulary, observer
        # Rows of the output matrix past the tokenizer's last id are padding: no text, no place in a token map, never chosen.
        self._token_count = min(model.config.vocab, len(vocabulary.pieces))
        self._blocks = KVBlocks(model, limits.prefix_cache_bytes_max, name)
        self._scheduler = Scheduler(limits)
        self._work = threading.Condition()  # its lock guards the scheduler's queue and the door
        self._open, self._awake = True, False
        self._mean_request_seconds = 1.0
        self._outbox: list[tuple[Sink, Piece | Exception]] = []
        self._ended: list[Lease] = []

    @property
    def load(self) -> EngineLoad:
        """How busy it is now."""
        return EngineLoad(len(self._scheduler.running), len(self._scheduler.waiting), self._blocks.byte_count)

    def submit(self, request: Request, sink: Sink, lease: Lease | None = None) -> Sequence:
        """Queue a request; its answer goes to `sink`. Any thread.

        lease: on the memory that it uses to its end, or on none; the engine releases it then, but not where this raises.
               None: the engine's own `memory`.
        Returns what `cancel` wants. Raises InvalidArgument naming the field, ResourceExhausted when the queue is full,
        DeadlineExceeded when there is no time left, Draining.
        """
        lease = Lease(self.memory) if lease is None else lease
        self._check_usable(lease.memory)
        self.check(request)
        sequence = Sequence(
            request, sink, TextStream(self._vocabulary, request.sampling.stop), list(request.prompt),
            request.tokens_max(self.context_tokens_max), lease=lease, generator=sampling.generator_of(request.sampling),
            started_ns=time.monotonic_ns(),
        )  # fmt: skip
        self._hint(sequence)  # before the engine has it: the lease is certainly held
        with self._work:
            if not self._open:
                raise Draining("the worker is stopping and takes no new requests")
            try:
                self._scheduler.enqueue(sequence, self._retry_after_seconds())
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

    def check(self, request: Request) -> None:
        """Raise InvalidArgument, naming the field, for a request that this engine cannot run; DeadlineExceeded if its time is over."""
        request.check(vocabulary=self._token_count, context_tokens_max=self.context_tokens_max)
        if request.deadline is not None:
            request.deadline.check(before="the request was queued")

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
            self._outbox.append((sequence.sink, error))
        self._hand_out()

    def close_door(self) -> None:
        """Refuse new requests from now on; those that are here go on."""
        with self._work:
            self._open = False

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
            self._hand_out()
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
        self._hand_out()
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
            positions += range(slot.first, slot.first + slot.count)
            starts.append(len(tokens))
        hidden = self._model.forward(
            torch.tensor(tokens, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64), starts,
            [kv_of(slot.sequence) for slot in slots], memory_step.before_layer if memory_step is not None else None,
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
            else:
                self._add_prompt_logprobs(slot, hidden[start : start + slot.count])
                if slot.completes:
                    rows.append(start + slot.count - 1)
                    choosing.append(sequence)
            start += slot.count
        if choosing:
            logits = self._model.logits(hidden[rows])
            for sequence, row in zip(choosing, logits, strict=True):
                self._advance(sequence, row)
        return len(choosing)

    def _advance(self, sequence: Sequence, logits: Tensor) -> None:
        """Choose a token, deliver it with its text, and end the sequence where it is over."""
        wanted = sequence.request.sampling
        token = sampling.choose(logits[: self._token_count], wanted, sequence.generator)
        sequence.tokens.append(token)
        piece = Piece([token], degraded=sequence.degraded)
        if wanted.top_logprobs is not None:
            piece.logprobs = sampling.logprobs(logits.unsqueeze(0), [token], wanted.top_logprobs, self._vocabulary)
        piece.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        ends = token in wanted.stop_token_ids or (token in self.eos_token_ids and not wanted.ignore_eos)
        if not ends:
            piece.text = sequence.text.push(token)
        reason = None
        if ends or sequence.text.stopped:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.tokens_max:
            reason = FinishReason.LENGTH
        if sequence.generated == 1 or reason is not None:
            self._blocks.publish(sequence)
        if reason is not None:
            piece.text += sequence.text.flush()
            piece.finish = Finish(reason, sequence.usage, _memory_reports(sequence))
            self._leave(sequence, reason.value)
        self._outbox.append((sequence.sink, piece))

    def _add_prompt_logprobs(self, slot: Slot, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the slot's own. hidden: [count, hidden]"""
        sequence = slot.sequence
        if not sequence.request.sampling.prompt_logprobs:
            return
        following = sequence.request.prompt[slot.first + 1 : slot.first + 1 + slot.count]
        for first in range(0, len(following), LOGPROB_ROWS):
            chosen = list(following[first : first + LOGPROB_ROWS])
            logits = self._model.logits(hidden[first : first + len(chosen)])
            top = sequence.request.sampling.top_logprobs or 0
            sequence.prompt_logprobs += sampling.logprobs(logits, chosen, top, self._vocabulary)

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
                self._outbox.append((sequence.sink, error))
        self._hand_out()

    def _fail(self, sequence: Sequence, error: Exception, outcome: str) -> None:
        if not any(running is sequence for running in self._scheduler.running):  # it had its whole answer before the step failed
            return
        self._leave(sequence, outcome)
        self._outbox.append((sequence.sink, error))

    def _leave(self, sequence: Sequence, outcome: str) -> None:
        """Free the place and the KV of a sequence that is over."""
        with self._work:
            self._scheduler.take_out(lambda other: other is sequence)
        self._let_go(sequence)
        seconds = (time.monotonic_ns() - sequence.started_ns) / 1e9
        self._mean_request_seconds += RECENT * (seconds - self._mean_request_seconds)
        self._count_end(outcome)

    def _let_go(self, sequence: Sequence) -> None:
        """Free what a sequence that is over has held; its memory only after the step, whose tickets may still read it."""
        sequence.kv = None
        self._ended.append(sequence.lease)

    def _check_usable(self, memory: EngramMemory | None) -> None:
        if memory is not None and self.prefetcher is None:
            raise InvalidArgument("engine: made without a prefetcher, so that its requests can use no Engram memory")

    def _hand_out(self) -> None:
        """Give the callers what is theirs: last, so that whoever has an answer finds it counted in totals and metrics."""
        ended, self._ended = self._ended, []
        for lease in ended:
            lease.release()
        outbox, self._outbox = self._outbox, []
        for sink, content in outbox:
            if isinstance(content, Piece):
                sink.deliver(content)
            else:
                sink.fail(content)

    def _count_end(self, outcome: str) -> None:
        if self._observer is not None:
            self._observer.ended(outcome)

    def _retry_after_seconds(self) -> float:
        """When all who wait now, and one more, should have had a place: a batch frees one each `mean / sequences_max` seconds."""
        seconds = (len(self._scheduler.waiting) + 1) * self._mean_request_seconds / self.limits.sequences_max
        return min(max(seconds, RETRY_SECONDS_MIN), RETRY_SECONDS_MAX)


def _memory_reports(sequence: Sequence) -> tuple[MemoryReport, ...]:
    memory, counts = sequence.lease.memory, sequence.memory
    return () if memory is None else (memory.report(counts.tickets, counts.tickets_in_time, counts.rows_missing),)


def _step_failed(error: Exception) -> StepFailed:
    return StepFailed(f"the engine failed in a step of this request ({type(error).__name__}); the worker's log has the details")

"""Vectors of texts from a model that was made to chat: the mean of its final hidden states, of length 1.

Owns the queue of texts and their computation, a chunk at a time between the engine's steps, so that those who wait for an
answer are delayed by one chunk at most. No Engram memory takes part. Such vectors tell texts apart; nothing trained them for
retrieval.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from inference_worker.domain.engine_port import Vector
from inference_worker.domain.errors import Draining
from inference_worker.domain.limits import EMBED_INPUTS_MAX, EMBED_TEXTS_WAITING_MAX
from treadle.contract.errors import InvalidArgument, ResourceExhausted
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM

CHUNK_TOKENS = 128  # of one text between two steps: about what a prefill chunk of the same size delays others by
RETRY_SECONDS = 1.0


@dataclass(slots=True)
class _Job:
    """One request. `place`, `kv`, `total`, `done`: of the text that is being computed."""

    texts: Sequence[Sequence[int]]
    future: Future[list[Vector]]
    vectors: list[Vector] = field(default_factory=list)
    kv: SequenceKV | None = None
    total: torch.Tensor | None = None
    done: int = 0


class Embedder:
    """Makes vectors with one model. `submit` from any thread, `advance` from the one that runs the model."""

    def __init__(self, model: CausalLM, *, vocabulary: int, context_tokens_max: int) -> None:
        """`vocabulary`: ids below it are the tokenizer's."""
        self._model, self._vocabulary, self._context_tokens_max = model, vocabulary, context_tokens_max
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()
        self._open = True

    @property
    def dimension(self) -> int:
        """Length of a vector."""
        return self._model.config.hidden

    def submit(self, texts: Sequence[Sequence[int]]) -> Future[list[Vector]]:
        """The vectors of some texts, float32 [dimension] each, in their order. Cancel the future if nobody waits any more.

        Raises InvalidArgument naming the text, ResourceExhausted when too many texts wait, Draining.
        """
        self._check(texts)
        job = _Job(texts, Future())
        with self._lock:
            if not self._open:
                raise Draining("the worker is stopping and takes no new requests")
            waiting = sum(len(other.texts) - len(other.vectors) for other in self._jobs)
            if self._jobs and waiting + len(texts) > EMBED_TEXTS_WAITING_MAX:
                raise ResourceExhausted(
                    f"{waiting} texts wait for their vectors, the limit is {EMBED_TEXTS_WAITING_MAX}", RETRY_SECONDS
                )
            self._jobs.append(job)
        return job.future

    def close(self) -> None:
        """Take nothing more, and end what waits with Draining."""
        with self._lock:
            self._open, jobs = False, list(self._jobs)
            self._jobs.clear()
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(Draining("the worker stopped before the vectors were there"))

    def advance(self) -> bool:
        """Compute one chunk of the oldest request; False if nothing waits. An error ends that request alone."""
        with self._lock:
            while self._jobs and self._jobs[0].future.cancelled():
                self._jobs.popleft()
            job = self._jobs[0] if self._jobs else None
        if job is None:
            return False
        try:
            self._compute(job)
        except Exception as error:
            self._end(job)
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(error)
            return True
        if len(job.vectors) == len(job.texts):
            self._end(job)
            if job.future.set_running_or_notify_cancel():
                job.future.set_result(job.vectors)
        return True

    @torch.inference_mode()
    def _compute(self, job: _Job) -> None:
        text = job.texts[len(job.vectors)]
        if job.kv is None:
            job.kv, job.done = self._model.new_kv(), 0
            job.total = torch.zeros(self.dimension, dtype=torch.float64)
            job.kv.reserve(len(text))
        assert job.total is not None
        chunk = torch.tensor(text[job.done : job.done + CHUNK_TOKENS], dtype=torch.int64)
        positions = torch.arange(job.done, job.done + len(chunk), dtype=torch.int64)
        hidden = self._model.forward(chunk, positions, [0, len(chunk)], [job.kv])
        job.total += hidden.double().sum(dim=0)
        job.done += len(chunk)
        if job.done == len(text):
            job.vectors.append((job.total / job.total.norm()).float().numpy())
            job.kv = job.total = None

    def _end(self, job: _Job) -> None:
        with self._lock:
            if self._jobs and self._jobs[0] is job:
                self._jobs.popleft()

    def _check(self, texts: Sequence[Sequence[int]]) -> None:
        if not 1 <= len(texts) <= EMBED_INPUTS_MAX:
            raise InvalidArgument(f"inputs: 1 to {EMBED_INPUTS_MAX} texts, got {len(texts)}")
        for place, text in enumerate(texts):
            if not 1 <= len(text) <= self._context_tokens_max:
                raise InvalidArgument(f"inputs[{place}].token_ids: 1 to {self._context_tokens_max} tokens, got {len(text)}")
            if min(text) < 0 or max(text) >= self._vocabulary:
                raise InvalidArgument(f"inputs[{place}].token_ids: ids are 0 to {self._vocabulary - 1}, got {max(text)}")

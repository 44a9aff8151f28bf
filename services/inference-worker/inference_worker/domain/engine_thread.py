"""The one thread that runs the engine's steps, and the bridge between it and asyncio.

Owns the thread and the streams of answers. Everything that computes happens on the thread; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from collections.abc import Sequence as Texts
from dataclasses import dataclass

from inference_worker.domain.cached_blocks import BlockChanges
from inference_worker.domain.engine import Engine
from inference_worker.domain.engine_port import EngineFacts, Vector
from inference_worker.domain.errors import Draining, StepFailed
from inference_worker.domain.ports import LayerFigures
from inference_worker.domain.report import EngineLoad, EngineTotals
from inference_worker.domain.request import Piece, Request
from inference_worker.domain.request_leases import Leases
from inference_worker.domain.sequence import Sequence

log = logging.getLogger("treadle.worker")
IDLE_SECONDS_MAX = 1.0  # an idle thread looks up this often even if nobody wakes it


class AnswerStream:
    """The pieces of one answer, for asyncio. Pieces that nobody has taken yet are merged: a slow reader costs no queue."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._lock, self._changed = loop, threading.Lock(), asyncio.Event()
        self._piece: Piece | None = None
        self._error: Exception | None = None

    def deliver(self, piece: Piece) -> None:
        """See Sink; any thread."""
        with self._lock:
            if self._piece is not None:
                self._piece.add(piece)
                return
            self._piece = piece
        self._wake()

    def fail(self, error: Exception) -> None:
        """See Sink; any thread."""
        with self._lock:
            self._error = error
        self._wake()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Pieces as they come, the last one with `finish`. Raises the error that ended the request."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            with self._lock:
                piece, self._piece = self._piece, None
                error = self._error
            if piece is not None:
                yield piece
                if piece.finish is not None:
                    return
            if error is not None:
                raise error

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads any more, and the thread is being stopped
            self._loop.call_soon_threadsafe(self._changed.set)


@dataclass(frozen=True, slots=True)
class EmbeddedGeneration:
    """See Generation."""

    engine: Engine
    stream: AnswerStream
    sequence: Sequence

    def pieces(self) -> AsyncIterator[Piece]:
        """See Generation."""
        return self.stream.pieces()

    def cancel(self) -> None:
        """See Generation."""
        self.engine.cancel(self.sequence)


class EngineThread:
    """Runs an engine: the RunningEngine of the embedded one. A context manager; leaving it ends what still runs, with Draining."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="treadle-engine", daemon=True)

    def __enter__(self) -> EngineThread:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping = True
        self.engine.close_door()
        self.engine.wake()
        self._thread.join()
        self.engine.embedder.close()
        self.engine.abandon(Draining("the worker stopped before the answer was whole"))

    @property
    def facts(self) -> EngineFacts:
        """See RunningEngine."""
        engine = self.engine
        return EngineFacts(
            "embedded", "", engine.dtype, engine.context_tokens_max, engine.eos_token_ids, engine.limits.sequences_max,
            engine.limits.requests_waiting_max, engine.block_tokens, engine.embedder.dimension,
        )  # fmt: skip

    @property
    def load(self) -> EngineLoad:
        """See RunningEngine."""
        return self.engine.load

    @property
    def totals(self) -> EngineTotals:
        """See RunningEngine."""
        return self.engine.totals

    @property
    def wait_seconds_predicted(self) -> float:
        """See RunningEngine."""
        return self.engine.wait_seconds_predicted

    @property
    def draining(self) -> bool:
        """See RunningEngine."""
        return self.engine.draining

    def layer_figures(self) -> Mapping[int, LayerFigures]:
        """See RunningEngine."""
        prefetcher = self.engine.prefetcher
        return prefetcher.layer_figures() if prefetcher is not None else {}

    def check(self, request: Request) -> None:
        """See RunningEngine."""
        self.engine.check(request)

    def begin(self, request: Request, leases: Leases) -> EmbeddedGeneration:
        """See RunningEngine."""
        stream, sequence = self.submit(request, leases)
        return EmbeddedGeneration(self.engine, stream, sequence)

    def watch_blocks(self) -> AsyncGenerator[BlockChanges, None]:
        """See RunningEngine."""
        return self.engine.block_log.watch()

    def submit(self, request: Request, leases: Leases | None = None) -> tuple[AnswerStream, Sequence]:
        """Start a generation from the event loop; its stream, and what `engine.cancel` wants. Leases and errors as in `Engine.submit`."""
        stream = AnswerStream(asyncio.get_running_loop())
        if leases is None:
            return stream, self.engine.submit(request, stream)
        return stream, self.engine.submit(request, stream, leases.engram, leases.prefix)

    async def embed(self, texts: Texts[Texts[int]]) -> list[Vector]:
        """See RunningEngine; they are made between the steps."""
        made = self.engine.embedder.submit(texts)
        self.engine.wake()
        return await asyncio.wrap_future(made)

    def _run(self) -> None:
        while not self._stopping:
            try:
                worked = self.engine.step() is not None
                worked = self.engine.embedder.advance() or worked
            except Exception as error:  # outside a step's own care: nobody may be left waiting for a thread that is gone
                log.exception("the engine failed between steps")
                self.engine.abandon(StepFailed(f"the engine failed ({type(error).__name__}); the worker's log has the details"))
                worked = False
            if not worked:
                self.engine.wait_for_work(IDLE_SECONDS_MAX)

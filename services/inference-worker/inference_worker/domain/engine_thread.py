"""The one thread that runs the engine's steps, and the bridge between it and asyncio.

Owns the thread and the streams of answers. Everything that computes happens on the thread; the event loop only waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator

from inference_worker.domain.engine import Engine
from inference_worker.domain.errors import Draining, StepFailed
from inference_worker.domain.lease import Lease
from inference_worker.domain.request import Piece, Request
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


class EngineThread:
    """Runs an engine. Use as a context manager; leaving it ends what still runs, with Draining."""

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
        self.engine.abandon(Draining("the worker stopped before the answer was whole"))

    def submit(self, request: Request, lease: Lease | None = None) -> tuple[AnswerStream, Sequence]:
        """Start a generation from the event loop; its stream, and what `engine.cancel` wants. Lease and errors as in `Engine.submit`."""
        stream = AnswerStream(asyncio.get_running_loop())
        return stream, self.engine.submit(request, stream, lease)

    def _run(self) -> None:
        while not self._stopping:
            try:
                worked = self.engine.step() is not None
            except Exception as error:  # outside a step's own care: nobody may be left waiting for a thread that is gone
                log.exception("the engine failed between steps")
                self.engine.abandon(StepFailed(f"the engine failed ({type(error).__name__}); the worker's log has the details"))
                worked = False
            if not worked:
                self.engine.wait_for_work(IDLE_SECONDS_MAX)

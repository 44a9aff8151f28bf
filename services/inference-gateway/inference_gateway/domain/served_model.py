"""Which model is served: follows the worker, and loads the tokenizer that belongs to what it runs.

Owns the poll of the worker's status and the pairing of model and tokenizer. A worker that is absent, restarts or changes
its model is followed; requests are refused rather than encoded with a tokenizer that may be another model's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from inference_gateway.domain.generation import WorkerStatus
from inference_gateway.domain.memories import Memory
from inference_gateway.domain.ports import EncoderSource, InThread, PromptEncoder, Worker
from treadle.contract.errors import DeadlineExceeded, TreadleError

log = logging.getLogger("treadle.gateway.worker")
RETRY_SECONDS_FIRST = 0.1
RETRY_SECONDS_MAX = 3.0  # a worker that comes back is found within that
CONFIRM_SECONDS_MAX = 1.0  # how long a request waits for a worker that was just lost before it is refused


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model under the name that requests use, with the tokenizer that was checked to be its own, and its memories."""

    name: str
    encoder: PromptEncoder
    context_tokens_max: int
    memories: tuple[Memory, ...] = ()
    since_unix: int = field(default_factory=lambda: int(time.time()))


class WorkerWatch:
    """Knows what the worker runs, from polls of its status and from calls that failed."""

    def __init__(
        self, worker: Worker, source: EncoderSource, in_thread: InThread, *, interval_seconds: float,
        model_name: str | None = None, tokenizer_dir: Path | None = None,
    ) -> None:  # fmt: skip
        """`model_name` and `tokenizer_dir` stand in for what the worker says of itself."""
        self._worker, self._source, self._in_thread = worker, source, in_thread
        self._interval_seconds, self._model_name, self._tokenizer_dir = interval_seconds, model_name, tokenizer_dir
        self._model: ServedModel | None = None
        self._status: WorkerStatus | None = None
        self._trouble = "the worker has not answered yet"
        self._sooner = asyncio.Event()
        self._polled = asyncio.Event()
        self.heard: Callable[[WorkerStatus], None] = _nothing
        """Called with each status that came."""
        self.unheard: Callable[[], None] = _nothing_came
        """Called when none came in time."""

    @property
    def status(self) -> WorkerStatus | None:
        """What the worker said at the last good poll."""
        return self._status

    @property
    def last_known(self) -> ServedModel | None:
        """The model of the last good poll, even if the worker is away now."""
        return self._model

    def not_ready_because(self) -> str | None:
        """Why a request would be refused now; None: the worker takes requests."""
        if self._trouble:
            return self._trouble
        return "the worker is draining" if self.draining else None

    @property
    def draining(self) -> bool:
        """Whether the worker is there, and said that it takes no new requests."""
        return not self._trouble and self._status is not None and self._status.draining

    def look_again(self) -> None:
        """A call found that the worker has changed: poll now, not at the next time."""
        self._sooner.set()

    def lost(self) -> None:
        """A call found the worker away: what it runs must be confirmed before the next request is encoded."""
        self._trouble = self._trouble or "the worker cannot be reached"
        self._sooner.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        retry_seconds = RETRY_SECONDS_FIRST
        while True:
            await self.poll()
            self._polled.set()
            self._polled = asyncio.Event()
            pause_seconds = retry_seconds if self._trouble else self._interval_seconds
            retry_seconds = min(RETRY_SECONDS_MAX, retry_seconds * 2) if self._trouble else RETRY_SECONDS_FIRST
            await _wait(self._sooner, pause_seconds)
            self._sooner.clear()

    async def poll(self) -> None:
        """Ask once, and load the tokenizer if the worker runs something else than before."""
        try:
            status = await self._worker.status(max(1.0, self._interval_seconds))
            if self._model is None or self._status is None or _identity(status) != _identity(self._status):
                self._model = await self._load(status)
            elif self._model.memories != status.memories:  # they come and go while the model stays
                self._model = replace(self._model, memories=status.memories)
            if self._trouble:
                log.info("worker ready", extra={"model": self._model.name, "worker_pid": status.pid})
            self._status, self._trouble = status, ""
            self.heard(status)
        except TreadleError as error:
            self._note(f"{error}", error)
            if isinstance(error, DeadlineExceeded):
                self.unheard()
        except Exception as error:  # the poll must outlive its own bugs: without it no worker is ever found again
            log.exception("bug in the worker's poll")
            self._note("internal error; the gateway's log has the details", error)

    async def _load(self, status: WorkerStatus) -> ServedModel:
        folder = self._tokenizer_dir or status.model_dir
        encoder = await self._in_thread(lambda: self._source(folder, status.tokenizer_digest))
        return ServedModel(self._model_name or status.model, encoder, status.context_tokens_max, status.memories)

    def _note(self, trouble: str, error: Exception) -> None:
        if trouble != self._trouble:
            log.warning("worker not ready", extra={"error": type(error).__name__, "reason": trouble})
        self._trouble = trouble

    async def next_poll(self, seconds: float) -> None:
        """Have the worker asked now, and wait for that up to `seconds`."""
        polled = self._polled
        self._sooner.set()
        await _wait(polled, seconds)


def _identity(status: WorkerStatus) -> tuple[object, ...]:
    return (status.model, status.model_dir, status.tokenizer_digest, status.context_tokens_max)


def _nothing(status: WorkerStatus) -> None:
    return


def _nothing_came() -> None:
    return


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return

"""Has the process that runs the model open a version before its first request, so that no step waits for it, and lets it go."""

from __future__ import annotations

import time

from inference_worker.adapters.vllm_process import VllmProcess, error_of_answer
from inference_worker.domain.ports import RowHandle
from inference_worker.settings import EngramTransport, Settings
from treadle.contract.errors import DeadlineExceeded

PAUSE_SECONDS = 0.02  # between two questions whether it is open
OPEN, OPENING = "open", "opening"


class VllmMemories:
    """Opens versions in the engine's process. Called from threads that may wait."""

    def __init__(self, process: VllmProcess, settings: Settings) -> None:
        self._process = process
        self._transport, self._seconds_max = settings.engram_transport, settings.engram_open_seconds_max

    def open(self, handle: RowHandle) -> str:
        """Open the handle's version there; how its rows come. Raises what kept it from opening, DeadlineExceeded."""
        name, ends = f"{handle.model.name}@{handle.version}", time.monotonic() + self._seconds_max
        while (answer := self._ask(name)) == OPENING:
            if time.monotonic() > ends:
                raise DeadlineExceeded(f"the engine's process has not opened {name} within {self._seconds_max:g} s")
            time.sleep(PAUSE_SECONDS)
        if answer != OPEN:
            raise error_of_answer(answer)
        return str(handle.transport) if self._transport is EngramTransport.AUTO else self._transport.value

    def close(self, handle: RowHandle) -> None:
        """The handle's version is needed no more. Waits for nothing: the engine closes it when no request uses it."""
        self._process.tell("close_engram_memory", f"{handle.model.name}@{handle.version}")

    def _ask(self, name: str) -> str:
        try:
            return self._process.ask("open_engram_memory", name)
        except DeadlineExceeded:
            self._process.tell("close_engram_memory", name)  # it may answer "open" yet, to nobody
            raise

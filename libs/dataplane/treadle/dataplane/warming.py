"""Enters the pages of mapped tables in the background, so that a mapping is usable at once and soon has no page faults left.

Owns one thread, which lives while there is something to enter. What is mapped, and when it is unmapped, belongs to the callers: a
span keeps its mapping alive until it is entered or dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.contract.warm_state import WarmState
from treadle.kernels.pages import enter_pages

log = logging.getLogger("treadle.dataplane")
STEP_BYTES = 8 << 20  # entered at a time: milliseconds, after which a close is heard
CLOSE_SECONDS = 5.0  # at the end, how long a step may take

Spans = Sequence[NDArray[np.uint8]]


class Warming:
    """How far the pages of one set of tables are. No spans: tables on disk, which stay cold."""

    def __init__(self, spans: Spans) -> None:
        self._spans = deque(spans)
        self.bytes_total, self.bytes_entered = sum(span.nbytes for span in spans), 0
        self._given_up = not spans

    @property
    def state(self) -> WarmState:
        """COLD where pages are not entered: on disk, on an old kernel, or dropped."""
        if self._given_up:
            return WarmState.COLD
        return WarmState.WARM if self.bytes_entered == self.bytes_total else WarmState.WARMING

    def drop(self) -> None:
        """Let go of what is not entered yet, at most one step later."""
        self._given_up = self._given_up or self.bytes_entered != self.bytes_total
        self._spans.clear()

    def step(self) -> int:
        """Enter up to STEP_BYTES; how many; 0 at the end."""
        try:
            span = self._spans.popleft()
        except IndexError:
            return 0
        piece, rest = span[:STEP_BYTES], span[STEP_BYTES:]
        try:
            if not enter_pages(piece):
                self.drop()
                return 0
        except OSError as error:
            log.warning("pages cannot be entered; they will be as they are touched", extra={"reason": str(error)})
            self.drop()
            return 0
        if rest.nbytes and not self._given_up:
            self._spans.appendleft(rest)
        self.bytes_entered += piece.nbytes
        return piece.nbytes


class PageWarmer:
    """Warms tables one after the other. Thread-safe."""

    def __init__(self, *, bytes_per_second: int = 0) -> None:
        """bytes_per_second: at most; 0: as fast as it goes. Raises InvalidArgument."""
        if bytes_per_second < 0:
            raise InvalidArgument(f"bytes_per_second: at least 0, got {bytes_per_second}")
        self._bytes_per_second = bytes_per_second
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._queue: deque[Warming] = deque()
        self._thread: threading.Thread | None = None

    def warm(self, spans: Spans) -> Warming:
        """Begin to enter `spans`; returns at once."""
        warming = Warming(spans)
        with self._lock:
            if self._closed.is_set():
                warming.drop()
            elif spans:
                self._queue.append(warming)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="treadle-warm", daemon=True)
                    self._thread.start()
        return warming

    def close(self) -> None:
        """Stop, and let go of all spans."""
        self._closed.set()
        with self._lock:
            thread = self._thread
            for warming in self._queue:
                warming.drop()
        if thread is not None and thread is not threading.current_thread():  # a garbage collection may close us from within
            thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue or self._closed.is_set():
                    self._queue.clear()
                    self._thread = None
                    return
                warming = self._queue[0]
            entered = warming.step()
            if not entered:
                with self._lock:
                    self._queue.popleft()
            elif self._bytes_per_second:
                self._closed.wait(entered / self._bytes_per_second)

"""What a process of the benchmark's own says, a line at a time, within a time."""

from __future__ import annotations

import os
import select
import time
from typing import IO, Any

READ_BYTES = 1 << 16


class Lines:
    """The lines of a process's output. Nobody else may read from that pipe: lines that came together are kept here."""

    def __init__(self, pipe: IO[Any] | None) -> None:
        if pipe is None:
            raise ValueError("the process was started without a pipe for its output")
        self._file, self._kept = pipe.fileno(), b""

    def within(self, seconds: float) -> str | None:
        """The next line without its end; None where there was none in time. Raises EOFError where there will be none."""
        until = time.monotonic() + seconds
        while b"\n" not in self._kept:
            if not select.select([self._file], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            if not (read := os.read(self._file, READ_BYTES)):
                raise EOFError("its output has ended")
            self._kept += read
        line, _, self._kept = self._kept.partition(b"\n")
        return line.decode()

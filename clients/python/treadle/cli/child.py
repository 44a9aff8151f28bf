"""One spawned process: its pipes, its log, its last words, its end.

Owns spawning (own session, dies with us), reading what it prints without ever blocking, and killing all of it. Does not
decide when it should run (supervisor).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from treadle.cli.process_group import kill_group
from treadle.cli.process_mark import ProcessMark
from treadle.cli.service_log import ServiceLog

TETHER = Path(__file__).with_name("tether.py")
TAIL_LINES = 12  # what is shown of a child that died: a traceback's end fits, the screen stays readable
LINE_BYTES_MAX = 64 << 10  # a longer line is cut in pieces
READ_BYTES = 64 << 10  # what a pipe holds on Linux

Lines = Callable[[list[bytes]], None]


class Child:
    """A running program, spawned at once.

    argv[0] is an absolute path. Whole lines of standard output go to `on_output`, of standard error to `on_error`; both
    also to `log` unless told otherwise, and the last TAIL_LINES of either are kept.
    """

    def __init__(
        self, argv: Sequence[str], log: ServiceLog, *, environment: Mapping[str, str] | None = None,
        on_output: Lines = lambda lines: None, on_error: Lines = lambda lines: None, log_output: bool = True,
    ) -> None:  # fmt: skip
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.returncode: int | None = None
        self.started_seconds = time.monotonic()
        self._log = log
        self._process = subprocess.Popen(
            tethered(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=dict(os.environ if environment is None else environment), start_new_session=True,
        )  # fmt: skip
        self.pid = self._process.pid
        self.mark = ProcessMark.of(self.pid)
        self.pidfd = os.pidfd_open(self.pid)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._output = _LinePipe(self._process.stdout, self._sink(on_output, log_output))
        self._error = _LinePipe(self._process.stderr, self._sink(on_error, True))

    def pipes(self) -> list[tuple[int, Callable[[], bool]]]:
        """The file descriptors to select on, each with what reads it; that is False once the pipe is at its end."""
        return [(pipe.fileno(), pipe.read) for pipe in (self._output, self._error)]

    def signal(self, number: signal.Signals) -> None:
        """Signal the process alone."""
        if self.returncode is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process and whatever it started in its session."""
        if self.returncode is None:  # not reaped, so its number still means it
            kill_group(self.pid)

    def reap(self) -> int:
        """After its end: kill what it left behind, read its last words, close everything; the return code."""
        self.kill()
        for pipe in (self._output, self._error):
            pipe.drain()
        self.returncode = self._process.wait()
        os.close(self.pidfd)
        return self.returncode

    def last_words(self) -> str:
        """Its last lines, indented."""
        return "\n".join(f"  {line}" for line in self.tail)

    def _sink(self, forward: Lines, logged: bool) -> Lines:
        def take(lines: list[bytes]) -> None:
            if logged:
                self._log.write(b"".join(line + b"\n" for line in lines))
            self.tail.extend(line.decode(errors="replace") for line in lines)
            forward(lines)

        return take


class _LinePipe:
    """The reading end of a pipe, as lines."""

    def __init__(self, pipe: IO[bytes], sink: Lines) -> None:
        self._pipe, self._sink, self._rest = pipe, sink, b""
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        return self._pipe.fileno()

    def read(self) -> bool:
        """Take what is there now; False at the end."""
        try:
            data = os.read(self._pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return True
        if data:
            self._take(data)
        return bool(data)

    def drain(self) -> None:
        """Take what is left without waiting for more, and close."""
        while not self._pipe.closed:
            try:
                data = os.read(self._pipe.fileno(), READ_BYTES)
            except BlockingIOError:  # a process that left the session holds the other end
                data = b""
            if not data:
                self._pipe.close()
            self._take(data)
        if self._rest:
            self._take(b"\n")

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines.append(self._rest)
            self._rest = b""
        if lines:
            self._sink(lines)


def tethered(argv: Sequence[str]) -> list[str]:
    """The command that runs `argv` (an absolute path first) as a process that dies with this one."""
    return [sys.executable, "-I", "-S", str(TETHER), str(os.getpid()), *argv]


def describe_exit(returncode: int) -> str:
    """`exit code 2` or `killed by SIGKILL`."""
    if returncode >= 0:
        return f"exit code {returncode}"
    return f"killed by {signal.Signals(-returncode).name}"

"""Which process is meant: a pid with its start time, so that a pid used again by the kernel is never signalled."""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass

import psutil

CREATED_SLACK_SECONDS = 2.0  # start times are told relative to the boot, which a clock step moves; a pid comes round far later


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A pid and when it started, seconds since the epoch."""

    pid: int
    created_at_seconds: float

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        """The mark of a process that runs now; psutil.NoSuchProcess if there is none."""
        return cls(pid, float(psutil.Process(pid).create_time()))

    def alive(self) -> bool:
        """True while the process runs; a zombie does not."""
        try:
            process = psutil.Process(self.pid)
            created = float(process.create_time())
            return abs(created - self.created_at_seconds) < CREATED_SLACK_SECONDS and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    def send(self, number: signal.Signals) -> bool:
        """Signal the process; False if it is gone."""
        fd = self._open()
        if fd is None:
            return False
        try:
            signal.pidfd_send_signal(fd, number)
        except ProcessLookupError:
            return False
        finally:
            os.close(fd)
        return True

    def wait_gone(self, seconds: float) -> bool:
        """Wait for its end, at most `seconds`; True once it is gone."""
        fd = self._open()
        if fd is None:
            return True
        try:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(fd)

    def _open(self) -> int | None:
        """A pidfd that means this process and no later one, or None."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return None
        if self.alive():  # asked after the open: the fd cannot come to mean another process
            return fd
        os.close(fd)
        return None

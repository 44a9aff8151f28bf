"""What services print, kept on disk within a bound, and read back.

Owns the files in `logs/`: appending, rotating, the last lines, following. Does not know what the lines mean.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

LOG_BYTES_MAX = 8 << 20  # then the file becomes `.1`, and the `.1` before it goes: at most twice this for each service
FOLLOW_SECONDS = 0.2  # how often a followed file is looked at


class ServiceLog:
    """Appends to `<folder>/<service>.log`. The folder is made; files are readable by the user and the group."""

    def __init__(self, folder: Path, service: str, bytes_max: int = LOG_BYTES_MAX) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{service}.log"
        self._bytes_max = bytes_max
        self._fd = self._open()

    def write(self, data: bytes) -> None:
        """Append whole lines."""
        if self._bytes + len(data) > self._bytes_max and self._bytes:
            os.close(self._fd)
            self.path.replace(self.path.with_suffix(".log.1"))
            self._fd = self._open()
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]
        self._bytes += len(data)

    def close(self) -> None:
        """Close the file; what was written stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> int:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        self._bytes = os.fstat(fd).st_size
        return fd


class LogFollower:
    """A log as it is now, and whole lines that are appended from now on, through rotations; `last` and `lines` lose none and give none twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb") if path.exists() else None
        self._rest = b""
        if self._file:
            self._file.seek(0, os.SEEK_END)

    def last(self, count: int) -> list[str]:
        """The last `count` lines before those that `lines` gives, also from the rotated file where this one has fewer; none if there is no file."""
        before, file = self._path.with_suffix(".log.1"), self._file
        text = b""
        if before.exists() and (file is None or not os.path.samestat(os.fstat(file.fileno()), before.stat())):
            text = before.read_bytes()
        if file is not None:
            text += os.pread(file.fileno(), file.tell(), 0)
        *whole, self._rest = text.split(b"\n")
        return [line.decode(errors="replace") for line in whole[max(0, len(whole) - count) :]]

    def lines(self) -> Iterator[str]:
        """What came since the last call."""
        yield from self._read()
        if self._moved():
            if self._file:
                self._file.close()
            self._file = self._path.open("rb")
            yield from self._read()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()

    def _moved(self) -> bool:
        if not self._path.exists():
            return False
        return self._file is None or os.fstat(self._file.fileno()).st_ino != self._path.stat().st_ino

    def _read(self) -> Iterator[str]:
        if self._file is None:
            return
        *whole, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")


def follow(
    followers: Mapping[str, LogFollower], stop: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[str, str]]:
    """(service, line) as lines are appended to any of the logs, until `stop()`."""
    while not stop():
        for service, follower in followers.items():
            for line in follower.lines():
                yield service, line
        wait(FOLLOW_SECONDS)

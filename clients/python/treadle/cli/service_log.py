"""What services print, kept on disk within a bound, and read back.

Owns the files in `logs/`: appending, rotating, the last lines, following. Does not know what the lines mean.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
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


def last_lines(path: Path, count: int) -> list[str]:
    """The last `count` lines, also from the rotated file where the present one has fewer; none if there is no file."""
    lines: deque[str] = deque(maxlen=count)
    for part in (path.with_suffix(".log.1"), path):
        if part.exists():
            with part.open(encoding="utf-8", errors="replace") as file:
                lines.extend(line.rstrip("\n") for line in file)
    return list(lines)


class LogFollower:
    """Yields whole lines that are appended to a log from now on, through rotations."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb") if path.exists() else None
        self._rest = b""
        if self._file:
            self._file.seek(0, os.SEEK_END)

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
    paths: dict[str, Path], stop: Callable[[], bool], wait: Callable[[float], None] = time.sleep
) -> Iterator[tuple[str, str]]:
    """(service, line) as lines are appended to any of `paths`, until `stop()`."""
    followers = {service: LogFollower(path) for service, path in paths.items()}
    try:
        while not stop():
            for service, follower in followers.items():
                for line in follower.lines():
                    yield service, line
            wait(FOLLOW_SECONDS)
    finally:
        for follower in followers.values():
            follower.close()

"""What a look at the machine says, and the machine as it is looked at.

A check is a function from Host to Finding. It reads files and never changes anything.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

PROGRAM_SECONDS = 10.0  # nvidia-smi takes seconds where the driver is not kept loaded


class Level(StrEnum):
    """ok: as good as it gets. info: worth knowing. warn: treadle will be slower, or something will not work."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Finding:
    """What is there, what it means for the fabric, how to get more ("" where there is nothing to do)."""

    name: str
    found: str
    means: str
    advice: str = ""
    level: Level = Level.OK


@dataclass(frozen=True, slots=True)
class Host:
    """The machine: its /proc, /sys and /dev under `root`, its programs along `search_path` (None: the PATH)."""

    root: Path = Path("/")
    search_path: str | None = None

    def path(self, name: str) -> Path:
        """The path `name` (absolute) under the root."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str:
        """The text of a file without white space at its ends; "" if it is not there or may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, folder: str, pattern: str = "*") -> list[str]:
        """Sorted names in a folder; none if it is not there."""
        return sorted(path.name for path in self.path(folder).glob(pattern))

    def program(self, name: str, *arguments: str) -> str | None:
        """Standard output of a program, or None if it is not there, fails or does not end."""
        found = shutil.which(name, path=self.search_path)
        if found is None:
            return None
        try:
            run = subprocess.run([found, *arguments], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        return run.stdout.strip()

    def free_bytes(self, folder: str) -> tuple[int, int] | None:
        """(size, free) of the file system of a folder, or None."""
        try:
            status = os.statvfs(self.path(folder))
        except OSError:
            return None
        return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def gib(count: float) -> str:
    """Bytes as GiB, or MiB below one."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"

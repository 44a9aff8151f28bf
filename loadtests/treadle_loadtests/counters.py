"""Counters of a client in a file that outlives it: whoever is killed has still said what it saw."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

FIELDS = (
    "gathers", "rows", "wrong_rows", "failed", "late", "opens", "open_failed", "swaps", "slowest_call_us", "slowest_open_us",
    "starts", "last_seen_ms", "version_head", "oldest_head",
)  # fmt: skip
LARGEST = frozenset(
    {"slowest_call_us", "slowest_open_us", "last_seen_ms", "version_head", "oldest_head"}
)  # of several clients the largest counts, not the sum
REASON_BYTES_MAX = 64 << 10  # of what went wrong, in words


class Counters:
    """int64 for each of FIELDS, shared by whoever maps the file; one writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, 8 * len(FIELDS))
            memory = mmap.mmap(descriptor, 8 * len(FIELDS))
        finally:
            os.close(descriptor)
        self._values = np.frombuffer(memory, dtype=np.int64)

    def add(self, field: str, count: int = 1) -> None:
        """Count."""
        self._values[FIELDS.index(field)] += count

    def largest(self, field: str, value: int) -> None:
        """Remember the largest."""
        place = FIELDS.index(field)
        self._values[place] = max(int(self._values[place]), value)

    def reset(self, field: str) -> None:
        """Forget what was the largest so far."""
        self._values[FIELDS.index(field)] = 0

    def use(self, version: str, oldest: str = "") -> None:
        """Remember which version is read now, and which is the oldest that still is, where there may be several."""
        self._values[FIELDS.index("version_head")] = version_head(version)
        self._values[FIELDS.index("oldest_head")] = version_head(oldest or version)

    def read(self) -> dict[str, int]:
        """All of them, now."""
        return {field: int(value) for field, value in zip(FIELDS, self._values, strict=True)}

    def say(self, reason: str) -> None:
        """Write down why something went wrong; beyond REASON_BYTES_MAX nothing more."""
        with self.reasons_path.open("a") as reasons:
            if reasons.tell() < REASON_BYTES_MAX:
                reasons.write(reason.replace("\n", " ") + "\n")

    @property
    def reasons_path(self) -> Path:
        """Where reasons are written."""
        return self.path.with_suffix(".reasons")

    def reasons(self) -> list[str]:
        """What went wrong, in words."""
        return self.reasons_path.read_text().splitlines() if self.reasons_path.exists() else []


def version_head(version: str) -> int:
    """The first digits of a version as a number."""
    return int(version[:15], 16)


def totals(each: list[dict[str, int]]) -> dict[str, int]:
    """Of several clients together."""
    return {
        field: max((one[field] for one in each), default=0) if field in LARGEST else sum(one[field] for one in each)
        for field in FIELDS
    }

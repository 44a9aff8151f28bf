"""What a process of the benchmark's own says, a line at a time, within a time."""

from __future__ import annotations

import select
from typing import IO


def line_within(stream: IO[str], seconds: float) -> str | None:
    """The next line; empty where the process has ended, None where it said nothing in time. It must write whole lines."""
    readable, _, _ = select.select([stream], [], [], seconds)
    return stream.readline() if readable else None

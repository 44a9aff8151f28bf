"""Whether the first gather of a row meets a page fault."""

from __future__ import annotations

from enum import StrEnum


class WarmState(StrEnum):
    """Of a table's pages in one process."""

    UNKNOWN = "unknown"  # its tables are not in this process
    COLD = "cold"  # mapped; pages are entered as they are touched
    WARMING = "warming"  # pages are being entered in the background
    WARM = "warm"  # all pages are entered

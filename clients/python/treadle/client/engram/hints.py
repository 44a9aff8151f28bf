"""Hints: tokens whose rows will be wanted, told long before. Rows are brought near while nothing with a deadline waits.

What is near depends on where rows lie. In memory whose pages are all entered nothing is left to bring nearer: a lookup started early
(`prefetch` without deadlines) is what helps there, and a hint does nothing. Where pages are not entered yet, or lie on a disk, a hint
reads the rows into a scratch buffer, which nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np

from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.contract import ResourceExhausted, Windows
from treadle.dataplane import DeadlineQueue
from treadle.dataplane.slicing import slice_windows

HINT_TOKENS = 64  # of one ticket: its scratch buffer is some hundred KiB, and a queue takes `hints_max` of them

StartHint = Callable[[Windows, Rows], LayerTicket]


@runtime_checkable
class TakesHints(Protocol):
    """A source of rows that can bring them nearer."""

    @property
    def wants_hints(self) -> bool:
        """False where nothing is left to bring nearer."""

    def hint(self, windows: Windows, queue: DeadlineQueue | None = None) -> int:
        """Start bringing the rows of `windows` near; how many of the first tokens are taken, 0 where that is of no use or full."""


def start_hints(windows: Windows, columns: int, row_bytes: int, starts: list[StartHint]) -> int:
    """Cut `windows` into tickets without a deadline, one for each of `starts` (a layer each); tokens taken before the queue was full."""
    for first in range(0, windows.token_count, HINT_TOKENS):
        last = min(first + HINT_TOKENS, windows.token_count)
        piece = slice_windows(windows, first, last)
        for start in starts:
            try:
                start(piece, np.empty((last - first, columns, row_bytes), dtype=np.uint8))
            except ResourceExhausted:  # a hint may be left: the lookup itself comes in any case
                return first
    return windows.token_count

"""What tokens find in a layer's dictionary, in C++: one call for keys, search, rows and the guard, without the GIL.

Owns the step from checked arrays to the extension module. Docstrings with shapes and errors stand in `entry_states_reference`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.kernels import _native, arguments
from treadle.kernels.entry_states_arguments import (
    EntryArrays,
    FoundEntries,
    check_entries,
    check_merge,
    check_queries,
    check_rows,
)
from treadle.kernels.nearest_arguments import nothing_found

__all__ = ["EntryStates", "merge_states"]


class EntryStates:
    """One layer's dictionary, looked up; see `entry_states_reference.EntryStates`."""

    def __init__(self, entries: EntryArrays) -> None:
        """See `entry_states_reference.EntryStates`. Raises InvalidArgument."""
        check_entries(entries)
        self.entries = entries
        try:
            self._native = _native.EntryStates(
                entries.keys, entries.key_scales, entries.list_keys, entries.list_starts, entries.lists_probed, entries.states,
                entries.state_scales, entries.log_z, entries.thresholds, entries.heads_of, entries.whitening,
            )  # fmt: skip
        except ValueError as error:
            raise arguments.not_read(str(error)) from error

    def find(self, queries: NDArray[np.float32], rows: NDArray[np.int64] | None = None) -> FoundEntries:
        """What the tokens `rows` find; see `entry_states_reference.EntryStates.find`."""
        entries = self.entries
        found = FoundEntries.empty(entries, len(queries) if rows is None else len(rows))
        state = self._native.find(queries, rows, found.states, found.log_z, found.cosines, found.outside)
        if state == _native.DONE:
            return found
        if state == _native.UNREADABLE:
            raise arguments.unreadable("keys, list_keys, states, their scales, log_z, whitening")
        if state == _native.NOTHING_FOUND:
            raise nothing_found()
        check_queries(queries, entries.heads, entries.head_dim)  # names what is wrong
        check_rows(rows, len(queries))
        raise arguments.not_read("queries, rows")


def merge_states(
    a: NDArray[np.float32], log_z: NDArray[np.float32], rows: NDArray[np.int64] | None,
    other: NDArray[np.float32], other_log_z: NDArray[np.float32],
) -> None:  # fmt: skip
    """Merge attention states over other keys into those of some tokens; see `entry_states_reference.merge_states`."""
    if _native.merge_states(a, log_z, rows, other, other_log_z) != _native.DONE:
        check_merge(a, log_z, rows, other, other_log_z)  # names what is wrong
        raise arguments.not_read("a, log_z, rows, other, other_log_z")

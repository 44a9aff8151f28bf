"""Attention of single tokens over their sequences' keys, in C++: one call a layer for all requests of a step, without the GIL.

Owns the step from checked arrays to the extension module. Docstrings with shapes and errors stand in `decode_reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.kernels import _native, arguments
from treadle.kernels.decode_arguments import check_attend, check_attend_keys, check_step

__all__ = ["DecodeStep", "attend_keys"]


class DecodeStep:
    """Some requests of one step that go on by one token each; see `decode_reference.DecodeStep`."""

    def __init__(
        self, caches: Sequence[NDArray[np.float32]], lengths: NDArray[np.int64], rows: NDArray[np.int64], heads: int
    ) -> None:
        """See `decode_reference.DecodeStep`. Raises InvalidArgument."""
        try:
            self._native = _native.DecodeStep(caches, lengths, rows, heads)
        except ValueError as error:
            check_step(caches, lengths, rows, heads)  # names what is wrong
            raise arguments.not_read(str(error)) from error
        self._cache, self._tokens, self._heads = caches[0], int(rows.max()) + 1, heads

    def attend(
        self, layer: int, queries: NDArray[np.float32], key_values: NDArray[np.float32],
        a: NDArray[np.float32], log_z: NDArray[np.float32],
    ) -> None:  # fmt: skip
        """Append the tokens' keys and values in one layer, and attend; see `decode_reference.DecodeStep.attend`."""
        if self._native.attend(layer, queries, key_values, a, log_z) != _native.DONE:
            check_attend(self._cache, self._tokens, self._heads, layer, queries, key_values, a, log_z)  # names what is wrong
            raise arguments.not_read("queries, key_values, a, log_z")


def attend_keys(
    queries: NDArray[np.float32], rows: NDArray[np.int64] | None, keys: NDArray[np.float32], values: NDArray[np.float32],
    biases: NDArray[np.float32],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:  # fmt: skip
    """The attention states of some tokens over the same few keys; see `decode_reference.attend_keys`."""
    shape = (len(queries) if rows is None else len(rows), *np.shape(queries)[1:])
    a, log_z = np.empty(shape, np.float32), np.empty(shape[:2], np.float32)
    if _native.attend_keys(queries, rows, keys, values, biases, a, log_z) != _native.DONE:
        check_attend_keys(queries, rows, keys, values, biases)  # names what is wrong
        raise arguments.not_read("queries, rows, keys, values, biases")
    return a, log_z

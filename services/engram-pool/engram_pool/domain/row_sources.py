"""Where the rows of a load come from: any stretch of any layer, in any order."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.origins import StoreOrder
from engram_pool.domain.storing import Rows, Staging, TokenMap
from treadle.contract import EngramModel, RowLayout
from treadle.contract.row_layout import SCALE_BYTES

BLOCK_ROWS = 4096  # rows of one random stream: loads read whole blocks, and a block is the same however it is read

# Random bits become finite values: by dtype, bytes of a word, bits to keep and bits to set. Magnitudes 2^-7 to 2^-3, both signs.
_VALUES = {
    "bf16": (2, 0x81FF, 0x3C00),  # exponents 120 to 123 of 255
    "fp16": (2, 0x8FFF, 0x2000),  # exponents 8 to 11 of 31
    "fp32": (4, 0x81FFFFFF, 0x3C000000),  # as bf16
    "fp8_e4m3": (1, 0xBF, 0x00),  # exponents 0 to 7 of 15: below 2, and never NaN (0x7f, 0xff)
    "u8": (1, 0xFF, 0x00),
    "int4": (1, 0xFF, 0x00),
    "nf4": (1, 0xFF, 0x00),
}
# bytes 120 to 127: 2^-7 to 1; as the values of that type, positive
_SCALES = {"ue8m0": (0x07, 0x78), "fp16": (0x0FFF, 0x2000), "fp32": (0x01FFFFFF, 0x3C000000)}


class RowSource(Protocol):
    """Rows of a model, by layer. One reader at a time."""

    model: EngramModel
    token_map: TokenMap | None

    def row_count(self, layer: int) -> int:
        """Rows of the table of `layer`."""

    def read(self, layer: int, first: int, out: Rows) -> None:
        """Fill `out` [n, row_bytes] uint8, C-contiguous, with the rows from `first` on."""

    def close(self) -> None:
        """Let go of files."""


@runtime_checkable
class RowsWithFiles(Protocol):
    """A RowSource that may bring files to keep beside the tables."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of them."""

    def keep_files(self, staging: Staging) -> None:
        """Write them. Raises DataLoss unless they are what the manifest names."""


class OpenStore(Protocol):
    """Opens a version of a store. Raises Unavailable, NotFound, InvalidArgument or DataLoss."""

    def __call__(self, order: StoreOrder) -> RowSource: ...


class RandomRows:
    """Reproducible rows from a seed: finite values of the row's dtype, scales near 1. For speed tests and demonstrations.

    Rows depend on (seed, layer, row) and the layout alone: PCG64 seeded with (seed, layer, block of BLOCK_ROWS rows).
    """

    def __init__(self, model: EngramModel, token_map: TokenMap | None, seed: int) -> None:
        self.model, self.token_map, self._seed = model, token_map, seed

    def row_count(self, layer: int) -> int:
        """Exactly the rows that the hash reaches."""
        return self.model.rows_hashed(layer)

    def read(self, layer: int, first: int, out: Rows) -> None:
        """Fill `out` [n, row_bytes] uint8 with the rows from `first` on."""
        done = 0
        while done < out.shape[0]:
            block, skipped = divmod(first + done, BLOCK_ROWS)
            count = min(BLOCK_ROWS - skipped, out.shape[0] - done)
            out[done : done + count] = self._block(layer, block)[skipped : skipped + count]
            done += count

    def close(self) -> None:
        """Nothing is open."""

    def _block(self, layer: int, block: int) -> Rows:
        row_bytes = self.model.row.bytes
        stream = np.random.PCG64(np.random.SeedSequence([self._seed, layer, block]))
        words: NDArray[np.uint64] = stream.random_raw(BLOCK_ROWS * row_bytes // 8)
        rows = words.astype("<u8", copy=False).view(np.uint8).reshape(BLOCK_ROWS, row_bytes)
        make_sane(rows, self.model.row)
        return rows


def make_sane(rows: Rows, layout: RowLayout) -> None:
    """Turn random bytes, in place, into finite values of the layout's dtype and scales near 1."""
    word, keep, put = _VALUES[layout.dtype]
    _mask(rows[:, : layout.value_bytes].view(f"<u{word}"), keep, put)
    if layout.inline_scale is not None:
        dtype = layout.inline_scale.dtype
        _mask(rows[:, layout.value_bytes :].view(f"<u{SCALE_BYTES[dtype]}"), *_SCALES[dtype])


def _mask(words: NDArray[np.unsignedinteger[Any]], keep: int, put: int) -> None:
    words &= words.dtype.type(keep)
    words |= words.dtype.type(put)

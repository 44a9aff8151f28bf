"""Rows out of a checkpoint: values and scales packed side by side, as the gather wants them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from engram_pool.domain.sources import Checkpoint, Tensor
from engram_pool.domain.storing import Rows, TokenMap
from engram_pool.domain.tensor_match import LayerTensors
from treadle.contract import DataLoss, EngramModel

SCALE_NUMBERS: dict[str, np.dtype[Any]] = {"fp16": np.dtype("<f2"), "fp32": np.dtype("<f4")}


class CheckpointRows:
    """Rows of `checkpoint`, which it closes. Scales are packed inline: one row, one run of cache lines."""

    def __init__(
        self, checkpoint: Checkpoint, model: EngramModel, token_map: TokenMap | None, tensors: Mapping[int, LayerTensors]
    ) -> None:
        self.model, self.token_map = model, token_map
        self._checkpoint, self._tensors = checkpoint, tensors
        self._scratch = np.empty(0, dtype=np.uint8)

    def row_count(self, layer: int) -> int:
        """All rows of the checkpoint, padding behind the hashed ones included."""
        return self._tensors[layer].row_count

    def read(self, layer: int, first: int, out: Rows) -> None:
        """Fill `out` [n, row_bytes] uint8 with packed rows from `first` on.

        Raises DataLoss for a short file, and for a row whose scales are not finite.
        """
        tensors, split = self._tensors[layer], self.model.row.value_bytes
        if not tensors.scale:
            self._joined(tensors.rows, first, out)
            self._check_scales(layer, first, out[:, split:])
            return
        out[:, :split] = self._read(tensors.rows, first, out.shape[0], split)
        scales = self._read(tensors.scale, first, out.shape[0], out.shape[1] - split)
        self._check_scales(layer, first, scales)
        out[:, split:] = scales

    def close(self) -> None:
        """Close the checkpoint."""
        self._checkpoint.close()

    def _check_scales(self, layer: int, first: int, scales: Rows) -> None:
        """One scale that is no number makes every number of its block none, and no checksum would tell."""
        inline = self.model.row.inline_scale
        if inline is None or inline.dtype not in SCALE_NUMBERS:
            return
        finite = np.isfinite(np.ascontiguousarray(scales).view(SCALE_NUMBERS[inline.dtype])).all(axis=1)
        if not finite.all():
            row = first + int(np.argmin(finite))
            raise DataLoss(f"{layer}.scale: the scales of row {row} are not finite; fetch the checkpoint again")

    def _read(self, pieces: tuple[Tensor, ...], first: int, count: int, width: int) -> Rows:
        if self._scratch.size < count * width:
            self._scratch = np.empty(count * width, dtype=np.uint8)
        rows = self._scratch[: count * width].reshape(count, width)
        self._joined(pieces, first, rows)
        return rows

    def _joined(self, pieces: tuple[Tensor, ...], first: int, out: Rows) -> None:
        done = 0
        for piece in pieces:
            if done < out.shape[0] and first < piece.shape[0]:
                count = min(piece.shape[0] - first, out.shape[0] - done)
                self._checkpoint.read(piece, first, out[done : done + count])
                done, first = done + count, 0
            elif first:
                first -= piece.shape[0]

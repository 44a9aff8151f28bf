"""Queries and attention states of calibration tokens on disk, three files a layer, in the order in which they came.

One forward pass gives the states of all layers at once, while clustering wants all tokens of one layer: the disk turns the one into
the other, so that the model runs once and memory stays bounded. Owns the files. Does not know what they are for.
Torch turns numbers to fp16 and back: numpy takes ten times as long for it.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.errors import DataLoss, InvalidArgument, ResourceExhausted
from treadle.contract.lasting_files import sync_folder

ROOM_LEFT_BYTES = 1 << 30  # that a build leaves free on the disk


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """n tokens of one layer. queries: [n, H, head_dim], the form that keys are made of; a: the same; log_z: [n, H]; all fp32."""

    queries: Tensor
    a: Tensor
    log_z: Tensor


class Spill:
    """Files of `layers` in `folder`. exact: fp32 numbers instead of fp16 (log Z is fp32 always)."""

    def __init__(self, folder: Path, layers: tuple[int, ...], heads: int, head_dim: int, *, exact: bool) -> None:
        self.folder, self.layers, self._heads, self._head_dim = folder, layers, heads, head_dim
        self._dtype: np.dtype[Any] = np.dtype("<f4" if exact else "<f2")
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers."""
        return len(self.layers) * self._heads * (2 * self._head_dim * self._dtype.itemsize + 4)

    def check_room(self, tokens: int) -> None:
        """Raise ResourceExhausted unless `tokens` fit on the disk beside what is there already."""
        free, there = shutil.disk_usage(self.folder).free, sum(path.stat().st_size for path in self.folder.iterdir())
        wanted = tokens * self.token_bytes + ROOM_LEFT_BYTES
        if wanted > free + there:
            raise ResourceExhausted(
                f"{self.folder}: {tokens} calibration tokens need {wanted >> 20} MiB for a while, {free >> 20} MiB are free; "
                "take fewer traces, or --out on a larger disk"
            )

    def append(self, layer: int, queries: Tensor, a: Tensor, log_z: Tensor) -> None:
        """Write the next tokens of one layer. Raises InvalidArgument, naming the layer, where a number is not finite."""
        for part, values in (("queries", queries), ("states", a), ("log_z", log_z)):
            largest, dtype = float(values.abs().max()), np.dtype("<f4") if part == "log_z" else self._dtype
            if not math.isfinite(largest):
                raise InvalidArgument(
                    f"layer {layer}: {part} of a trace hold NaN or infinite numbers; the model's weights are damaged"
                )
            if largest > float(np.finfo(dtype).max):
                raise InvalidArgument(f"layer {layer}: {part} of {largest:.3g}, too large for fp16; build with --dtype F32")
            rows = values.to(torch.float16 if dtype.itemsize == 2 else torch.float32).contiguous().numpy()
            with self._path(layer, part).open("ab") as file:
                file.write(rows.data)

    def cut(self, tokens: int) -> None:
        """Forget all but the first `tokens`. Raises DataLoss where a file is shorter; then they must be collected again."""
        for layer in self.layers:
            for part in ("queries", "states", "log_z"):
                path, wanted = self._path(layer, part), tokens * self._row_bytes(part)
                if (path.stat().st_size if path.exists() else 0) < wanted:
                    raise DataLoss(f"{path}: shorter than {tokens} tokens; begin again with --restart")
                if path.exists():
                    os.truncate(path, wanted)

    def flush(self) -> None:
        """Force what was written to the disk, names too."""
        for path in self.folder.iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(self.folder)

    def read(self, layer: int, first: int, last: int) -> Samples:
        """Tokens [first, last) of one layer. Raises DataLoss where the files end before."""
        numbers = self._heads * self._head_dim
        queries, a, log_z = (
            self._rows(layer, part, first, last, width)
            for part, width in (("queries", numbers), ("states", numbers), ("log_z", self._heads))
        )
        shape = (last - first, self._heads, self._head_dim)
        return Samples(queries.view(shape), a.view(shape), log_z.view(shape[:2]))

    def chosen(self, layer: int, tokens: NDArray[np.int64]) -> Samples:
        """Some tokens of one layer, rising."""
        return Samples(*(self._chosen(layer, part, tokens) for part in ("queries", "states", "log_z")))

    def queries(self, layer: int, tokens: NDArray[np.int64]) -> Tensor:
        """The queries of some tokens, rising: fp32 [n, H, head_dim]."""
        return self._chosen(layer, "queries", tokens)

    def _chosen(self, layer: int, part: str, tokens: NDArray[np.int64]) -> Tensor:
        shape = (self._heads,) if part == "log_z" else (self._heads, self._head_dim)
        mapped = np.memmap(self._path(layer, part), self._dtype_of(part), "r").reshape(-1, *shape)
        return torch.from_numpy(mapped[tokens]).to(torch.float32)

    def _dtype_of(self, part: str) -> np.dtype[Any]:
        return np.dtype("<f4") if part == "log_z" else self._dtype

    def _rows(self, layer: int, part: str, first: int, last: int, width: int) -> Tensor:
        dtype = self._dtype_of(part)
        rows = np.fromfile(self._path(layer, part), dtype, (last - first) * width, offset=first * width * dtype.itemsize)
        if rows.size != (last - first) * width:
            raise DataLoss(f"{self._path(layer, part)}: ends before token {last}; begin again with --restart")
        return torch.from_numpy(rows).to(torch.float32)

    def _row_bytes(self, part: str) -> int:
        return self._heads * (4 if part == "log_z" else self._head_dim * self._dtype.itemsize)

    def _path(self, layer: int, part: str) -> Path:
        return self.folder / f"{layer}.{part}"

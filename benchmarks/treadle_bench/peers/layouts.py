"""The tables that are asked: how models lay out their rows, and how much of each table is held here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Scale
from treadle.contract.families import demo_model

HEADS = 8  # of an n-gram order
TOKEN_MAP: NDArray[np.int32] = np.zeros(1, dtype=np.int32)  # rows are asked by id, so no token is ever mapped


@dataclass(frozen=True, slots=True)
class Layout:
    """One Engram layer of a model.

    row:    of its table; a token needs `columns` of them
    rows:   of the whole table
    share:  of the table that is held here, so that it fits into the memory of one machine twice
    figure: of the CXL paper (arXiv 2603.10087) that shows the same
    """

    model: str
    row: RowLayout
    columns: int
    rows: int
    share: float
    figure: str = ""

    @property
    def name(self) -> str:
        """Rows of a token and their bytes, such as 16x320."""
        return f"{self.columns}x{self.row.bytes}"

    @property
    def title(self) -> str:
        """Model, rows, and the figure it stands beside."""
        return f"{self.model} ({self.name})" + (f", {self.figure}" if self.figure else "")

    def template(self, table_bytes_max: int | None) -> EngramModel:
        """A model of one layer with about this share of the rows, or as many as `table_bytes_max` allows."""
        rows = int(self.rows * self.share)
        if table_bytes_max is not None:
            rows = min(rows, table_bytes_max // self.row.bytes)
        return demo_model(
            f"peers-{self.model.lower()}", layers=(0,), token_map=hashlib.sha256(TOKEN_MAP.astype("<i4").tobytes()).hexdigest(),
            compressed_vocab_size=1, pad_id=0, prime_base=rows // self.columns, orders=range(2, 2 + self.columns // HEADS), row=self.row,
        )  # fmt: skip


_BF16 = RowLayout(320, 160, "bf16")
# The paper's tables hold vocab_size x emb_dim (1,280) bf16 values, here as 16 rows of 320 bytes a token (its section 3.1). Both are
# held at one share, so that the second is as much larger than the first as there.
LAYOUTS = (
    Layout("27B", _BF16, 16, 2_262_400 * 1280 // 160, 0.2, "Figures 3 and 5"),
    Layout("40B", _BF16, 16, 7_239_680 * 1280 // 160, 0.2, "Figure 6"),
    Layout("V4.1", RowLayout(264, 256, "fp8_e4m3", Scale("ue8m0", 32)), 24, 384_006_168, 0.02),
    Layout("Qwen-FP8", RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(1.0)), 16, 320_001_536, 0.04),
    Layout("Qwen-bf16", _BF16, 16, 320_001_536, 0.02),
)
QUICK_LAYOUTS = (LAYOUTS[0], LAYOUTS[2])

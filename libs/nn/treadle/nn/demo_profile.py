"""The Engram model that treadle demonstrates with: `smollm2-demo`, for SmolLM2-135M.

There are no public Engram weights for this model, so its table is filled at random and its fusion built from a seed: the
work is real, what it remembers is not. Owns these choices; `treadle.contract.families` derives the numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, Fusion, RowLayout
from treadle.contract.families import demo_model
from treadle.nn.token_map import compressed_token_map, token_map_digest

NAME = "smollm2-demo"
LAYERS = (2, 15)
ORDERS, HEADS = (2, 3), 8
ROW = RowLayout(bytes=320, dim=160, dtype="bf16")
PRIME_BASE = 20_000  # rows of a head: 16 heads x 20,000 x 320 B are 102 MB for each layer
PAD_ID = 2  # <|im_end|>
SEED = 0
DELTA_RMS = {2: 0.14, 15: 0.31}  # 0.05 of SmolLM2's hidden state before these layers (median over tokens 2.7 and 6.2)


def smollm2_demo_template(tokenizer_json: Path) -> tuple[EngramModel, NDArray[np.int32]]:
    """The manifest without tables, and the token map int32 [V] that it names. Raises as `compressed_token_map` does."""
    token_map, size = compressed_token_map(tokenizer_json)
    model = demo_model(
        NAME, layers=LAYERS, orders=ORDERS, heads=HEADS, row=ROW, prime_base=PRIME_BASE, pad_id=PAD_ID, seed=SEED,
        token_map=token_map_digest(token_map), compressed_vocab_size=size, fusion=Fusion("demo"),
    )  # fmt: skip
    return model, token_map

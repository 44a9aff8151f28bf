"""The card of a grown memory: a JSON object beside it that says what it was grown from and what it does.

Owns reading it, without torch. `growth` makes it, `folder` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treadle.contract.engram_model import CARD_BYTES_MAX
from treadle.contract.errors import DataLoss, NotFound

CARD = "card.json"
CARD_SCHEMA = "treadle.engram-card/1"
NEEDED = ("name", "version", "precision", "recipe", "model", "text", "perplexity", "rows_learnt", "tokens_learnt", "sizes", "seed")


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a grown folder. Raises NotFound, DataLoss (no card, or not a whole one)."""
    path = folder / CARD
    if not path.is_file():
        raise NotFound(f"{path}: no such file; name the folder of a grown memory")
    if path.stat().st_size > CARD_BYTES_MAX:
        raise DataLoss(f"{path}: {path.stat().st_size} bytes, a card has at most {CARD_BYTES_MAX}")
    try:
        card = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataLoss(f"{path}: not JSON: {error}") from error
    if not isinstance(card, dict) or card.get("schema") != CARD_SCHEMA:
        raise DataLoss(f"{path}: not a {CARD_SCHEMA}")
    missing = [name for name in NEEDED if name not in card]
    if missing:
        raise DataLoss(f"{path}: not a whole card, {', '.join(missing)} missing; it was changed by hand, or cut short")
    return card

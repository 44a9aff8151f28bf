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


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a grown folder. Raises NotFound, DataLoss (no JSON object, too large)."""
    path = folder / CARD
    if not path.is_file():
        raise NotFound(f"{path}: no such file; name the folder of a grown memory")
    if path.stat().st_size > CARD_BYTES_MAX:
        raise DataLoss(f"{path}: {path.stat().st_size} bytes, a card has at most {CARD_BYTES_MAX}")
    try:
        card = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataLoss(f"{path}: not JSON: {error}") from error
    if not isinstance(card, dict):
        raise DataLoss(f"{path}: a JSON object expected")
    return card

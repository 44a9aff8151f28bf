"""The card of a dictionary: what its builder says of it, figures included. No part of its version.

Owns reading it from a folder, and the figures of storage and traffic that follow from a manifest. Loads neither torch nor a model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from treadle.contract.dictionary import ITEM_BYTES, Dictionary
from treadle.contract.dictionary_card import CARD_SCHEMA
from treadle.contract.dictionary_file import CARD_BYTES_MAX, CARD_FILE
from treadle.contract.errors import DataLoss
from treadle.contract.lookup_settings import LISTS_PROBED

KV_ITEM_BYTES = 2  # a number of a prefix KV in bf16, as most engines keep it


def read_card(folder: Path) -> dict[str, Any]:
    """The card of a folder, {} where there is none of the builder's form. Raises DataLoss where it is no JSON object."""
    path = folder / CARD_FILE
    if not path.is_file():
        return {}
    try:
        card = json.loads(path.read_bytes()[: CARD_BYTES_MAX + 1])
    except (ValueError, RecursionError) as error:
        raise DataLoss(f"{path}: not a card: {error}") from error
    if not isinstance(card, dict):
        raise DataLoss(f"{path}: not a card: an object expected, got {type(card).__name__}")
    return builders_card(card)


def builders_card(card: dict[str, Any]) -> dict[str, Any]:
    """The card itself where it is of the builder's form, else {}: publishers may write what they like."""
    return card if card.get("schema") == CARD_SCHEMA else {}


def sizes(dictionary: Dictionary) -> dict[str, float]:
    """Bytes of storage, bytes that a decoded token reads, and both in shares of the bf16 KV of the same prefix in the same layers.

    Traffic: keys that a lookup scans, once for all lookups of a codebook, the entries that are found, and matched keys. Source: paper, section 3.6,
    which counts keys alone.
    """
    model, settings = dictionary.model, dictionary.settings
    item = ITEM_BYTES[str(settings.dtype)]
    layers, books = len(dictionary.layers), dictionary.codebooks
    kv_bytes = layers * 2 * model.kv_heads * model.head_dim * dictionary.prefix.tokens * KV_ITEM_BYTES
    scanned = settings.entries * min(1.0, LISTS_PROBED / settings.lists if settings.lists else 1.0)
    keys = scanned * dictionary.key_dim * item + settings.lists * dictionary.key_dim * 4
    entries = dictionary.lookups * dictionary.entry_heads * (model.head_dim * item + 4)
    matched = sum(info.nbytes for name, info in dictionary.tensors if ".matched_" in name)
    read = layers * books * (keys + entries) + matched
    return {
        "storage_bytes": dictionary.nbytes, "read_bytes": round(read), "prefix_kv_bytes": kv_bytes,
        "storage_share": round(dictionary.nbytes / kv_bytes, 4), "read_share": round(read / kv_bytes, 4),
    }  # fmt: skip

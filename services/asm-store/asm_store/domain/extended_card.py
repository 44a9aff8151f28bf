"""The card of a version that a store put together: its parts, the model that they were built with, and its fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from asm_store.domain.checking import fits_message
from asm_store.domain.versions import Stored
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_card import CARD_SCHEMA, fit_of

MODEL_CHARS_MAX = 256  # of a model's name that is taken over
FIT_ON = "what its parts were measured on, weighed by their tokens"


def extended_card(dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]], base: Stored, chunk: Stored) -> bytes:
    """JSON, as builders write it; tensors: those of `dictionary`. Nothing where it does not fit one message with the manifest."""
    name = _model_name(base.card_json) or _model_name(chunk.card_json)
    card = {
        "schema": CARD_SCHEMA, "name": dictionary.name, "version": dictionary.version, "parts": [base.key[1], chunk.key[1]],
        "model": ({"name": name} if name else {}) | {"digest": dictionary.model.digest},
        "fit": fit_of(dictionary, tensors), "fit_on": FIT_ON,
    }  # fmt: skip
    text = json.dumps(card, indent=1).encode()
    return text if fits_message(dictionary, text) else b""


def _model_name(card_json: bytes) -> str:
    """As a part's card names its model; "" where it does not: a card is whatever its publisher sent."""
    try:
        name = json.loads(card_json)["model"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) and len(name) <= MODEL_CHARS_MAX else ""

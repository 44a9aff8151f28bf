"""Whole numbers out of a config.json that others wrote, and the name of a model out of its folder's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from treadle.contract import InvalidArgument

KEYS_LISTED_MAX = 16


def whole(keys: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The number at `key`, or `default` if it is not there. Raises InvalidArgument naming the key."""
    if default is not None and keys.get(key) is None:
        return default
    numbers = wholes(keys, key)
    if len(numbers) != 1:
        raise InvalidArgument(f"config.json: {key}: one number expected, got {numbers}")
    return numbers[0]


def wholes(keys: Mapping[str, Any], key: str) -> list[int]:
    """The number or numbers at `key`, none below 0. Raises InvalidArgument naming the key."""
    if key not in keys:
        stem = key.partition("_")[0]
        present = sorted(name for name in keys if name.startswith(stem))[:KEYS_LISTED_MAX]
        raise InvalidArgument(f"config.json: {key} is missing (there is {present or f'no {stem}_* key'}); give a manifest instead")
    value = keys[key]
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers):
        raise InvalidArgument(f"config.json: {key}: whole numbers expected, got {value!r}")
    return numbers


def model_name(folder: str) -> str:
    """`folder` as the name of a model."""
    name = re.sub(r"[^a-z0-9._+-]+", "-", folder.lower()).strip("-._+")
    return name[:128] or "engram"

"""How fields of a manifest are checked: what is wrong is refused in words that name the field."""

from __future__ import annotations

import itertools
from typing import Any

from treadle.contract.errors import InvalidArgument


def expect(condition: bool, message: str) -> None:
    """Raise InvalidArgument with `message` unless `condition` holds."""
    if not condition:
        raise InvalidArgument(message)


def is_int(value: object, low: int, high: int) -> bool:
    """Whether `value` is a whole number, no bool, from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def rising(numbers: tuple[int, ...], low: int, high: int) -> bool:
    """Whether all of `numbers` are whole, from `low` to `high`, and each above the one before."""
    return all(is_int(n, low, high) for n in numbers) and all(a < b for a, b in itertools.pairwise(numbers))


def object_fields(path: str, value: object, required: set[str], optional: set[str]) -> dict[str, Any]:
    """`value` itself, an object with these fields. Raises InvalidArgument naming what is missing or unknown at `path`."""
    if not isinstance(value, dict):
        raise InvalidArgument(f"{path}: an object expected, got {type(value).__name__}")
    missing, unknown = required - value.keys(), value.keys() - required - optional
    expect(not missing, f"{path}: missing {sorted(missing)}")
    expect(not unknown, f"{path}: unknown {sorted(unknown)}")
    return value


def comma_list(values: tuple[int, ...]) -> str:
    """Numbers with commas between them."""
    return ",".join(map(str, values))

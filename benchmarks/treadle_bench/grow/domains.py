"""A domain of text: units, and which of them train, choose hyperparameters, or are held out.

Owns the splits, their check, and what is measured of overlap between them. Does not know where a text comes from
(`king_james`, `python_sources`, `other_texts`), tokenise, or train.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from engram_pool.growing.overlap import LONG_NGRAM_TOKENS, covered, ngram_hashes
from treadle.contract.errors import InvalidArgument, NotFound


class Split(StrEnum):
    """What a unit is for."""

    TRAIN = "train"
    VALIDATION = "validation"  # hyperparameters, and weights of mixtures
    HELD_PARTS = "held-parts"  # chapters or modules of books or packages that are otherwise trained on
    HELD_WHOLES = "held-wholes"  # whole books or packages


HELD = (Split.HELD_PARTS, Split.HELD_WHOLES)


@dataclass(frozen=True, slots=True)
class Unit:
    """The smallest piece that is held out: a chapter, a module."""

    whole: str  # the book or package that it belongs to
    name: str
    text: str  # begins with a heading, ends with a newline


@dataclass(frozen=True, slots=True)
class Domain:
    """All units of a domain by split; `origin` says what the text is, so that a figure can be traced to it."""

    name: str
    part: str  # what a unit is called: chapters, modules
    whole: str  # what holds units: books, packages
    origin: Mapping[str, Any]
    units: Mapping[Split, tuple[Unit, ...]]

    def __post_init__(self) -> None:
        """Raise InvalidArgument if a unit, or its text, stands in two splits, or a held-out whole is trained on."""
        _require_apart(self)

    def text(self, split: Split) -> str:
        """The units of a split one after the other, a blank line between."""
        return "\n".join(unit.text for unit in self.units[split])

    @property
    def digest(self) -> str:
        """sha256 over every unit with its split: two runs with one digest saw the same texts."""
        total = hashlib.sha256()
        for split in Split:
            for unit in self.units[split]:
                total.update(f"{split}\0{unit.name}\0{unit.text}\0".encode())
        return total.hexdigest()


def split_units(
    units: Sequence[Unit], *, held_wholes: Iterable[str], wholes_of_parts: Iterable[str], every: int, held_at: int, validation_at: int
) -> dict[Split, tuple[Unit, ...]]:  # fmt: skip
    """Deal units to splits, the same for the same arguments.

    held_wholes:     all their units are HELD_WHOLES
    wholes_of_parts: of the units of these in order, number i is HELD_PARTS where i % every == held_at, and VALIDATION where
                     i % (2 every) == validation_at; what is left trains
    Raises NotFound naming a held whole that has no units, InvalidArgument where the two numbers meet.
    """
    if validation_at % every == held_at:
        raise InvalidArgument(f"validation_at: {validation_at} falls on held_at {held_at} (of {every})")
    apart, counted = set(held_wholes), set(wholes_of_parts)
    absent = apart - {unit.whole for unit in units}
    if absent:
        raise NotFound(f"held-out wholes {sorted(absent)}: the text has no such units")
    dealt: dict[Split, list[Unit]] = {split: [] for split in Split}
    number = 0
    for unit in units:
        split = Split.HELD_WHOLES if unit.whole in apart else Split.TRAIN
        if split is Split.TRAIN and unit.whole in counted:
            if number % every == held_at:
                split = Split.HELD_PARTS
            elif number % (2 * every) == validation_at:
                split = Split.VALIDATION
            number += 1
        dealt[split].append(unit)
    return {split: tuple(chosen) for split, chosen in dealt.items()}


@dataclass(frozen=True, slots=True)
class Overlap:
    """Share of tokens that lie in an n-gram which also stands in the training text.

    `held`: of the held-out split. `itself`: of as many training units, against the rest of the training text: what the text
    repeats of its own. A split that leaks has `held` far above `itself`.
    """

    ngram_tokens: int
    held: float
    itself: float


def overlap(
    domain: Domain, split: Split, encode: Callable[[str], Sequence[int]], ngram_tokens: int = LONG_NGRAM_TOKENS, *, seed: int = 0
) -> Overlap:
    """Measure a held-out split's long n-grams against the training text (see Overlap); deterministic by seed."""
    train = [np.asarray(encode(unit.text), dtype=np.int64) for unit in domain.units[Split.TRAIN]]
    held = [np.asarray(encode(unit.text), dtype=np.int64) for unit in domain.units[split]]
    sample = set(np.random.default_rng(seed).choice(len(train), size=min(len(held), len(train) // 2), replace=False).tolist())
    rest = ngram_hashes([tokens for number, tokens in enumerate(train) if number not in sample], ngram_tokens)
    taken = [train[number] for number in sorted(sample)]
    whole = np.union1d(rest, ngram_hashes(taken, ngram_tokens))
    return Overlap(ngram_tokens, covered(held, whole, ngram_tokens), covered(taken, rest, ngram_tokens))


def read_text(path: Path) -> str:
    """A UTF-8 file with plain newlines. Raises NotFound, and InvalidArgument where it is not UTF-8."""
    if not path.is_file():
        raise NotFound(f"{path}: no such text; name the folder that holds it with --texts")
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8 ({error})") from error


def _require_apart(domain: Domain) -> None:
    names: dict[str, Split] = {}
    texts: dict[str, tuple[Split, str]] = {}
    for split in Split:
        if not domain.units.get(split):
            raise InvalidArgument(f"{domain.name}: no unit is in split {split}")
        for unit in domain.units[split]:
            if unit.name in names:
                raise InvalidArgument(f"{domain.name}: {unit.name} is in {names[unit.name]} and in {split}")
            names[unit.name] = split
            body = unit.text.split("\n", 1)[-1].strip()  # without its heading
            other, name = texts.setdefault(body, (split, unit.name))
            if other is not split:
                raise InvalidArgument(f"{domain.name}: {unit.name} ({split}) has the text of {name} ({other})")
    for unit in domain.units[Split.HELD_WHOLES]:
        elsewhere = [split for split in Split if split is not Split.HELD_WHOLES and unit.whole in _wholes(domain, split)]
        if elsewhere:
            raise InvalidArgument(f"{domain.name}: {unit.whole} is held out whole, and in {elsewhere[0]}")


def _wholes(domain: Domain, split: Split) -> set[str]:
    return {unit.whole for unit in domain.units[split]}

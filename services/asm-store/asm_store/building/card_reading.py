"""A card as people read it. Whoever published a dictionary wrote its card, and any JSON object may be one.

Owns what is taken of a card and of which kind it must be: what is not so is left out and named, nothing is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from treadle.contract.checks import is_int

TEXT_CHARS_MAX = 1000  # of a text of a card: a source is a line or two
FIGURES_MAX = 8  # ways to answer, of which a card gives fidelity; builders give two
COUNT_MAX, NUMBER_MAX = 1 << 62, 1e9  # larger ones are no figures
REPLACED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Figures:
    """Fidelity of one way to answer; None: not known."""

    name: str
    agreement: float | None
    kl: float | None
    tokens: int | None


@dataclass(frozen=True, slots=True)
class CardRead:
    """What a card says. "", (), False: it says nothing of that.

    fit:     (layer, median cosine, 1st percentile) of layers of the dictionary; None: not known
    parts:   versions that were put together
    unknown: fields that are there and are not as builders write them
    Texts can be shown on a terminal.
    """

    model: str
    source: str
    fit_on: str
    written_by_the_model: bool
    held_out_traces: int
    fit: tuple[tuple[int, float | None, float | None], ...]
    fidelity: tuple[Figures, ...]
    parts: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, card: Mapping[str, Any], layers: tuple[int, ...]) -> CardRead:
        """Read a card of a dictionary with these layers."""
        fields = _Fields(card)
        fit = tuple(
            (layer, fields.number("fit", str(layer), "median"), fields.number("fit", str(layer), "percent1"))
            for layer in (layers if fields.value(_is_object, "fit") else ())
        )
        named = list(fields.value(_is_object, "fidelity") or {})[:FIGURES_MAX]
        fidelity = tuple(
            Figures(plain_text(name), fields.number("fidelity", name, "agreement"), fields.number("fidelity", name, "kl"), fields.count("fidelity", name, "tokens"))
            for name in named
        )  # fmt: skip
        return cls(
            fields.text("model", "name"), fields.text("source"), fields.text("fit_on"),
            bool(fields.value(lambda value: isinstance(value, bool), "calibration", "written_by_the_model")),
            fields.count("calibration", "held_out_traces") or 0, fit, fidelity,
            tuple(map(plain_text, fields.value(_are_texts, "parts") or ())), tuple(fields.unknown),
        )  # fmt: skip


class _Fields:
    """Takes values out of a card by their path. unknown: paths at which something else stood, first ones first."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self._card = card
        self.unknown: list[str] = []

    def value(self, fits: Callable[[Any], bool], *path: str) -> Any:
        """What stands at `path`; None where nothing does, or what does not fit."""
        found: Any = self._card
        for depth, step in enumerate(path):
            if found is None:
                return None
            if not _is_object(found):
                self._note(path[:depth])
                return None
            found = found.get(step)
        if found is not None and not fits(found):
            self._note(path)
            return None
        return found

    def text(self, *path: str) -> str:
        """A text, "" for none."""
        return plain_text(self.value(lambda value: isinstance(value, str), *path) or "")

    def number(self, *path: str) -> float | None:
        """A finite number."""
        found = self.value(_is_number, *path)
        return None if found is None else float(found)

    def count(self, *path: str) -> int | None:
        """A whole number, 0 or more."""
        found: int | None = self.value(lambda value: is_int(value, 0, COUNT_MAX), *path)
        return found

    def _note(self, path: tuple[str, ...]) -> None:
        if (name := plain_text(".".join(path))) not in self.unknown:
            self.unknown.append(name)


def plain_text(text: str) -> str:
    """A text without what a terminal would obey: control and formatting characters, halves of surrogate pairs. At most TEXT_CHARS_MAX."""
    some = "".join(character if character.isprintable() else REPLACED for character in " ".join(text[: TEXT_CHARS_MAX + 1].split()))
    return some if len(text) <= TEXT_CHARS_MAX else some[: TEXT_CHARS_MAX - 1] + "…"


def _is_object(value: object) -> bool:
    return isinstance(value, Mapping)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= NUMBER_MAX  # NaN is not

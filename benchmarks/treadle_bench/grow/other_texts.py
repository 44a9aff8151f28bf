"""Books outside every domain: three that are never trained on, and one that training mixes in.

Owns where texts are looked for, and which piece of each book is measured.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from treadle.contract.errors import InvalidArgument, NotFound
from treadle_bench.grow.domains import Domain, read_text
from treadle_bench.grow.king_james import king_james
from treadle_bench.grow.python_sources import python_sources

OTHERS = {  # what a memory must leave alone; a novel, a dialogue of 1653, and satire in alphabetical order
    "jack-sheppard": "16215_jack_sheppard.txt",
    "complete-angler": "9198_complete_angler.txt",
    "devils-dictionary": "972_devils_dictionary.txt",
}
MIX_FILE = "18304_american_adventures.txt"  # travel letters of 1917; none of the above, none of a domain
MIX_CHARACTERS = 400_000  # about 98 K tokens; a run on all of a domain draws each block twice or so
OTHER_CHARACTERS = 62_000  # about 15 K tokens
SKIPPED = 0.1  # of a book, from its start: title pages, tables of contents, prefaces by other hands
TEXTS_VARIABLE = "TREADLE_BENCH_TEXTS"
TEXTS_PLACE = Path("shared", "data", "gutenberg")  # looked for in this tree's folder and in those that hold it

DOMAINS: dict[str, Callable[[Path], Domain]] = {"kjv": king_james, "python": lambda _folder: python_sources()}


def load_domain(name: str, texts: Path) -> Domain:
    """A domain by name, from the folder of books `texts`. Raises NotFound, InvalidArgument (a text that is not whole)."""
    if name not in DOMAINS:
        raise NotFound(f"domain {name!r}: known are {sorted(DOMAINS)}")
    return DOMAINS[name](texts)


def texts_folder(given: Path | None = None) -> Path:
    """The folder of books: `given`, else $TREADLE_BENCH_TEXTS, else TEXTS_PLACE in or above this tree. Raises NotFound."""
    named = given or (Path(os.environ[TEXTS_VARIABLE]) if os.environ.get(TEXTS_VARIABLE) else None)
    for folder in [named] if named else [parent / TEXTS_PLACE for parent in Path(__file__).resolve().parents]:
        if folder.is_dir():
            return folder
    raise NotFound(
        f"{named or TEXTS_PLACE}: no such folder; give one with Project Gutenberg's {', '.join([*OTHERS.values(), MIX_FILE])} by --texts"
    )


def other_text(name: str, texts: Path) -> str:
    """About 15 K tokens of one of OTHERS, from a line's start to a line's end. Raises NotFound, InvalidArgument (too short)."""
    whole = read_text(texts / OTHERS[name])
    start = whole.index("\n", int(len(whole) * SKIPPED)) + 1
    piece = whole[start : start + OTHER_CHARACTERS]
    if len(piece) < OTHER_CHARACTERS:
        raise InvalidArgument(f"{texts / OTHERS[name]}: {len(whole)} characters are too few to take {OTHER_CHARACTERS} of them")
    return piece[: piece.rindex("\n") + 1]


def mix_text(texts: Path) -> str:
    """What training mixes in, so that a memory learns to keep still elsewhere."""
    return read_text(texts / MIX_FILE)[:MIX_CHARACTERS]

"""The King James Bible as a domain: chapters are units, books are wholes.

Owns how the Project Gutenberg file becomes text ("Book chapter" as heading, one verse a line, no verse numbers, no page
furniture), the check that all of it is there, and which chapters and books are held out.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from treadle.contract.errors import InvalidArgument
from treadle_bench.grow.domains import Domain, Unit, read_text, split_units

FILE = "10900_king_james_bible.txt"
BOOKS, CHAPTERS, VERSES = 66, 1189, 31_102
HELD_BOOKS = ("Ruth", "Ecclesiastes", "Jonah", "Philippians", "James")  # narrative, wisdom, prophet and two letters
PARTS_CHAPTERS_MIN = 5  # of a book: a shorter one would lose too much of itself
# Of the chapters in order every 15th, from the 5th, is held out, and every 30th, from the 15th, chooses hyperparameters.
PARTS_EVERY, HELD_AT, VALIDATION_AT = 15, 4, 14

_FURNITURE = re.compile(r"Previous( Home)?( Next)?|Home( Next)?|Next|Chapter|[\d ]+")
_VERSE = re.compile(r"(\d+):(\d+) (.*)")


def king_james(folder: Path) -> Domain:
    """The domain "kjv" from `folder`/FILE. Raises NotFound, and InvalidArgument where the text is not whole."""
    path = folder / FILE
    units = chapters(read_text(path), path)
    long_books = [book for book, count in Counter(unit.whole for unit in units).items() if count >= PARTS_CHAPTERS_MIN]
    splits = split_units(
        units, held_wholes=HELD_BOOKS, wholes_of_parts=long_books, every=PARTS_EVERY, held_at=HELD_AT, validation_at=VALIDATION_AT
    )
    return Domain("kjv", "chapters", "books", {"file": FILE, "source": "Project Gutenberg 10900, public domain"}, splits)


def chapters(text: str, path: Path) -> list[Unit]:
    """Every chapter in the file's order. Raises InvalidArgument if books, chapters or verses are missing or out of order."""
    verses: dict[tuple[str, int], list[str]] = {}
    book = ""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        verse = _VERSE.fullmatch(line)
        if verse:
            _append(verses, book, verse, path)
        elif not line.strip() or _FURNITURE.fullmatch(line.strip()):
            continue
        elif _is_title(lines, number):
            book = line.strip()
        elif verses:
            next(reversed(verses.values()))[-1] += " " + line.strip()
    books = {name for name, _ in verses}
    found = (len(books), len(verses), sum(len(each) for each in verses.values()))
    if found != (BOOKS, CHAPTERS, VERSES):
        raise InvalidArgument(f"{path}: {found} books, chapters and verses, expected {(BOOKS, CHAPTERS, VERSES)}")
    return [
        Unit(book, f"{book} {chapter}", "\n".join([f"{book} {chapter}", *each]) + "\n") for (book, chapter), each in verses.items()
    ]


def _append(verses: dict[tuple[str, int], list[str]], book: str, verse: re.Match[str], path: Path) -> None:
    chapter, number, words = int(verse[1]), int(verse[2]), verse[3].strip()
    place = verses.setdefault((book, chapter), [])
    if not book or number != len(place) + 1 or next(reversed(verses)) != (book, chapter):
        raise InvalidArgument(f"{path}: {book or 'no book'} {chapter}:{number} is out of order (verse {len(place) + 1} expected)")
    place.append(words)


def _is_title(lines: list[str], number: int) -> bool:
    """A book begins with its title alone between blank lines, behind the page's links."""
    before = [line.strip() for line in lines[max(0, number - 6) : number] if line.strip()]
    alone = (number == 0 or not lines[number - 1].strip()) and (number + 1 == len(lines) or not lines[number + 1].strip())
    return alone and bool(before) and before[-1].startswith("Previous")

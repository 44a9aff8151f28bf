from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from treadle.contract.errors import InvalidArgument, NotFound
from treadle_bench.grow import king_james, other_texts
from treadle_bench.grow.domains import HELD, Domain, Split, Unit, overlap, split_units
from treadle_bench.grow.other_texts import OTHERS, load_domain, mix_text, other_text, texts_folder
from treadle_bench.grow.python_sources import EXCLUDED, HELD_PACKAGES, TRAIN_CHARACTERS_MAX, python_sources


def a_bible() -> str:
    """66 books, 1,189 chapters, 31,102 verses, with the furniture of the real file."""
    names = [*king_james.HELD_BOOKS, *(f"{number} Book" for number in range(61))]
    pages, chapter_number = [], 0
    for place, name in enumerate(names):
        chapters = 18 if place < 65 else 19
        lines = ["Previous Home Next", "", name, "", "Chapter", "2 3 4 5 6 7 8 9", "10 11 12 13", ""]
        for chapter in range(1, chapters + 1):
            verses = 26 + (chapter_number < 188)
            chapter_number += 1
            lines += [
                f"{chapter}:{verse} And {name} spake of\nthings {chapter_number} and {verse}.\n" for verse in range(1, verses + 1)
            ]
        pages.append("\n".join([*lines, "", "Previous Home Next", ""]))
    return "\n".join(pages)


@pytest.fixture
def bible(tmp_path: Path) -> Path:
    (tmp_path / king_james.FILE).write_text(a_bible(), encoding="utf-8")
    return tmp_path


def words(text: str) -> Sequence[int]:
    return [hash(word) & 0xFFFFFF for word in text.split()]


def test_a_chapter_is_a_heading_and_one_verse_a_line_without_numbers_and_furniture(bible: Path) -> None:
    domain = king_james.king_james(bible)
    (ruth,) = [unit for unit in domain.units[Split.HELD_WHOLES] if unit.name == "Ruth 2"]
    lines = ruth.text.splitlines()
    assert lines[:2] == ["Ruth 2", "And Ruth spake of things 2 and 1."]
    assert len(lines) == 28
    assert not any(word in domain.text(split) for split in Split for word in ("Previous", "Chapter", ":"))


def test_held_out_books_are_whole_and_held_out_chapters_are_of_books_that_train(bible: Path) -> None:
    domain = king_james.king_james(bible)
    assert {unit.whole for unit in domain.units[Split.HELD_WHOLES]} == set(king_james.HELD_BOOKS)
    trained = {unit.whole for unit in domain.units[Split.TRAIN]}
    assert {unit.whole for unit in domain.units[Split.HELD_PARTS]} <= trained
    assert not trained & set(king_james.HELD_BOOKS)
    counts = {split: len(domain.units[split]) for split in Split}
    assert sum(counts.values()) == king_james.CHAPTERS
    rest = king_james.CHAPTERS - counts[Split.HELD_WHOLES]
    assert counts[Split.HELD_PARTS] == pytest.approx(rest / 15, abs=1)
    assert counts[Split.VALIDATION] == pytest.approx(rest / 30, abs=1)


@pytest.mark.parametrize(
    ("old", "new", "words_of_it"),
    [
        ("\n3:4 And", "\n3:5 And", "out of order"),
        ("1:1 And Ruth", "And Ruth", "out of order"),
        ("\n18:26 And 60 Book", "\nAnd", "1189"),
    ],
)
def test_a_bible_that_is_not_whole_is_refused(tmp_path: Path, old: str, new: str, words_of_it: str) -> None:
    text = a_bible()
    assert old in text
    (tmp_path / king_james.FILE).write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(InvalidArgument, match=words_of_it):
        king_james.king_james(tmp_path)


def test_a_missing_or_foreign_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="--texts"):
        king_james.king_james(tmp_path)
    (tmp_path / king_james.FILE).write_bytes(b"1:1 In the beginning \xff")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        king_james.king_james(tmp_path)
    with pytest.raises(NotFound, match=r"kjv.*python"):
        load_domain("quran", tmp_path)
    with pytest.raises(NotFound, match="--texts"):
        texts_folder(tmp_path / "nowhere")


def test_the_real_domains_have_no_unit_and_no_text_in_two_splits() -> None:
    domains = [python_sources()]
    try:
        domains.append(king_james.king_james(texts_folder()))
    except NotFound:
        assert not any((parent / other_texts.TEXTS_PLACE).is_dir() for parent in Path(__file__).resolve().parents)
    for domain in domains:  # Domain checks it when it is made; here it is counted once more, from outside
        names = Counter(unit.name for split in Split for unit in domain.units[split])
        assert max(names.values()) == 1
        held = {unit.text for split in HELD for unit in domain.units[split]}
        assert not held & {unit.text for split in (Split.TRAIN, Split.VALIDATION) for unit in domain.units[split]}


def test_python_s_sources_are_split_alike_each_time_and_hold_no_tests() -> None:
    domain = python_sources()
    assert domain.digest == python_sources().digest
    assert {unit.whole for unit in domain.units[Split.HELD_WHOLES]} == set(HELD_PACKAGES)
    assert not EXCLUDED & {part for split in Split for unit in domain.units[split] for part in Path(unit.name).parts}
    assert TRAIN_CHARACTERS_MAX * 0.95 < sum(len(unit.text) for unit in domain.units[Split.TRAIN]) <= TRAIN_CHARACTERS_MAX
    assert all(unit.text.startswith(f"# {unit.name}\n") for unit in domain.units[Split.VALIDATION])


def test_an_interpreter_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="standard library"):
        python_sources(tmp_path)


def dealt(**others: tuple[Unit, ...]) -> dict[Split, tuple[Unit, ...]]:
    units = {split: (Unit(str(split), f"{split} 1", f"{split} 1\ntext of {split}\n"),) for split in Split}
    return units | {Split(name.replace("_", "-")): chosen for name, chosen in others.items()}


def test_a_domain_refuses_a_unit_a_text_or_a_whole_that_stands_on_both_sides() -> None:
    Domain("d", "chapters", "books", {}, dealt())
    with pytest.raises(InvalidArgument, match=r"train 1 is in train"):
        Domain("d", "chapters", "books", {}, dealt(held_parts=(Unit("train", "train 1", "other\nwords\n"),)))
    with pytest.raises(InvalidArgument, match="has the text of"):
        Domain("d", "chapters", "books", {}, dealt(held_parts=(Unit("b", "b 1", "another heading\ntext of train\n"),)))
    with pytest.raises(InvalidArgument, match="held out whole"):
        Domain("d", "chapters", "books", {}, dealt(held_wholes=(Unit("train", "train 2", "a\nb\n"),)))
    with pytest.raises(InvalidArgument, match="no unit"):
        Domain("d", "chapters", "books", {}, dealt(validation=()))


def test_a_split_that_would_choose_on_what_it_holds_out_is_refused() -> None:
    units = [Unit("a", f"a {number}", str(number)) for number in range(30)]
    with pytest.raises(InvalidArgument, match="validation_at"):
        split_units(units, held_wholes=(), wholes_of_parts=["a"], every=5, held_at=2, validation_at=7)
    with pytest.raises(NotFound, match="ghost"):
        split_units(units, held_wholes=["ghost"], wholes_of_parts=["a"], every=5, held_at=2, validation_at=4)


def test_overlap_finds_a_leak_and_not_what_is_merely_alike() -> None:
    def chapter(name: str, number: int) -> Unit:
        body = " ".join(f"w{number}x{place}" for place in range(60))
        return Unit("book", name, f"{name}\n{body}\n")

    train = tuple(chapter(f"t {number}", number) for number in range(10))
    quoted = train[3].text.split("\n")[1]
    clean = Domain("d", "chapters", "books", {}, dealt(train=train, held_parts=(chapter("h 1", 77),)))
    leaking = Domain("d", "chapters", "books", {}, dealt(train=train, held_parts=(Unit("book", "h 1", f"h 1\nwell, {quoted}\n"),)))
    assert overlap(clean, Split.HELD_PARTS, words, 24).held == 0
    found = overlap(leaking, Split.HELD_PARTS, words, 24)
    assert found.held == pytest.approx(60 / 63)
    assert found.itself == 0


def test_other_texts_come_from_inside_their_books_and_are_not_the_mixed_one(tmp_path: Path) -> None:
    for number, name in enumerate([*OTHERS.values(), other_texts.MIX_FILE]):
        (tmp_path / name).write_text("title page\n" + f"line of book {number}\n" * 30_000, encoding="utf-8")
    pieces = {name: other_text(name, tmp_path) for name in OTHERS}
    for piece in pieces.values():
        assert piece.startswith("line of book")
        assert piece.endswith("\n")
        assert other_texts.OTHER_CHARACTERS - 100 < len(piece) <= other_texts.OTHER_CHARACTERS
    assert len({*pieces.values(), mix_text(tmp_path)}) == 4
    (tmp_path / OTHERS["jack-sheppard"]).write_text("short\n" * 50, encoding="utf-8")
    with pytest.raises(InvalidArgument, match="too few"):
        other_text("jack-sheppard", tmp_path)

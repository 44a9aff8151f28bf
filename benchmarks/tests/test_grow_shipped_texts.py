import lzma
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from treadle.contract.errors import NotFound
from treadle_bench.grow import shipped_texts
from treadle_bench.grow.domains import HELD, Domain, Split, Unit, overlap
from treadle_bench.grow.material import overlaps_of
from treadle_bench.grow.other_texts import texts_folder
from treadle_bench.grow.shipped import shipped_folder


@pytest.fixture
def books() -> Path:
    try:
        return texts_folder()
    except NotFound as error:
        pytest.skip(f"the shipped texts are NOT compared with their books: {error}")


def test_the_shipped_texts_are_made_from_the_books(books: Path, tmp_path: Path) -> None:
    written = shipped_texts.write(books, tmp_path / "out")
    there = {path.name: path for path in shipped_folder().glob("*.txt.xz")}
    assert {path.name for path in written} == set(there)
    for path in written:
        assert lzma.decompress(path.read_bytes()) == lzma.decompress(there[path.name].read_bytes()), path.name


def test_without_the_books_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["shipped_texts", "--texts", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert shipped_texts.main() == shipped_texts.FAILED
    assert "--texts" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_overlaps_of_a_domain_are_those_of_its_held_out_splits(tmp_path: Path) -> None:
    words = [f"w{number}" for number in range(400)]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(["?", *words])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    train = tuple(
        Unit("a", f"a {number}", f"a {number}\n{' '.join(words[number * 40 : number * 40 + 40])}\n") for number in range(4)
    )
    own = {
        split: (Unit(split.value, f"{split} 1", f"{split} 1\n{' '.join(words[at : at + 30])}\n"),)
        for at, split in ((300, Split.VALIDATION), (340, Split.HELD_WHOLES))
    }
    quoted = Unit("b", "b 1", f"b 1\nw399 {' '.join(words[5:40])}\n")
    domain = Domain("d", "chapters", "books", {}, {Split.TRAIN: train, Split.HELD_PARTS: (quoted,), **own})
    found = overlaps_of(domain, tmp_path / "tokenizer.json")
    assert found["held-parts"]["held"] == pytest.approx(35 / 38)
    assert found["held-wholes"]["held"] == 0.0
    for split in HELD:
        direct = overlap(domain, split, lambda text: tokenizer.encode(text).ids)
        assert found[split.value] == {"ngram_tokens": direct.ngram_tokens, "held": direct.held, "itself": direct.itself}

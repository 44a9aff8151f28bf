"""Text to blocks: what is refused, and that nothing held out is learnt."""

import lzma
from pathlib import Path

import numpy as np
import pytest

from engram_pool.growing.corpus import Text, blocks_of, corpus_of, read_text, split, tokenise
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound


def numbers(count: int, first: int = 0) -> Text:
    return Text("numbers", np.arange(first, first + count, dtype=np.int64))


def test_a_text_that_is_not_utf8_is_refused_with_its_offset(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("déjà vu".encode("latin-1"))
    with pytest.raises(InvalidArgument, match=r"latin.txt: not UTF-8: byte 0xe9 at offset 1"):
        read_text(path)


def test_a_packed_text_is_unpacked_and_a_torn_one_refused(tmp_path: Path) -> None:
    packed = lzma.compress(b"In the beginning\n" * 50)
    (tmp_path / "good.txt.xz").write_bytes(packed)
    (tmp_path / "torn.txt.xz").write_bytes(packed[: len(packed) // 2])
    assert read_text(tmp_path / "good.txt.xz").startswith("In the beginning\nIn")
    with pytest.raises(DataLoss, match=r"torn\.txt\.xz"):
        read_text(tmp_path / "torn.txt.xz")


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nothing\.txt"):
        read_text(tmp_path / "nothing.txt")


def test_each_fifteenth_passage_is_held_out_and_in_no_other_part() -> None:
    train, held = split([numbers(512 * 600)], 512)
    assert len(train) + len(held) == 600
    assert len(held) == 600 // 15
    assert not set(train[:, 0].tolist()) & set(held[:, 0].tolist())
    assert held[0, 0] == 14 * 4 * 512  # a passage of four blocks
    assert held[3, -1] == 15 * 4 * 512 - 1


def test_a_short_text_still_has_something_held_out() -> None:
    train, held = split([numbers(512 * 9)], 512)
    assert len(held) >= 1
    assert len(train) + len(held) == 9


def test_too_little_text_is_refused_by_name_and_number() -> None:
    with pytest.raises(InvalidArgument, match=r"numbers: 100 tokens are too few .* at least 4096"):
        corpus_of([numbers(100)], 512)


def test_texts_of_their_own_may_be_held_out() -> None:
    corpus = corpus_of([numbers(512 * 20)], 512, held_out=[numbers(512 * 2 + 9, 10**6)], mix=[numbers(512 * 31, 10**7)])
    assert len(corpus.train) == 20
    assert corpus.held_out[0, 0] == 10**6
    assert (len(corpus.mix), len(corpus.other)) == (29, 2)
    assert corpus.other[0, 0] == 10**7 + 29 * 512  # the end of the other text is never trained on
    with pytest.raises(InvalidArgument, match="held-out text: not one whole block"):
        corpus_of([numbers(512 * 20)], 512, held_out=[numbers(500)])


def test_the_digest_follows_what_is_learnt_and_what_is_held_out() -> None:
    one = corpus_of([numbers(512 * 20)], 512)
    assert corpus_of([numbers(512 * 20)], 512).digest == one.digest
    assert corpus_of([numbers(512 * 20, 1)], 512).digest != one.digest
    assert corpus_of([numbers(512 * 20)], 512, held_out=[numbers(512)]).digest != one.digest


def test_long_texts_are_tokenised_in_pieces_as_if_they_were_whole(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "Abel begat Noah .\n" * 200
    whole = tokenise(model_folder / "tokenizer.json", [("text", text)])[0].tokens
    monkeypatch.setattr("engram_pool.growing.corpus.CHUNK_CHARACTERS", 100)
    pieces = tokenise(model_folder / "tokenizer.json", [("text", text)])[0].tokens
    np.testing.assert_array_equal(whole, pieces)
    assert blocks_of(whole, 32).shape == (len(whole) // 32, 32)

"""Text from tokens: whole characters, nothing of a stop string, whatever the borders between tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.text import StopSearch, TextStream, Vocabulary
from treadle.contract.errors import InvalidArgument, NotFound

BYTES = Vocabulary(tuple(bytes([value]) for value in range(256)), special=frozenset({256}))


def feed(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    search = StopSearch(stops)
    text = "".join(search.feed(piece) for piece in pieces)
    return text + search.flush(), search.found


def test_a_stop_string_split_over_pieces_is_found_and_nothing_of_it_given_out() -> None:
    assert feed(["END"], ["one E", "N", "D two"]) == ("one ", True)


def test_text_is_held_back_only_while_a_stop_string_may_be_beginning() -> None:
    search = StopSearch(["\n\nQ:"])
    assert search.feed("answer\n") == "answer"
    assert search.feed("\nQ") == ""
    assert search.feed(".") == "\n\nQ."


def test_held_text_is_given_out_at_the_end() -> None:
    assert feed(["stop"], ["don't st"]) == ("don't st", False)


def test_the_stop_string_that_is_complete_first_wins() -> None:
    assert feed(["abc", "b"], ["xabc"]) == ("xa", True)
    assert feed(["bc", "abc"], ["xabc"]) == ("x", True)


@settings(deadline=None)
@given(st.text("ab ", max_size=40), st.lists(st.text("ab ", min_size=1, max_size=4), max_size=4), st.data())
def test_borders_between_pieces_change_nothing(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert feed(stops, pieces) == feed(stops, [text]) == feed(stops, list(text))


@settings(deadline=None)
@given(st.text("ab ", max_size=40), st.lists(st.text("ab ", min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_text_never_contains_a_stop_string(text: str, stops: list[str]) -> None:
    out, found = feed(stops, list(text))
    assert text.startswith(out)
    assert not any(stop in out for stop in stops)
    assert found == any(stop in text for stop in stops)


@settings(deadline=None)
@given(st.text(max_size=20))
def test_a_character_split_over_tokens_comes_whole(text: str) -> None:
    stream = TextStream(BYTES)
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.flush() == text
    assert all("�" not in piece for piece in pieces) or "�" in text


@settings(deadline=None)
@given(st.binary(max_size=20))
def test_broken_bytes_become_replacement_characters_as_in_one_decode(data: bytes) -> None:
    stream = TextStream(BYTES)
    assert "".join(stream.push(byte) for byte in data) + stream.flush() == data.decode(errors="replace")


def test_special_tokens_and_padding_ids_have_no_text() -> None:
    stream = TextStream(BYTES)
    assert stream.push(256) == ""
    assert stream.push(999) == ""
    assert BYTES.bytes_of(999) == b""


def test_a_stop_string_of_many_byte_characters_is_found_across_tokens() -> None:
    stream = TextStream(BYTES, ["界"])
    assert "".join(stream.push(byte) for byte in "世界 tail".encode()) == "世"
    assert stream.stopped


def test_a_sentencepiece_vocabulary_is_read(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    decoder = {"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    vocabulary = {"<0xE4>": 0, "▁hello": 1, "wor": 2}
    path.write_text(
        json.dumps(
            {"model": {"vocab": vocabulary}, "decoder": decoder, "added_tokens": [{"id": 4, "content": "</s>", "special": True}]}
        )
    )
    read = read_vocabulary(path)
    assert read.pieces == (b"\xe4", b" hello", b"wor", b"", b"</s>")
    assert read.special == {4}


def test_an_unknown_kind_of_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}))
    with pytest.raises(InvalidArgument, match="WordPiece"):
        read_vocabulary(path)
    with pytest.raises(NotFound):
        read_vocabulary(tmp_path / "absent.json")

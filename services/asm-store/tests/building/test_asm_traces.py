"""The traces file, and what is held out."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from asm_store.building.prefix import load_tokenizer, prefix_tokens, read_text
from asm_store.building.recipe import Recipe
from asm_store.building.traces import read_traces, split
from treadle.contract.dictionary import DictionarySettings, KeyMode, Positions
from treadle.contract.errors import InvalidArgument, NotFound


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Tokenizer:
    return load_tokenizer(tiny_folder)


def read(path: Path, tokenizer: Tokenizer, text: str) -> list[str]:
    path.write_text(text, encoding="utf-8")
    return [tokenizer.decode(list(trace)) for trace in read_traces(path, tokenizer)]


def test_json_lines_and_plain_lines_are_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "traces"
    assert read(path, tokenizer, '{"text": "one"}\n\n{"prompt": "two ", "answer": "three"}\n{"prompt": "four"}\n') == [
        "one",
        "two three",
        "four",
    ]
    assert read(path, tokenizer, "first line\nsecond\n") == ["first line", "second"]


def test_prompts_are_wrapped_and_answers_are_not(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "traces"
    path.write_text('{"prompt": "two", "answer": "three"}\n{"text": "one"}\n')
    found = read_traces(path, tokenizer, lambda prompt: f"<{prompt}>")
    assert [tokenizer.decode(list(trace)) for trace in found] == ["<two>three", "one"]


@pytest.mark.parametrize("line", ['{"text": 3}', '{"prompt": "a", "reply": "b"}', "plain", '{"text": ""}', "{"])
def test_a_wrong_line_is_named(line: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "traces").write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(InvalidArgument, match="traces line 2"):
        read_traces(tmp_path / "traces", tokenizer)


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"ab\xff")
    with pytest.raises(InvalidArgument, match="not UTF-8 at byte 2"):
        read_text(tmp_path / "bytes")
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(InvalidArgument, match="no text"):
        read_text(tmp_path / "empty")
    with pytest.raises(NotFound):
        read_text(tmp_path / "none")


def test_several_prefix_files_are_one_text(tokenizer: Tokenizer) -> None:
    assert prefix_tokens(tokenizer, ["ab", "cd"], begins=True) == prefix_tokens(tokenizer, ["abcd"], begins=True)


def test_the_last_of_every_ten_traces_is_held_out() -> None:
    traces = tuple((number,) for number in range(40))
    found = split(traces, 10)
    assert found.held_out == ((9,), (19,), (29,), (39,))
    assert (len(found.learnt), found.learnt_tokens) == (36, 36)
    assert split(traces, 0).held_out == split(traces[:19], 10).held_out == ()


def test_empty_and_endless_traces_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="trace 2: 1 to"):
        split(((1,), ()), 10)
    with pytest.raises(InvalidArgument, match="cut it into several"):
        split(((1,) * 20_000,), 10)
    with pytest.raises(InvalidArgument, match="expected, got 0"):
        split((), 10)


def test_a_recipe_refuses_what_cannot_be_served() -> None:
    with pytest.raises(InvalidArgument, match="own-position"):
        Recipe("a", DictionarySettings(key=KeyMode.OWN_POSITION, positions=Positions.FROM_ZERO))
    assert Recipe("a", chunk_tokens=16).chunks(40) == (16, 16, 8)
    assert Recipe("a").chunks(40) == (40,)
    with pytest.raises(InvalidArgument, match="more than 4096 chunks"):
        Recipe("a", chunk_tokens=1).chunks(5000)

"""Pieces that are text alone: written into a form, they are the bytes that the whole chunk comes to."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from inference_gateway.answers import ChatWriter, CompletionWriter
from inference_gateway.domain.generation import FinishReason, Piece, TokenLogprob, Usage
from inference_gateway.domain.several import Ends
from inference_gateway.replies import json_bytes

TEXTS = ["a", " the", 'a "quote" and \\', "zwei\nZeilen\r\t", "é中🙂", "\ud83d", "\x00\x7f\u2028", '"content":""', '"text":""']
MODELS = ["tiny", 'a"content":""b', '"text":""', "é"]


def writers(kind: Any, model: str, include_usage: bool, **more: Any) -> tuple[Any, Any]:
    """Two writers of the same answer."""
    one, other = (kind("id", model, Ends((3, 0)), logprobs=False, include_usage=include_usage, **more) for _ in range(2))
    one._created = other._created = 1
    return one, other


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@pytest.mark.parametrize("include_usage", [False, True])
def test_a_filled_form_is_the_chunk(kind: Any, include_usage: bool) -> None:
    for model in MODELS:
        filling, making = writers(kind, model, include_usage)
        for text, choice in itertools.product(TEXTS, [0, 1]):
            piece = Piece((1, 2), text, choice=choice)
            assert filling.text_alone(piece) == b"".join(json_bytes(chunk) for chunk in making.chunks(piece))
        assert filling._ends.cut() == making._ends.cut(), "they count the same tokens"


@pytest.mark.parametrize("kind", [ChatWriter, CompletionWriter])
@pytest.mark.parametrize(
    "piece",
    [
        Piece((1,), ""),
        Piece((1,), "a", finish_reason=FinishReason.STOP, usage=Usage(1, 0, 1)),
        Piece((1,), "a", logprobs=(TokenLogprob(1, b"a", -0.5),)),
    ],
)
def test_a_piece_that_is_more_than_text_or_less_is_left_to_its_chunks_and_not_counted(kind: Any, piece: Piece) -> None:
    writer, untouched = writers(kind, "tiny", False)
    assert writer.text_alone(piece) is None
    assert writer._ends.cut() == untouched._ends.cut()


def test_text_in_which_calls_are_looked_for_has_no_form() -> None:
    writer, _ = writers(ChatWriter, "tiny", False, tools=True)
    assert writer.text_alone(Piece((1,), "<tool")) is None

"""The engine on the small real model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.request import FinishReason, Piece, Request, Sampling
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.client.engram import EngramHandle, StepPrefetcher
from treadle.nn.memory_fit import fusion_of
from treadle.nn.model import CausalLM

Ask = Callable[..., list[Piece]]
Chat = Callable[[str], tuple[int, ...]]
QUESTION = "What is the capital of France?"


def engine_of(model: CausalLM, vocabulary: Vocabulary, memory: EngramMemory | None = None, *, prefetch: bool = True) -> Engine:
    limits = Limits(sequences_max=4, step_tokens_max=64)
    return Engine(model, vocabulary, limits, memory, prefetcher=StepPrefetcher(prefetch=prefetch))


def memory_of(handle: EngramHandle, model: CausalLM, *, fused: bool) -> EngramMemory:
    return EngramMemory(handle, fusion_of(handle.model, model.config.hidden, None), fused=fused)


def test_the_capital_of_france_is_paris(smollm: CausalLM, smollm_vocabulary: Vocabulary, ask: Ask, chat_ids: Chat) -> None:
    (piece,) = ask(engine_of(smollm, smollm_vocabulary), Request(chat_ids(QUESTION), Sampling(max_tokens=24)))
    assert "Paris" in piece.text
    assert "<|im_end|>" not in piece.text
    assert piece.finish is not None
    assert piece.finish.reason is FinishReason.STOP


def test_a_shadowed_engram_answers_the_same_and_a_fused_one_is_exact(
    smollm: CausalLM, smollm_vocabulary: Vocabulary, smollm_folder: Path, demo_handle: EngramHandle, ask: Ask, chat_ids: Chat
) -> None:
    Opener(smollm.config, smollm_folder / "tokenizer.json").check(demo_handle.model)
    wanted = Sampling(max_tokens=8, ignore_eos=True, top_logprobs=0)
    requests = [Request(chat_ids(question), wanted) for question in (QUESTION, "Count to five.")]

    def logprobs(memory: EngramMemory | None, *asked: Request, prefetch: bool = True) -> list[float]:
        engine = engine_of(smollm, smollm_vocabulary, memory, prefetch=prefetch)
        return [entry.logprob for piece in ask(engine, *asked) for entry in piece.logprobs]

    plain = logprobs(None, *requests)
    assert logprobs(memory_of(demo_handle, smollm, fused=False), *requests) == plain
    fused = logprobs(memory_of(demo_handle, smollm, fused=True), *requests)
    assert fused != plain
    assert logprobs(memory_of(demo_handle, smollm, fused=True), *requests, prefetch=False) == fused
    alone = [value for request in requests for value in logprobs(memory_of(demo_handle, smollm, fused=True), request)]
    assert alone == pytest.approx(fused, abs=1e-4)


@settings(deadline=None, max_examples=200)
@given(ids=st.lists(st.integers(0, 49_151), max_size=24))
def test_text_equals_one_decode_of_all_tokens(smollm_folder: Path, smollm_vocabulary: Vocabulary, ids: list[int]) -> None:
    stream = TextStream(smollm_vocabulary)
    text = "".join(stream.push(token) for token in ids) + stream.flush()
    assert text == _tokenizer(smollm_folder).decode(ids, skip_special_tokens=True)


def test_a_character_of_several_tokens_comes_whole(smollm_folder: Path, smollm_vocabulary: Vocabulary) -> None:
    stream = TextStream(smollm_vocabulary)
    ids = _tokenizer(smollm_folder).encode("世界 🎉").ids
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["世", "界", " ", "🎉"]


def _tokenizer(folder: Path) -> Tokenizer:
    key = str(folder / "tokenizer.json")
    if key not in _TOKENIZERS:
        _TOKENIZERS[key] = Tokenizer.from_file(key)
    return _TOKENIZERS[key]


_TOKENIZERS: dict[str, Tokenizer] = {}

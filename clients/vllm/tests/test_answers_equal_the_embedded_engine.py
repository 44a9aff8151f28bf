"""Greedy answers in fp32: the embedded engine's tokens, and its log-probabilities to 1e-4, however a step is made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from treadle.vllm import MemoryConfig

Verses = Callable[..., list[int]]
KJV, DEMO = "kjv", "smollm2-demo"


@pytest.fixture(scope="module")
def fused(engines: Callable[..., Any], smollm_folder: Path, pool: Any) -> Any:
    """All memories fused; steps of 48 tokens at most, so that prompts come in chunks."""
    config = MemoryConfig(engram_pool=pool.address, fusion="on", wait_seconds_max=10.0)
    return engines(smollm_folder, config, max_num_batched_tokens=48)


@pytest.mark.parametrize("memory", ["none", KJV, DEMO])
def test_a_batch_of_four_in_chunks_and_then_from_the_prefix_cache(
    fused: Any, embedded: Any, verses: Verses, pool: Any, memory: str
) -> None:
    choice = memory if memory == "none" else f"{memory}@{pool.current[memory]}"
    prompts = [verses(length, first) for length, first in ((130, 0), (17, 500), (77, 900), (48, 1500))]
    expected = [embedded.say(prompt, memory) for prompt in prompts]
    for cached in ([0, 0, 0, 0], [128, 0, 64, 32]):  # whole blocks of 32, the last token always left to compute
        answers = fused.say(*[(prompt, choice) for prompt in prompts])
        assert [answer.cached for answer in answers] == cached
        for answer, wanted in zip(answers, expected, strict=True):
            answer.same_as(wanted)
            if memory == "none":
                assert answer.outcome is None
            else:
                assert (answer.outcome.memory.name, answer.outcome.memory.version) == (memory, pool.current[memory])
                assert answer.outcome.tickets > 0
                assert (answer.outcome.rows_missing, answer.outcome.degraded, answer.outcome.memory.shadowed) == (0, False, False)


def test_memories_change_answers(embedded: Any, verses: Verses) -> None:
    said = {memory: embedded.say(verses(130), memory).logprobs for memory in ("none", KJV, DEMO)}
    assert all(max(abs(a - b) for a, b in zip(said["none"], said[memory], strict=True)) > 0.05 for memory in (KJV, DEMO))


def test_two_memories_and_none_in_one_batch(fused: Any, embedded: Any, verses: Verses, pool: Any) -> None:
    memories = [KJV, "none", DEMO, KJV, DEMO, "none"]
    prompts = [verses(length, 3000 + 300 * place) for place, length in enumerate((60, 61, 90, 20, 21, 22))]
    answers = fused.say(*zip(prompts, memories, strict=True))
    for answer, prompt, memory in zip(answers, prompts, memories, strict=True):
        answer.same_as(embedded.say(prompt, memory))


def test_memories_never_share_a_block_even_without_a_salt(fused: Any, embedded: Any, verses: Verses, pool: Any) -> None:
    prompt = verses(100, 6000)
    for memory in ("none", KJV, DEMO):
        choice = memory if memory == "none" else f"{memory}@{pool.current[memory]}"
        for cached in (0, 96):
            (answer,) = fused.say((prompt, choice))
            assert answer.cached == cached
            answer.same_as(embedded.say(prompt, memory))


def test_a_prompt_continues_from_blocks_that_are_computed_in_the_same_step(
    fused: Any, embedded: Any, verses: Verses, pool: Any
) -> None:
    """The second request's history lies in blocks that the first one fills in that step."""
    prompt = verses(40, 7000)
    choice = f"{DEMO}@{pool.current[DEMO]}"
    first, second = fused.say((prompt, choice), (prompt[:39], choice))
    assert second.cached == 32
    first.same_as(embedded.say(prompt, DEMO))
    second.same_as(embedded.say(prompt[:39], DEMO))


def test_a_name_without_a_version_is_pinned_and_shares_prefixes_once_the_pool_has_said_which(
    fused: Any, embedded: Any, verses: Verses, pool: Any
) -> None:
    prompt = verses(70, 8000)
    for _ in range(100):  # the scheduler hears of versions on a thread of its own
        (answer,) = fused.say((prompt, KJV), tokens=2)
        assert answer.outcome.memory.version == pool.current[KJV]
        if answer.cached:
            break
    assert answer.cached == 64
    answer.same_as(embedded.say(prompt, KJV, tokens=2))


def test_shadowed_rows_change_nothing_and_are_counted(
    engines: Callable[..., Any], smollm_folder: Path, pool: Any, embedded: Any, verses: Verses
) -> None:
    config = MemoryConfig(engram_pool=pool.address, fusion="shadow", default_memory=KJV, wait_seconds_max=10.0)
    engine = engines(smollm_folder, config)
    (answer,) = engine.say((verses(60), None))
    answer.same_as(embedded.say(verses(60), "none"))
    assert answer.outcome.memory.shadowed
    assert answer.outcome.tickets == 24  # two layers, twelve steps


@pytest.mark.parametrize("memory", [KJV, DEMO])
def test_requests_that_are_preempted_and_resumed_answer_the_same(
    engines: Callable[..., Any], smollm_folder: Path, pool: Any, embedded: Any, verses: Verses, memory: str
) -> None:
    """KV for about two and a half of four requests: the later ones lose theirs half-way, and compute it anew."""
    config = MemoryConfig(engram_pool=pool.address, fusion="on", wait_seconds_max=10.0)
    blocks_bytes = 30 * 2 * 3 * 64 * 32 * 4  # SmolLM2: layers x (K, V) x heads x head_dim x tokens x fp32
    engine = engines(smollm_folder, config, kv_cache_memory_bytes=16 * blocks_bytes, max_model_len=256, enable_prefix_caching=False)
    before = preemptions(engine)
    prompts = [verses(120, 8000 + 400 * place) for place in range(4)]
    answers = engine.say(*[(prompt, memory) for prompt in prompts], tokens=60)
    assert preemptions(engine) > before
    for answer, prompt in zip(answers, prompts, strict=True):
        answer.same_as(embedded.say(prompt, memory, 60))
        assert not answer.degraded


def preemptions(engine: Any) -> int:
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")

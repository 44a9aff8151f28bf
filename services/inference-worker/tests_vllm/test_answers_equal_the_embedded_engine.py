"""The same requests to a worker of each engine: the same tokens, text and log-probabilities, and reports that say the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from worker_processes import Process, request, say, snapshot

from treadle.client.worker import Worker
from treadle.inference.v1 import worker_pb2 as pb

MEMORIES = ("", "kjv", "smollm2-demo")  # none; grown, its rows added; random, shadowed


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_prompt_of_several_chunks_is_answered_alike(vllm: Worker, embedded: Worker, memory: str) -> None:
    asked = request(200, 130, memory)  # 48 tokens a step
    ours = say(vllm, asked)
    ours.same_as(say(embedded, asked))
    assert len(ours.tokens) == 10


@pytest.mark.parametrize("memory", MEMORIES)
def test_an_answer_from_the_prefix_cache_is_the_same_and_is_counted(vllm: Worker, embedded: Worker, memory: str) -> None:
    asked = request(300, 100, memory, salt="cached")
    first, again = say(vllm, asked), say(vllm, asked)
    again.same_as(first)
    again.same_as(say(embedded, asked))
    assert (first.last.usage.cached_tokens, again.last.usage.cached_tokens) == (0, 96)


def test_memories_and_tenants_never_share_a_beginning(vllm: Worker) -> None:
    for salt in ("tenant-a", "tenant-b"):
        for memory in MEMORIES:
            assert say(vllm, request(400, 100, memory, salt=salt)).last.usage.cached_tokens == 0
    forged = '{"engram":null,"tenant":"tenant-a"}'
    assert say(vllm, request(400, 100, "", salt=forged)).last.usage.cached_tokens == 0


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(vllm: Worker, embedded: Worker) -> None:
    asked = [request(500 + 10 * place, 60 + 13 * place, memory) for place, memory in enumerate((*MEMORIES, "kjv"))]
    with ThreadPoolExecutor(len(asked)) as threads:
        together = list(threads.map(lambda each: say(vllm, each), asked))
    for one, alone in zip(together, (say(embedded, each) for each in asked), strict=True):
        one.same_as(alone)


def test_log_probabilities_of_a_prompt_are_the_same(vllm: Worker, embedded: Worker) -> None:
    asked = request(600, 90, "kjv", prompt_logprobs=True, top_logprobs=2, max_tokens=1)
    ours = say(vllm, asked)
    ours.same_as(say(embedded, asked))
    assert len(ours.prompt_logprobs) == 89


def test_stop_strings_and_stop_tokens_end_the_text_at_the_same_place(vllm: Worker, embedded: Worker) -> None:
    free = say(embedded, request(700, 60, "kjv", max_tokens=24))
    assert len(free.text) > 6
    stop = free.text[4:7]
    for asked in (
        request(700, 60, "kjv", max_tokens=24, stop=[stop]),
        request(700, 60, "kjv", max_tokens=24, stop_token_ids=[free.tokens[5]]),
    ):
        ours = say(vllm, asked)
        ours.same_as(say(embedded, asked))
        assert ours.last.finish_reason == pb.FINISH_REASON_STOP
        assert stop not in ours.text or not asked.sampling.stop
        assert ours.last.memory[0].tickets > 0  # also where it was ended here and not by vLLM


def test_reports_name_the_memory_and_count_its_tickets_alike(vllm: Worker, embedded: Worker) -> None:
    for memory in MEMORIES[1:]:
        asked = request(800, 40, memory, salt=memory)
        ours, theirs = say(vllm, asked).last.memory[0], say(embedded, asked).last.memory[0]
        assert (ours.kind, ours.name, ours.version, ours.transport) == ("engram", theirs.name, theirs.version, theirs.transport)
        assert (ours.tickets, ours.rows_missing, ours.shadowed) == (theirs.tickets, 0, theirs.shadowed)


def test_sampling_is_repeated_by_its_seed_and_steered_by_bias_and_penalties(vllm: Worker) -> None:
    drawn = [say(vllm, request(900, 40, temperature=1.5, seed=seed, max_tokens=12)).tokens for seed in (7, 7, (1 << 64) - 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert say(vllm, request(900, 40, logit_bias={4242: 100.0}, max_tokens=3)).tokens == [4242] * 3
    heavy = say(vllm, request(900, 40, logit_bias={4242: 30.0, 4243: 29.0}, presence_penalty=2.0, max_tokens=2)).tokens
    assert sorted(heavy) == [4242, 4243]
    assert (
        say(vllm, request(900, 40, temperature=2.0, top_k=1, max_tokens=6)).tokens
        == say(vllm, request(900, 40, max_tokens=6)).tokens
    )


def test_the_status_tells_the_engine_its_figures_and_its_memories(vllm: Worker) -> None:
    say(vllm, request(1000, 70, "kjv", salt="status"))
    status = vllm.status()
    assert (status.engine, status.engine_version, status.dtype) == ("vllm", "0.32.0", "float32")
    assert (status.requests_running_max, status.requests_waiting_max, status.context_tokens_max) == (4, 2, 512)
    assert status.steps > 10
    assert status.step_seconds > 0
    assert status.prompt_tokens >= 70
    assert status.completion_tokens >= 10
    kjv = next(memory for memory in status.engram_models if memory.model == "kjv")
    assert (kjv.open, kjv.fused, kjv.transport) == (True, True, "rpc")
    assert kjv.tokens >= 79
    assert not next(memory for memory in status.engram_models if memory.model == "smollm2-demo").fused


def test_blocks_of_the_prefix_cache_are_told_with_their_tokens_salt_and_memory(vllm: Worker, vllm_process: Process) -> None:
    version = next(memory.version for memory in vllm.status().engram_models if memory.model == "kjv")
    assert vllm.status().block_tokens == 32
    say(vllm, request(1100, 70, "kjv", salt="told"))
    say(vllm, request(1100, 70, "", salt="told"))
    blocks = {block.name: block for block in snapshot(vllm_process) if block.cache_salt == "told"}
    for memory in (f"kjv@{version}", ""):
        first = next(block for block in blocks.values() if block.memory == memory and not block.parent)
        second = next(block for block in blocks.values() if block.parent == first.name)
        assert [*first.token_ids, *second.token_ids] == list(range(1100, 1164))
        assert second.memory == memory
    assert len(blocks) == 4

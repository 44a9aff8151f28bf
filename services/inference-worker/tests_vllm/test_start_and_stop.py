"""A worker of the engine vllm that starts, is told to stop, or finds that its engine computes nonsense."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
from worker_processes import (
    START_SECONDS_MAX,
    Process,
    Said,
    living,
    request,
    say,
    started,
    until,
    words_of,
    worker_argv,
)

from inference_worker.adapters.golden_check import PROMPT_TOKENS, compare, parameters_of
from inference_worker.adapters.vllm_engine import TRACKER
from inference_worker.domain.request import Piece, TokenLogprob
from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker

HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()


def test_a_worker_that_is_told_to_stop_finishes_its_answers_and_leaves_no_process(folder: Path, pool: Process) -> None:
    mapped = ("--engram-transport", "mapped", "--engram-model", "kjv", "--drain-seconds", "60")
    with started(*worker_argv(folder, pool.listen, "vllm", *mapped)) as running, Worker(Endpoint(running.listen)) as worker:
        status = worker.status()
        assert (status.engram_model, status.engram_transport, status.engram_fused) == ("kjv", "mapped", True)
        done: list[Said] = []
        thread = threading.Thread(target=lambda: done.append(say(worker, request(100, 40, None, max_tokens=40))))
        thread.start()
        until(lambda: worker.status().requests_running == 1, "a generation")
        children = running.children()
        trackers = [child for child in children if TRACKER in words_of(child)]
        assert len(children) - len(trackers) >= 2
        running.process.send_signal(signal.SIGTERM)
        until(lambda: "draining" in running.log(), "the drain")
        thread.join(60.0)
        assert running.process.wait(60.0) == 0
        assert (len(done[0].tokens), done[0].last.memory[0].transport) == (40, "mapped")
        assert not living([child for child in children if child not in trackers])
        until(lambda: not living(trackers), "the end of Python's resource trackers, which end once their parent has")


def test_a_worker_that_is_told_to_stop_while_it_starts_leaves_no_process(folder: Path, pool: Process) -> None:
    with started(*worker_argv(folder, pool.listen, "vllm"), ready=False) as running:
        until(
            lambda: any("EngineCore" in words_of(child) for child in running.children()), "the engine's process", START_SECONDS_MAX
        )
        children = running.children()
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60.0) != 0
        until(lambda: not living(children), "the end of its processes")


def test_a_setting_that_the_plugin_does_not_take_is_a_wrong_setting(folder: Path, pool: Process) -> None:
    with started(*worker_argv(folder, pool.listen, "vllm", "--engram-open-seconds-max", "300"), ready=False) as running:
        assert running.process.wait(START_SECONDS_MAX) == 2
        assert "open_seconds_max: above 0, at most 120" in running.log()


def test_an_engine_that_is_farther_off_than_allowed_is_not_served(folder: Path, pool: Process) -> None:
    coarse = ("--dtype", "bfloat16", "--golden-check-difference-max", "0.0005")
    with started(*worker_argv(folder, pool.listen, "vllm", *coarse), ready=False) as running:
        assert running.process.wait(START_SECONDS_MAX) == 1
        assert running.process.stdout is not None
        assert not running.process.stdout.read()  # no ready line
        assert "cannot start: the engine does not compute what the weights in" in running.log()
        assert "(golden_check_difference_max = 0.0005)" in running.log()


@pytest.mark.skipif(
    not HAS_AMX, reason="this CPU has no AMX, whose bfloat16 attention goes wrong in vLLM 0.32; run it where it has"
)
def test_an_engine_that_computes_nonsense_is_not_served(folder: Path, pool: Process) -> None:
    with started(*worker_argv(folder, pool.listen, "vllm", "--dtype", "bfloat16"), ready=False) as running:
        assert running.process.wait(START_SECONDS_MAX) == 1
        assert running.process.stdout is not None
        assert not running.process.stdout.read()  # no ready line
        assert "the engine does not compute what the weights in" in running.log()
        assert "--dtype float32" in running.log()


def test_the_check_tells_an_answer_of_the_model_from_one_that_is_not(folder: Path) -> None:
    prompt = list(range(10, 10 + PROMPT_TOKENS))
    scored = [TokenLogprob(token, b"", -5.0) for token in prompt[1:]]
    wrong = compare(
        folder, prompt, Piece([1, 2], logprobs=[TokenLogprob(1, b"", -0.1), TokenLogprob(2, b"", -0.1)], prompt_logprobs=scored)
    )
    assert min(wrong.logprob_difference, wrong.choice_loss) > 1
    short = compare(folder, prompt, Piece([1], logprobs=[], prompt_logprobs=scored))
    assert short.logprob_difference == float("inf")
    assert 130e6 < parameters_of(folder) < 140e6

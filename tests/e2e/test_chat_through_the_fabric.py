"""The main job, with real processes: a stock OpenAI client, a real model, rows from the pool."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .conftest import RunningFabric, run_treadle, until

QUESTION: list[Any] = [{"role": "user", "content": "Write two sentences about weaving."}]
KJV = {"treadle": {"engram": "kjv"}}


def stream(fabric: RunningFabric, on_first: Any = None, **treadle: Any) -> tuple[str, list[Any]]:
    """The streamed text of an answer with the memory, and all chunks; `on_first` is called once text has come."""
    text, chunks = "", []
    answers = fabric.client().chat.completions.create(
        model=fabric.model, messages=QUESTION, stream=True, temperature=0, max_tokens=40, stream_options={"include_usage": True},
        extra_body={"treadle": KJV["treadle"] | treadle},
    )  # fmt: skip
    for chunk in answers:
        chunks.append(chunk)
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        if text and on_first is not None:
            on_first()
            on_first = None
    return text, chunks


def ask_until_refused(fabric: RunningFabric) -> None:
    for _ in range(100):
        stream(fabric)


def test_a_stock_client_gets_a_streamed_answer_with_the_memory_reported(fabric: RunningFabric) -> None:
    text, chunks = stream(fabric)
    assert len(text) > 20
    assert chunks[-1].usage.completion_tokens <= 40
    report = next(chunk.treadle for chunk in chunks if getattr(chunk, "treadle", None))
    assert report["degraded"] is False
    memory = report["memory"][0]
    assert (memory["kind"], memory["name"], memory["transport"], memory["shadowed"]) == ("engram", "kjv", "mapped", False)
    assert memory["rows_missing"] == 0
    assert memory["tickets"] >= 2 * chunks[-1].usage.completion_tokens - 2  # two layers a step


def test_the_plain_answer_equals_the_streamed_one(fabric: RunningFabric) -> None:
    whole = fabric.client().chat.completions.create(
        model=fabric.model, messages=QUESTION, temperature=0, max_tokens=40, extra_body=KJV
    )
    assert whole.choices[0].message.content == stream(fabric)[0]


def test_the_model_knows_the_capital_of_france(fabric: RunningFabric) -> None:
    answer = fabric.client().chat.completions.create(
        model=fabric.model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=20,
        logprobs=True,
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert all(token.logprob <= 0 for token in logprobs.content or [])


def test_a_dead_pool_changes_no_token_of_a_chat_and_is_back_within_seconds(fabric: RunningFabric) -> None:
    expected, _ = stream(fabric, policy={"wait_seconds_max": 5, "late": "fail"})
    before = fabric.service("engram-pool")
    text, chunks = stream(fabric, lambda: os.kill(before["pid"], signal.SIGKILL))
    assert text == expected
    assert next(chunk.treadle for chunk in chunks if getattr(chunk, "treadle", None))["degraded"] is False
    until(lambda: fabric.service("engram-pool")["ready"])
    after = fabric.service("engram-pool")
    assert after["pid"] != before["pid"]
    assert after["address"] == before["address"]
    assert after["figures"]["models"][0]["version"] == before["figures"]["models"][0]["version"]
    assert stream(fabric)[0] == expected


def test_a_dead_worker_is_started_again_behind_the_same_gateway(fabric: RunningFabric) -> None:
    expected, _ = stream(fabric)
    os.kill(fabric.service("inference-worker")["pid"], signal.SIGKILL)
    with pytest.raises(openai.APIError):  # while it is away: an error that says so, not a hang
        ask_until_refused(fabric)
    until(lambda: httpx.get(f"{fabric.url}/ready", timeout=30).status_code == 200)
    assert stream(fabric)[0] == expected


def test_a_client_that_leaves_frees_its_place(fabric: RunningFabric) -> None:
    before = fabric.service("inference-worker")["figures"]["completion_tokens"]
    answers: Any = fabric.client().chat.completions.create(
        model=fabric.model, messages=QUESTION, stream=True, max_tokens=1500, temperature=0, extra_body={"ignore_eos": True}
    )  # a minute's work if nobody stops it
    next(iter(answers))
    answers.response.close()
    until(lambda: fabric.service("inference-worker")["figures"]["requests_running"] == 0)
    assert fabric.service("inference-worker")["figures"]["completion_tokens"] - before < 700


def test_a_second_fabric_in_the_same_home_is_refused(fabric: RunningFabric) -> None:
    second = fabric.run("up", "--detach", "--gateway-port", "0")
    assert second.returncode != 0
    assert fabric.url in second.stderr + second.stdout


def test_status_logs_and_pool_commands_work_on_a_running_fabric(fabric: RunningFabric) -> None:
    assert "kjv" in fabric.run("pool", "ls").stdout  # finds the pool of this home's fabric by itself
    assert fabric.run("pool", "verify", "kjv", "--pool", fabric.service("engram-pool")["address"]).returncode == 0
    assert fabric.run("logs", "engram-pool").returncode == 0
    one_shot = fabric.run("chat", "--url", fabric.url, "--temperature", "0", "--max-tokens", "20", "What is the capital of France?")
    assert "Paris" in one_shot.stdout


def test_without_a_fabric_the_commands_say_what_to_do(tmp_path: Path) -> None:
    status = run_treadle(tmp_path, "status")
    assert status.returncode != 0
    assert "treadle up" in status.stdout + status.stderr
    listing = run_treadle(tmp_path, "pool", "ls", "--pool", "127.0.0.1:9")
    assert listing.returncode == 1
    assert "127.0.0.1:9" in listing.stderr
    assert "Traceback" not in listing.stderr
    assert run_treadle(tmp_path, "down").returncode == 0

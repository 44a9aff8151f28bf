"""The worker without a model keeps the pace, limits and cache that it says it has, over a real socket."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from treadle.client import Endpoint
from treadle.client.worker import Worker
from treadle.contract.errors import ResourceExhausted, Unavailable
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc
from treadle_loadtests.stub_blocks import BlockCache, chain

READY_SECONDS = 30.0
Start = Callable[..., tuple[subprocess.Popen[bytes], Worker]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a stub worker with flags; all are ended after the test."""
    (tmp_path / "tokenizer.json").write_text("{}")
    made: list[tuple[subprocess.Popen[bytes], Worker]] = []

    def start(*flags: str) -> tuple[subprocess.Popen[bytes], Worker]:
        command = [
            sys.executable,
            "-m",
            "treadle_loadtests.stub_worker",
            "--listen",
            "127.0.0.1:0",
            "--model",
            str(tmp_path),
            *flags,
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        try:
            assert select.select([process.stdout], [], [], READY_SECONDS)[0], "no ready line"
            made.append((process, Worker(Endpoint(json.loads(process.stdout.readline())["listen"]))))
        except BaseException:
            process.kill()
            process.wait()
            raise
        return made[-1]

    yield start
    for process, worker in made:
        worker.close()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def asked(prompt: list[int], tokens: int, **more: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt_token_ids=prompt, sampling=pb.Sampling(max_tokens=tokens), **more)  # type: ignore[arg-type]  # fields of several types


def test_tokens_come_at_the_pace_that_was_set_and_each_says_when(start: Start) -> None:
    _, worker = start("--tokens-per-second", "50", "--prefill-seconds-per-token", "0.002")
    before = time.monotonic_ns()
    responses = list(worker.generate(asked(list(range(50)), 6), 10))
    came, moments = "".join(response.text_delta for response in responses).split(":")
    times = [int(moment) for moment in moments.split()]
    assert before <= int(came) <= times[0] <= time.monotonic_ns()
    assert times == sorted(times)
    assert len(times) == 6
    # Each has its own moment, whether or not the one before it was late: 50 tokens of prompt, then gaps of 20 ms.
    assert all(moment - int(came) >= 0.1e9 + number * 0.02e9 - 1e3 for number, moment in enumerate(times))
    assert responses[-1].finish_reason == pb.FINISH_REASON_LENGTH
    assert (responses[-1].usage.prompt_tokens, responses[-1].usage.completion_tokens) == (50, 6)


def test_beyond_slots_and_queue_it_refuses_and_says_when_to_try_again(start: Start) -> None:
    _, worker = start("--slots", "1", "--waiting-max", "1", "--tokens-per-second", "5")
    with Endpoint(worker._endpoint.address).channel() as channel:
        calls = [pb_grpc.WorkerServiceStub(channel).Generate(asked([1], 40), timeout=20) for _ in range(2)]
        end = time.monotonic() + 10
        while (status := worker.status()).requests_waiting < 1:
            assert time.monotonic() < end, "one is worked on, one waits"
        assert status.wait_seconds_predicted > 0
        with pytest.raises(ResourceExhausted) as refused:
            next(worker.generate(asked([1], 1), 5))
        for call in calls:
            call.cancel()
    assert refused.value.retry_after_seconds is not None
    assert refused.value.retry_after_seconds > 0


def test_a_caller_who_leaves_is_noted_with_the_moment_and_its_place_is_free(start: Start, tmp_path: Path) -> None:
    _, worker = start("--slots", "1", "--tokens-per-second", "20", "--journal", str(tmp_path / "journal"))
    call = worker.generate(asked([1], 1000, request_id="left"), 20)
    next(call)
    left_ns = time.monotonic_ns()
    call.close()  # type: ignore[attr-defined]  # it is a generator
    assert len(list(worker.generate(asked([1], 2, request_id="next"), 5))) == 2
    noted = {(line["event"], line["id"]): line for line in map(json.loads, (tmp_path / "journal").read_text().splitlines())}
    assert noted["aborted", "left"]["state"] == "decode"
    assert left_ns <= noted["aborted", "left"]["ns"] <= noted["finished", "next"]["ns"]
    assert worker.status().requests_running == 0


def test_a_beginning_that_was_there_before_is_not_computed_again_and_every_block_is_told(start: Start) -> None:
    _, worker = start("--blocks-max", "4", "--block-tokens", "4")
    first = list(worker.generate(asked(list(range(8)), 1), 5))[-1]
    second = list(worker.generate(asked([*range(8), 9, 9, 9, 9], 1), 5))[-1]
    other = list(worker.generate(asked(list(range(8)), 1, cache_salt="other"), 5))[-1]
    assert [each.usage.cached_tokens for each in (first, second, other)] == [0, 8, 0]
    assert worker.status().block_tokens == 4
    with Endpoint(worker._endpoint.address).channel() as channel:
        told = pb_grpc.WorkerServiceStub(channel).WatchBlocks(pb.WatchBlocksRequest(), timeout=5)
        there: dict[bytes, pb.CachedBlock] = {}
        for change in told:
            for block in change.stored:
                assert not block.parent or block.parent in there, "a parent comes first"
                there[block.name] = block
            if change.snapshot_complete:
                break
        salts = [block.cache_salt for block in there.values()]
        assert sorted(salts) == ["", "", "other", "other"], "four fit, and the chain lost its end"
        list(worker.generate(asked(list(range(100, 116)), 1), 5))
        change = next(told)
        assert len(change.stored) == 4
        assert set(change.removed) == set(there)


def test_draining_it_finishes_what_it_has_refuses_the_rest_and_lets_watchers_go(start: Start) -> None:
    process, worker = start("--tokens-per-second", "20", "--blocks-max", "4")
    call = worker.generate(asked([1], 20), 10)
    next(call)
    with Endpoint(worker._endpoint.address).channel() as channel:
        watching = pb_grpc.WorkerServiceStub(channel).WatchBlocks(pb.WatchBlocksRequest(), timeout=10)
        next(watching)
        os.kill(process.pid, signal.SIGTERM)
        assert len(list(call)) == 19
        with pytest.raises(Unavailable):
            list(worker.generate(asked([1], 1), 5))
        assert process.wait(READY_SECONDS) == 0


def test_a_cache_gives_a_chain_up_from_its_end() -> None:
    cache = BlockCache(3)
    long, other = chain(range(9), 3), chain(range(50, 53), 3)
    cache.store(long)
    cache.store(other)
    assert (cache.match(long), cache.match(other), len(cache)) == (2, 1, 3)
    assert cache.match(chain(range(9), 3, memory="kjv@1")) == 0

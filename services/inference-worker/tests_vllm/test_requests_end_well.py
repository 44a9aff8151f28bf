"""Requests of the engine vllm that are cancelled, late, refused, or whose memory does not come."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from worker_processes import Process, Said, living, request, say, started, until, worker_argv

from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle.inference.v1 import worker_pb2 as pb


@contextmanager
def frozen(process: Process) -> Iterator[None]:
    """While inside, it does nothing."""
    process.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.process.send_signal(signal.SIGCONT)


def counted(process: Process, name: str) -> float:
    """A counter of the worker's metrics over all its labels, or with those that are named; 0 while it is not there."""
    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=10) as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return sum(float(value) for key, _, value in lines if key == name or key.startswith(f"{name}{{"))


def patient(asked: pb.GenerateRequest, late: pb.LatePolicy.ValueType, seconds: float = 0.05) -> pb.GenerateRequest:
    asked.memory_policy.wait_seconds_max, asked.memory_policy.late = seconds, late
    return asked


def test_rows_that_do_not_come_degrade_or_fail_as_the_request_says(vllm: Worker, vllm_process: Process, pool: Process) -> None:
    failed = 'treadle_worker_requests_total{outcome="memory_missing"}'
    say(vllm, request(1100, 40, "kjv"))  # open
    before = counted(vllm_process, failed)
    with frozen(pool):
        masked = say(vllm, patient(request(1200, 70, "kjv", salt="late", max_tokens=2), pb.LATE_POLICY_MASK))
        with pytest.raises(Unavailable):
            say(vllm, patient(request(1300, 70, "kjv", max_tokens=2), pb.LATE_POLICY_FAIL))
        untouched = say(vllm, request(1400, 40, "", max_tokens=2))
    assert masked.last.degraded
    assert masked.last.memory[0].rows_missing > 0
    assert masked.last.memory[0].missing_because == "late"
    assert not untouched.last.degraded
    healthy = say(vllm, request(1200, 70, "kjv", salt="late", max_tokens=2))
    assert (healthy.last.degraded, healthy.last.usage.cached_tokens) == (False, 0)  # nothing of the degraded one was shared
    until(lambda: counted(vllm_process, "treadle_worker_engram_rows_missing_total") > 0, "the missing rows in the metrics")
    assert counted(vllm_process, failed) == before + 1
    assert any(layer.rows_missing > 0 for layer in vllm.status().engram_layers)


def test_a_caller_that_leaves_ends_its_generation(vllm: Worker, vllm_process: Process) -> None:
    before = counted(vllm_process, 'treadle_worker_requests_total{outcome="cancelled"}')
    pieces = vllm.generate(request(1500, 40, max_tokens=400), 60.0)
    assert next(iter(pieces)).token_ids
    assert vllm.status().requests_running == 1
    pieces.close()  # type: ignore[attr-defined]
    until(lambda: vllm.status().requests_running == 0, "the end of the generation", 10.0)
    assert counted(vllm_process, 'treadle_worker_requests_total{outcome="cancelled"}') == before + 1
    made = vllm.status().completion_tokens
    say(vllm, request(1500, 40, max_tokens=2))
    assert vllm.status().completion_tokens - made < 20  # the engine too had let go of it


def test_a_deadline_ends_a_generation(vllm: Worker) -> None:
    with pytest.raises(DeadlineExceeded):
        say(vllm, request(1600, 40, max_tokens=450), seconds=1.0)
    until(lambda: vllm.status().requests_running == 0, "the end of the generation", 10.0)


def test_a_full_queue_refuses_with_the_time_to_come_back(vllm: Worker) -> None:
    done: list[Said] = []
    threads = [
        threading.Thread(target=lambda at=at: done.append(say(vllm, request(1700 + at, 40, max_tokens=60)))) for at in range(6)
    ]
    for thread in threads:
        thread.start()
    try:
        until(lambda: (status := vllm.status()).requests_running == 4 and status.requests_waiting == 2, "a full queue")
        assert vllm.status().wait_seconds_predicted > 0
        with pytest.raises(ResourceExhausted) as refused:
            say(vllm, request(1800, 40))
        assert (refused.value.retry_after_seconds or 0) >= 0.5
    finally:
        for thread in threads:
            thread.join()
    assert [len(said.tokens) for said in done] == [60] * 6


@pytest.mark.parametrize(
    ("asked", "kind", "word"),
    [
        (pb.GenerateRequest(), InvalidArgument, "prompt_token_ids"),
        (pb.GenerateRequest(prompt_token_ids=[10_000_000]), InvalidArgument, "prompt_token_ids"),
        (request(0, 512), InvalidArgument, "prompt_token_ids"),
        (request(top_p=2.0), InvalidArgument, "top_p"),
        (request(temperature=5.0), InvalidArgument, "temperature"),  # vLLM's own limit is 2
        (request(memory="no-such-memory"), NotFound, "no-such-memory"),
    ],
)
def test_a_bad_request_is_refused_naming_the_field(
    vllm: Worker, asked: pb.GenerateRequest, kind: type[Exception], word: str
) -> None:
    with pytest.raises(kind, match=word):
        say(vllm, asked)


def test_no_process_listens_beyond_loopback(vllm_process: Process) -> None:
    listening = [
        (each.name(), connection.laddr)
        for each in [psutil.Process(vllm_process.process.pid), *vllm_process.children()]
        for connection in each.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert any(address.port == int(vllm_process.listen.rpartition(":")[2]) for _, address in listening), "ours is seen"
    assert [found for found in listening if found[1].ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1")] == []


def test_an_engine_that_stands_still_ends_its_requests_and_the_worker(folder: Path, pool: Process) -> None:
    failures: list[Exception] = []
    with started(*worker_argv(folder, pool.listen, "vllm", "--vllm-silent-seconds-max", "8")) as running:
        with Worker(Endpoint(running.listen)) as worker:

            def ask() -> None:
                try:
                    say(worker, request(1900, 40, max_tokens=400))
                except Exception as error:
                    failures.append(error)

            thread = threading.Thread(target=ask)
            thread.start()
            until(lambda: worker.status().requests_running == 1, "a generation")
            left = running.children()
            running.child("EngineCore").suspend()
            thread.join(60.0)
            assert running.process.wait(60.0) == 3
        assert [type(failure) for failure in failures] == [Unavailable]
        assert "the engine's process stands still" in running.log()
        until(lambda: not living(left), "the end of all its processes")


def test_the_death_of_the_engines_process_ends_requests_and_the_worker(vllm: Worker, vllm_process: Process) -> None:
    """The last test with this worker."""
    failures: list[Exception] = []

    def ask() -> None:
        try:
            say(vllm, request(1900, 40, max_tokens=400))
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: vllm.status().requests_running == 1, "a generation")
    began = time.monotonic()
    left = vllm_process.children()
    vllm_process.child("EngineCore").kill()
    thread.join(30.0)
    assert [type(failure) for failure in failures] == [Unavailable]
    assert vllm_process.process.wait(60.0) == 3
    assert time.monotonic() - began < 60.0
    assert "the engine's process has died" in vllm_process.log()
    until(lambda: not living(left), "the end of all its processes")
    with pytest.raises((Unavailable, grpc.RpcError)):
        vllm.status(2.0)

"""Pools and workers as processes, requests to them, and answers that can be compared."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import torch

import engram_pool
from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramPool
from treadle.client.worker import Worker
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc
from treadle.nn.demo_profile import smollm2_demo_template

# Between two engines in fp32. Without AVX-512 sums are taken in another order, eight numbers at a time: 1.1e-4 was seen.
DIFFERENCE_MAX = 1e-4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2e-4

FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
START_SECONDS_MAX = 600.0  # what a worker gives vLLM to start; it takes half a minute, and minutes on cores that others use too
STOP_SECONDS_MAX = 60.0
ANSWER_SECONDS_MAX = 120.0


@dataclass
class Process:
    """A service of ours. said: its standard error, in a file."""

    process: subprocess.Popen[str]
    said: Path
    listen: str = ""
    metrics: str = ""

    def children(self) -> list[psutil.Process]:
        return list(psutil.Process(self.process.pid).children(recursive=True))

    def child(self, name: str) -> psutil.Process:
        return next(each for each in self.children() if name in words_of(each))

    def log(self) -> str:
        return self.said.read_text(errors="replace")

    def end(self) -> int:
        """Told to stop; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_SECONDS_MAX)


@contextmanager
def started(*argv: str, ready: bool = True) -> Iterator[Process]:
    """A module of ours as a process; ready: it has said so. It and its children are gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="treadle-test-"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"}
    with (folder / "stderr").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv], stdout=subprocess.PIPE, stderr=said, text=True, env=environment, start_new_session=True
        )
    running = Process(process, folder / "stderr")
    try:
        if ready:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, f"it ended with {process.wait(STOP_SECONDS_MAX)}:\n{running.log()[-6000:]}"
            said_ready = json.loads(line)
            running.listen, running.metrics = said_ready["listen"], said_ready["metrics"]
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS_MAX)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # whatever is left of its session
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def words_of(process: psutil.Process) -> str:
    """Its name and its command; nothing of one that has ended meanwhile."""
    with suppress(psutil.NoSuchProcess):
        return " ".join((process.name(), *process.cmdline()))
    return ""


def living(processes: Sequence[psutil.Process]) -> list[psutil.Process]:
    """Those of them that still run."""
    found = []
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                found.append(each)
    return found


def until(condition: Callable[[], Any], what: str, seconds: float = 30.0) -> Any:
    """Poll until the condition is true; its value."""
    ends = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < ends, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.05)
    return value


@contextmanager
def started_pool(folder: Path, segments: Path) -> Iterator[Process]:
    """With the shipped memory, whose rows are added, and a random table, whose rows are shadowed."""
    with started("engram_pool", "--segment-dir", str(segments), *FREE) as running:
        with EngramPool(Endpoint(running.listen)) as pool:
            pool.load_grown(Path(engram_pool.__path__[0]) / "shipped" / "kjv")
            pool.load_random(*smollm2_demo_template(folder / "tokenizer.json"))
        yield running


def worker_argv(folder: Path, pool: str, engine: str, *more: str) -> tuple[str, ...]:
    """Small chunks, small blocks of KV to spare, rows by rpc: a pool that stops then matters."""
    return (
        "inference_worker", "--engine", engine, "--model", str(folder), *FREE, "--engram-pool", pool, "--engram-transport", "rpc", "--step-tokens-max", "48", "--sequences-max", "4",
        "--requests-waiting-max", "2", "--context-tokens-max", "512", "--kv-tokens-max", "4096", *more,
    )  # fmt: skip


@dataclass(frozen=True)
class Said:
    """An answer whole."""

    tokens: list[int]
    text: str
    logprobs: list[pb.TokenLogprob]
    prompt_logprobs: list[pb.TokenLogprob]
    last: pb.GenerateResponse

    @classmethod
    def of(cls, pieces: Sequence[pb.GenerateResponse]) -> Said:
        return cls(
            [token for piece in pieces for token in piece.token_ids], "".join(piece.text_delta for piece in pieces),
            [each for piece in pieces for each in piece.logprobs], [each for piece in pieces for each in piece.prompt_logprobs], pieces[-1],
        )  # fmt: skip

    def same_as(self, other: Said) -> None:
        """Raise unless tokens and text are the same and no log-probability, of the best ones too, differs by more than DIFFERENCE_MAX."""
        assert self.tokens == other.tokens
        assert self.text == other.text
        for mine, theirs in ((self.logprobs, other.logprobs), (self.prompt_logprobs, other.prompt_logprobs)):
            assert [(each.token_id, each.text) for each in mine] == [(each.token_id, each.text) for each in theirs]
            for one, two in zip(mine, theirs, strict=True):
                assert [top.token_id for top in one.top] == [top.token_id for top in two.top]
                worst = max(abs(a.logprob - b.logprob) for a, b in zip((one, *one.top), (two, *two.top), strict=True))
                assert worst <= DIFFERENCE_MAX, f"log-probabilities differ by up to {worst:.6f}"
        usages = [(each.last.usage.prompt_tokens, each.last.usage.completion_tokens) for each in (self, other)]
        assert usages[0] == usages[1]
        assert self.last.finish_reason == other.last.finish_reason


def request(first: int = 100, count: int = 70, memory: str | None = "", *, salt: str = "", **sampling: Any) -> pb.GenerateRequest:
    """A greedy request for a few tokens. memory: a name, "" for none, None for what the worker gives by itself."""
    asked = pb.GenerateRequest(
        request_id="t", prompt_token_ids=range(first, first + count), cache_salt=salt,
        sampling=pb.Sampling(**{"max_tokens": 10, "ignore_eos": True, "top_logprobs": 3} | sampling),
    )  # fmt: skip
    if memory is not None:
        asked.engram.model = memory
    return asked


def say(worker: Worker, asked: pb.GenerateRequest, seconds: float = ANSWER_SECONDS_MAX) -> Said:
    """The whole answer."""
    return Said.of(list(worker.generate(asked, seconds)))


def snapshot(process: Process) -> list[pb.CachedBlock]:
    """The blocks that lie in a worker's prefix cache now."""
    blocks: list[pb.CachedBlock] = []
    with grpc.insecure_channel(process.listen) as channel:
        for changes in pb_grpc.WorkerServiceStub(channel).WatchBlocks(pb.WatchBlocksRequest(), timeout=10.0):
            blocks += changes.stored
            if changes.snapshot_complete:
                break
    return blocks

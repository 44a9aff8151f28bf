"""`treadle bench hints`: what a prompt that the gateway tells to the pool is worth to the lookup that follows.

A pool that reads its rows from a disk, a gateway that hints and one that does not, and a worker of the benchmark's own, which looks a
prompt's rows up by the socket as soon as it would begin. Before each request what the page cache has of the tables is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import numpy as np

from treadle.client import Endpoint
from treadle.client.engram import EngramHandle, EngramPool
from treadle.contract import PROTO_VERSION, Windows
from treadle.contract.families import demo_model
from treadle.contract.row_layout import RowLayout
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc
from treadle_bench.answers import Lines
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row, interleave, rows_of

NAME, IDS = "hints", 256  # a byte-level tokenizer has as many
PROMPT_TOKENS = 256
WAITS_SECONDS, WAITS_SECONDS_QUICK = (0.0, 0.05, 0.3), (0.0, 0.3)  # until a worker begins: its queue, and the step before
ROUNDS, ROUNDS_QUICK = 40, 8
START_SECONDS_MAX = 60.0
SPEEDUP_GOAL = 2.0


def measure(*, quick: bool) -> tuple[list[Row], list[Goal], list[str]]:
    """Milliseconds of the lookup of a cold prompt's rows, all layers, with and without a hint before."""
    rows: list[Row] = []
    rounds = ROUNDS_QUICK if quick else ROUNDS
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-bench-hints-", dir="/var/tmp")))
        pool = stack.enter_context(pool_process(folder, ("--tier", "disk", "--scrub-bytes-per-second", "0")))
        handle = stack.enter_context(_loaded(pool.address))
        worker = stack.enter_context(_worker(handle, folder))
        hinting = stack.enter_context(_gateway(worker.address, "--engram-pool", pool.address))
        silent = stack.enter_context(_gateway(worker.address))
        for wait in WAITS_SECONDS_QUICK if quick else WAITS_SECONDS:
            worker.wait_seconds = wait
            variants = {"no hint": silent, "hint": hinting}
            samples = interleave({name: _one(door, worker, folder, name) for name, door in variants.items()}, rounds)
            rows += rows_of(samples, {"prompt": PROMPT_TOKENS, "wait_ms": round(wait * 1e3)}, "ms", "no hint")
    last = [row for row in rows if row.name == "hint"][-1]
    gain = 1 / last.ratio if last.ratio else 0.0
    notes = [f"tables on {_file_system()} below /var/tmp; what the page cache has of them is dropped before each request"]
    return rows, [Goal("a hint a while before: times faster", gain, SPEEDUP_GOAL, at_least=True)], notes


def _file_system() -> str:
    answer = subprocess.run(["stat", "-f", "-c", "%T", "/var/tmp"], capture_output=True, text=True, check=True)
    return answer.stdout.strip()


@contextmanager
def _loaded(address: str) -> Iterator[EngramHandle]:
    token_map = np.arange(IDS, dtype=np.int32)
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    model = demo_model(
        NAME,
        layers=(2, 15),
        token_map=digest,
        compressed_vocab_size=IDS,
        pad_id=2,
        prime_base=20_000,
        row=RowLayout(320, 160, "bf16"),
    )
    with EngramPool(Endpoint(address)) as pool:
        pool.load_random(model, token_map)
        with pool.open(NAME, transport="socket") as handle:
            yield handle


def _one(door: httpx.Client, worker: _Worker, folder: Path, name: str) -> Any:
    chance = np.random.default_rng(hash(name) % (1 << 32))

    def request(number: int) -> float:
        prompt = chance.integers(0, IDS, PROMPT_TOKENS).tolist()
        _drop_pages(folder)
        answer = door.post("/v1/completions", json={"model": NAME, "prompt": prompt, "max_tokens": 1})
        assert answer.status_code == 200, answer.text
        return worker.lookup_seconds.pop() * 1e3

    return request


def _drop_pages(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_size > 1 << 20:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


class _Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Begins with a prompt after `wait_seconds`: looks its rows up, and answers with one token. A thread with a loop of its own."""

    def __init__(self, handle: EngramHandle, model_dir: Path) -> None:
        self.wait_seconds, self.lookup_seconds, self.address = 0.0, list[float](), ""
        self._handle, self._model_dir = handle, model_dir
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bench-worker", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(START_SECONDS_MAX)

    async def Generate(self, request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:  # noqa: N802
        await asyncio.sleep(self.wait_seconds)
        windows = Windows.of_sequences([(list(request.prompt_token_ids), 0)], self._handle.model.order_max - 1)
        begun = time.perf_counter()
        await asyncio.to_thread(self._handle.lookup, windows)
        self.lookup_seconds.append(time.perf_counter() - begun)
        usage = worker_pb2.Usage(prompt_tokens=len(request.prompt_token_ids), completion_tokens=1)
        yield worker_pb2.GenerateResponse(token_ids=[1], text_delta="x", finish_reason=worker_pb2.FINISH_REASON_LENGTH, usage=usage)

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.StatusResponse:  # noqa: N802
        tokenizer = hashlib.sha256((self._model_dir / "tokenizer.json").read_bytes()).hexdigest()
        memory = worker_pb2.EngramModelStatus(model=NAME, version=self._handle.version, default=True, open=True)
        return worker_pb2.StatusResponse(
            model=NAME, context_tokens_max=4096, proto_version=PROTO_VERSION, build_version="0", pid=os.getpid(), engram_models=[memory],
            engram_model=NAME, model_dir=str(self._model_dir), tokenizer_digest=tokenizer,
        )  # fmt: skip

    async def _start(self) -> None:
        self._server = grpc.aio.server()
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    def close(self) -> None:
        """Stop serving."""
        asyncio.run_coroutine_threadsafe(self._server.stop(None), self._loop).result(START_SECONDS_MAX)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_SECONDS_MAX)


@contextmanager
def _worker(handle: EngramHandle, folder: Path) -> Iterator[_Worker]:
    worker = _Worker(handle, _model_dir(folder / "model"))  # type: ignore[abstract]  # the RPCs that nobody here calls
    try:
        yield worker
    finally:
        worker.close()


def _model_dir(folder: Path) -> Path:
    """A byte-level tokenizer, as much of a model as a gateway needs."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])).save(
        str(folder / "tokenizer.json")
    )
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return folder


@contextmanager
def _gateway(worker: str, *flags: str) -> Iterator[httpx.Client]:
    command = [sys.executable, "-m", "inference_gateway", "--listen", "127.0.0.1:0", "--worker", worker, "--log-level", "warning"]
    process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = Lines(process.stdout).within(START_SECONDS_MAX)
        if line is None:
            raise RuntimeError("the gateway does not start")
        ready = json.loads(line)
        with httpx.Client(base_url=f"http://{ready['listen']}", timeout=START_SECONDS_MAX, trust_env=False) as client:
            until = time.monotonic() + START_SECONDS_MAX
            while client.get("/ready").status_code != 200:
                if time.monotonic() > until:
                    raise RuntimeError("the gateway does not get ready")
                time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(START_SECONDS_MAX)
        process.stdout.close()

"""A gateway in a process of its own, a worker that answers from a script over a real socket, and a tiny model folder."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from treadle.contract import PROTO_VERSION
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc

sys.path.append(str(Path(__file__).parent))  # called_workers.py
READY_SECONDS = 60.0
MODEL = "tiny-chat"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
Script = Callable[[worker_pb2.GenerateRequest, Any], AsyncIterator[worker_pb2.GenerateResponse]]


def wait_until(holds: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Poll `holds` until it is true; fail the test, naming `what`, when that takes too long."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def write_model_dir(folder: Path) -> Path:
    """A byte-level tokenizer of 256 bytes and two special tokens, with a ChatML template."""
    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}))
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def digest_of(folder: Path) -> str:
    """The digest that a worker tells of its tokenizer."""
    return hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()


def memories() -> list[worker_pb2.EngramModelStatus]:
    """What the scripted worker has to choose from: a default one, two grown ones, and one that does not fit."""
    return [
        worker_pb2.EngramModelStatus(model="code", version="c0de" * 16),
        worker_pb2.EngramModelStatus(model="foreign", version="f0" * 32, refusal="token_map differs: made for another tokenizer"),
        worker_pb2.EngramModelStatus(model="kjv", version="1b" * 32, open=True, transport="mapped", fused=True),
        worker_pb2.EngramModelStatus(model="smollm2-demo", version="ab" * 32, default=True, open=True, transport="mapped"),
    ]


def prefixes() -> list[worker_pb2.PrefixStatus]:
    """The long prefixes that the scripted worker has to choose from: one that is open, one that does not fit."""
    return [
        worker_pb2.PrefixStatus(name="foreign", version="f0" * 32, prefix_tokens=50, refusal="made with another language model"),
        worker_pb2.PrefixStatus(name="rules", version="2c" * 32, prefix_tokens=900, open=True, mapped_bytes=1 << 20, fallbacks=3),
    ]


def prefix_report(request: worker_pb2.GenerateRequest, **more: Any) -> worker_pb2.MemoryReport:
    """What the scripted worker says of the prefix that it used for a request."""
    told: dict[str, Any] = {
        "kind": "prefix", "name": request.prefix.name, "version": "2c" * 32, "transport": "mapped", "lookups": 400, "lookups_outside": 12,
        "prefix_tokens": 900,
    }  # fmt: skip
    return worker_pb2.MemoryReport(**(told | more))


def memory_reports(request: worker_pb2.GenerateRequest) -> list[worker_pb2.MemoryReport]:
    """What the scripted worker says of the memory that it used for a request."""
    name = request.engram.model if request.HasField("engram") else "smollm2-demo"
    versions = {memory.model: memory.version for memory in memories()}
    return [
        worker_pb2.MemoryReport(
            kind="engram", name=name, version=versions.get(name, ""), transport="mapped",
            tickets=6, tickets_in_time=5, rows_missing=0, shadowed=name == "smollm2-demo",
        )
    ] * bool(name) + [prefix_report(request)] * request.HasField("prefix")  # fmt: skip


def last_message(
    request: worker_pb2.GenerateRequest, tokens: int, reason: worker_pb2.FinishReason.ValueType, **more: Any
) -> worker_pb2.GenerateResponse:
    """The message that ends an answer."""
    usage = worker_pb2.Usage(prompt_tokens=len(request.prompt_token_ids), cached_tokens=3, completion_tokens=tokens)
    return worker_pb2.GenerateResponse(finish_reason=reason, usage=usage, memory=memory_reports(request), **more)


async def say_hello(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """`Hé there`, a token a byte, as far as max_tokens goes; the two bytes of é come as a worker sends them."""
    said = "Hé there".encode()
    count = min(len(said), request.sampling.max_tokens or len(said))
    pending = b""
    for number in range(count):
        letter = said[number : number + 1]
        pending += letter
        try:
            text, pending = pending.decode(), b""
        except UnicodeDecodeError:
            text = ""
        logprobs = [_logprob(letter, request.sampling.top_logprobs)] if request.sampling.HasField("top_logprobs") else []
        yield worker_pb2.GenerateResponse(token_ids=letter, text_delta=text, logprobs=logprobs)
    reason = worker_pb2.FINISH_REASON_STOP if count == len(said) else worker_pb2.FINISH_REASON_LENGTH
    yield last_message(request, count, reason)


def _logprob(letter: bytes, top: int) -> worker_pb2.TokenLogprob:
    rivals = [worker_pb2.TokenLogprob(token_id=number, text=bytes([65 + number]), logprob=-2.0 - number) for number in range(top)]
    return worker_pb2.TokenLogprob(token_id=letter[0], text=letter, logprob=-0.5, top=rivals)


async def never_end(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """A token every 10 ms until somebody stops it."""
    while True:
        yield worker_pb2.GenerateResponse(token_ids=b"x", text_delta="x")
        await asyncio.sleep(0.01)


async def break_off(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """`Hé`, and then the worker is gone."""
    yield worker_pb2.GenerateResponse(token_ids=b"H", text_delta="H")
    yield worker_pb2.GenerateResponse(token_ids="é".encode(), text_delta="é")
    await context.abort(grpc.StatusCode.UNAVAILABLE, "swapping", (("treadle-error", "Unavailable"),))


async def degrade(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """An answer whose first token was made with memory missing."""
    yield worker_pb2.GenerateResponse(token_ids=b"H", text_delta="H", degraded=True)
    yield worker_pb2.GenerateResponse(token_ids=b"i", text_delta="i")
    last = last_message(request, 2, worker_pb2.FINISH_REASON_STOP)
    for report in last.memory:
        report.rows_missing, report.missing_because = 3, "late"
    yield last


def refuse_with(code: grpc.StatusCode, details: str = "as the test wants it", *trailing: tuple[str, str]) -> Script:
    """A worker that refuses before the first token."""

    async def refuse(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        await context.abort(code, details, (("treadle-error", "AsTheTestWantsIt"), *trailing))
        yield worker_pb2.GenerateResponse()

    return refuse


def wait_first(seconds: float) -> Script:
    """A worker that says hello after a while."""

    async def wait(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
        await asyncio.sleep(seconds)
        async for response in say_hello(request, context):
            yield response

    return wait


async def flood(request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:
    """More text than the buffers on the way hold, as fast as it is taken."""
    while True:
        yield worker_pb2.GenerateResponse(token_ids=b"x", text_delta="x" * 65536)


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    """A WorkerService on a free port of loopback, in a thread with a loop of its own."""

    def __init__(self, model_dir: Path) -> None:
        self._status = {"model_dir": str(model_dir), "tokenizer_digest": digest_of(model_dir), "engram_model": "smollm2-demo"}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted-worker")
        self._thread.start()
        self._server: grpc.aio.Server | None = None
        self.port = 0
        self.reset()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reset(self) -> None:
        self.script: Script = say_hello
        self.status: dict[str, Any] = {
            "model": MODEL, "context_tokens_max": 256, "proto_version": PROTO_VERSION, "build_version": "0", "pid": os.getpid(),
            "engram_models": memories(), "prefixes": prefixes(), "embedding_dim": 2,
        } | self._status  # fmt: skip
        self.blocks: list[worker_pb2.CachedBlock] = []  # of its prefix cache
        self.requests: list[worker_pb2.GenerateRequest] = []
        self.embeds: list[worker_pb2.EmbedRequest] = []
        self.timeouts: list[float] = []
        self.written = 0  # messages of answers
        self.keys: list[str] = []
        self.traces: list[str] = []
        self.cancelled = threading.Event()

    def start(self) -> None:
        self._run(self._start())

    def stop(self) -> None:
        """Stop serving; `start` serves on the same port again."""
        self._run(self._stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def Generate(self, request: worker_pb2.GenerateRequest, context: Any) -> AsyncIterator[worker_pb2.GenerateResponse]:  # noqa: N802
        self.requests.append(request)
        self.timeouts.append(context.time_remaining())
        self.traces += [value for name, value in context.invocation_metadata() if name == "traceparent"]
        self.keys += [value for name, value in context.invocation_metadata() if name == "authorization"]
        await self._check_memory(request, context)
        try:
            async for response in self.script(request, context):
                yield response
                self.written += 1
        except (asyncio.CancelledError, GeneratorExit):  # while it made a message, or while one was on its way
            self.cancelled.set()
            raise

    async def _check_memory(self, request: worker_pb2.GenerateRequest, context: Any) -> None:
        """Refuse a memory or prefix that the status does not list, or lists with a refusal."""
        await self._check_prefix(request, context)
        name = request.engram.model
        refusals = {memory.model: memory.refusal for memory in self.status["engram_models"]}
        if not name or name == self.status["engram_model"]:
            return
        if name not in refusals:
            there = ", ".join(repr(other) for other, refusal in refusals.items() if not refusal)
            told = (("treadle-error", "NotFound"),)
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no memory {name!r} here; there are {there}", told)
        if refusals[name]:
            field = (("treadle-error", "FingerprintMismatch"), ("treadle-field", "token_map"))
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusals[name], field)

    async def _check_prefix(self, request: worker_pb2.GenerateRequest, context: Any) -> None:
        name = request.prefix.name
        refusals = {prefix.name: prefix.refusal for prefix in self.status["prefixes"]}
        if name and name not in refusals:
            text = f"prefix.name: there is no prefix {name!r} here; there is 'rules'"
            await context.abort(grpc.StatusCode.NOT_FOUND, text, (("treadle-error", "NotFound"),))
        if name and refusals[name]:
            field = (("treadle-error", "PrefixMisfit"), ("treadle-field", "model.rope"))
            text = f"prefix {name!r} was made with another language model: fingerprint field 'model.rope' differs"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, text, field)

    async def Embed(self, request: worker_pb2.EmbedRequest, context: Any) -> worker_pb2.EmbedResponse:  # noqa: N802
        self.embeds.append(request)
        vectors = [struct.pack("<2f", len(each.token_ids), each.token_ids[0]) for each in request.inputs]
        return worker_pb2.EmbedResponse(embeddings=[worker_pb2.Embedding(values=vector) for vector in vectors])

    async def WatchBlocks(  # noqa: N802
        self, request: worker_pb2.WatchBlocksRequest, context: Any
    ) -> AsyncIterator[worker_pb2.WatchBlocksResponse]:
        yield worker_pb2.WatchBlocksResponse(stored=self.blocks, snapshot_complete=True)
        while True:
            await asyncio.sleep(1)
            yield worker_pb2.WatchBlocksResponse()

    async def Status(self, request: worker_pb2.StatusRequest, context: Any) -> worker_pb2.StatusResponse:  # noqa: N802
        return worker_pb2.StatusResponse(**self.status)

    async def _start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    async def _stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=10)


class Gateway:
    """A gateway process that printed its ready line."""

    def __init__(self, flags: list[str], log_path: Path) -> None:
        self._log_path = log_path
        with log_path.open("wb") as log:
            command = [sys.executable, "-m", "inference_gateway", "--listen", "127.0.0.1:0", *flags]
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        self.ready = self._ready_line()
        self.url = f"http://{self.ready['listen']}"
        self.http = httpx.Client(base_url=self.url, timeout=20, trust_env=False)

    def _ready_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], READY_SECONDS)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"no ready line; log: {self.log}")
        ready: dict[str, Any] = json.loads(line)
        return ready

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def is_ready(self) -> bool:
        return self.http.get("/ready").status_code == 200

    def wait_ready(self) -> None:
        wait_until(self.is_ready, "the gateway is ready")

    def figure(self, name: str, **labels: str) -> float:
        """Value of a metric; 0 where it was never counted."""
        wanted = name + ("{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}" if labels else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(wanted + " "):
                return float(line.split()[-1])
        return 0.0

    def chat(self, content: str = "hi", **more: Any) -> httpx.Response:
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], **more}
        return self.http.post("/v1/chat/completions", json=body)

    def terminate(self, seconds: float = 30.0) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def session_worker(model_dir: Path) -> Iterator[ScriptedWorker]:
    worker = ScriptedWorker(model_dir)
    worker.start()
    yield worker
    worker.close()


@pytest.fixture
def worker(session_worker: ScriptedWorker) -> ScriptedWorker:
    """The worker behind `gateway`, with nothing left of earlier tests."""
    session_worker.reset()
    return session_worker


@pytest.fixture
def other_worker(model_dir: Path) -> Iterator[ScriptedWorker]:
    """A worker of this test alone, not yet started."""
    worker = ScriptedWorker(model_dir)
    yield worker
    worker.close()


@pytest.fixture(scope="session")
def session_gateway(session_worker: ScriptedWorker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    flags = [
        "--worker",
        session_worker.address,
        "--worker-poll-seconds",
        "0.1",
        "--body-bytes-max",
        "20000",
        "--log-level",
        "debug",
    ]
    gateway = Gateway(flags, tmp_path_factory.mktemp("gateway") / "log")
    try:
        gateway.wait_ready()
        yield gateway
        assert gateway.terminate() == 0
    finally:
        gateway.close()


@pytest.fixture
def gateway(session_gateway: Gateway, worker: ScriptedWorker) -> Gateway:
    """One gateway for all tests that do not stop it, in front of `worker`."""
    return session_gateway


@pytest.fixture
def start_gateway(tmp_path: Path) -> Iterator[Callable[..., Gateway]]:
    """Starts a gateway with flags; it is stopped after the test."""
    started: list[Gateway] = []

    def start(*flags: str) -> Gateway:
        started.append(Gateway(["--worker-poll-seconds", "0.1", *flags], tmp_path / f"log-{len(started)}"))
        return started[-1]

    yield start
    for gateway in started:
        gateway.close()


@pytest.fixture
def scripts() -> dict[str, Any]:
    """Answers that a test can give to `worker.script`; the last two make one from what they are given."""
    return {
        "hello": say_hello, "endless": never_end, "broken": break_off, "degraded": degrade, "flood": flood,
        "refuse_with": refuse_with, "wait_first": wait_first,
    }  # fmt: skip

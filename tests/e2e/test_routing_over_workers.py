"""Two real workers behind one gateway: a conversation goes on where its beginning lies, and workers come and go.

Processes of their own, no pool: what is routed here is the prefix cache of the embedded engine.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import until

READY_SECONDS = 120.0
DRAIN_SECONDS = 90.0  # what runs at a worker must end within its drain, on a machine that is busy with other things too
PATIENT = ("--drain-seconds", str(DRAIN_SECONDS - 10))
REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="no redis-server here: apt-get install redis-server")
LONG = "Tell me about the weaving of cloth on a loom, about warp and weft and about the treadles under it. " * 6


class Service:
    """A process that printed its ready line."""

    def __init__(self, module: str, *flags: str, log: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            command = [sys.executable, "-m", module, "--listen", "127.0.0.1:0", *flags]
            environment = {name: value for name, value in os.environ.items() if name != "TREADLE_REDIS_URL"}
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=sink, env=environment)
        assert self.child.stdout is not None
        readable, _, _ = select.select([self.child.stdout], [], [], READY_SECONDS)
        line = self.child.stdout.readline() if readable else b""
        if not line:
            self.end()
            raise AssertionError(f"no ready line of {module}: {log.read_text()[-2000:]}")
        self.address = str(json.loads(line)["listen"])

    def end(self, number: int = signal.SIGKILL, seconds: float = 30.0) -> int:
        if self.child.poll() is None:
            self.child.send_signal(number)
        code = self.child.wait(seconds)
        if self.child.stdout is not None:
            self.child.stdout.close()
        return code


class Gateway(Service):
    """The gateway, and what it says."""

    def __init__(self, *flags: str, log: Path) -> None:
        super().__init__("inference_gateway", "--worker-poll-seconds", "0.2", *flags, log=log)
        self.http = httpx.Client(base_url=f"http://{self.address}", timeout=120, trust_env=False)

    def ready(self) -> bool:
        return self.http.get("/ready").status_code == 200

    def figure(self, name: str, **labels: str) -> float:
        """A metric; 0 where it is not there."""
        shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        wanted = name + (f"{{{shown}}}" if shown else "")
        for line in self.http.get("/metrics").text.splitlines():
            if line.startswith(f"{wanted} "):
                return float(line.split()[-1])
        return 0.0

    def wait_for_ready(self, name: str) -> None:
        until(lambda: self.figure("treadle_gateway_worker_state", state="ready", worker=name) == 1)

    def blocks(self, name: str) -> float:
        return self.figure("treadle_gateway_index_blocks", worker=name)

    def chat(self, *turns: str, tokens: int = 4) -> tuple[str, int, str]:
        """The worker that answered, the tokens that it found in its cache, and the answer."""
        roles = ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)]
        body = {"model": "smollm2-135m", "messages": messages, "max_tokens": tokens, "temperature": 0}
        answer = self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        said = answer.json()
        cached = said["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-treadle-worker"], cached, said["choices"][0]["message"]["content"]


class Workers:
    """Real workers of the embedded engine, by name."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self._model_dir, self._folder, self._count = model_dir, folder, 0
        self.running: dict[str, Service] = {}

    def start(self, name: str, *flags: str) -> Service:
        self._count += 1
        self.running[name] = Service(
            "inference_worker", "--model", str(self._model_dir), "--served-model-name", "smollm2-135m", "--engram-pool", "",
            "--metrics-listen", "127.0.0.1:0", *flags, log=self._folder / f"worker-{name}-{self._count}",
        )  # fmt: skip
        return self.running[name]

    @property
    def flag(self) -> str:
        return ",".join(f"{name}={service.address}" for name, service in self.running.items())

    def end(self) -> None:
        for service in self.running.values():
            service.end()


@pytest.fixture
def workers(model_dir: Path, tmp_path: Path) -> Iterator[Workers]:
    made = Workers(model_dir, tmp_path)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def gateway_to(folder: Path, *flags: str, name: str = "gateway") -> Iterator[Gateway]:
    gateway = Gateway(*flags, log=folder / name)
    try:
        until(gateway.ready, READY_SECONDS)
        yield gateway
    finally:
        gateway.http.close()
        gateway.end()


def test_a_conversation_goes_on_where_its_beginning_lies_and_survives_gateway_and_worker(workers: Workers, tmp_path: Path) -> None:
    workers.start("a")
    workers.start("b")
    with gateway_to(tmp_path, "--worker", workers.flag) as gateway:
        until(lambda: all(gateway.figure("treadle_gateway_worker_state", state="ready", worker=name) for name in "ab"))
        first, cached, answer = gateway.chat(LONG)
        assert cached == 0
        until(lambda: gateway.blocks(first) >= 3)
        other = "b" if first == "a" else "a"
        elsewhere, _, _ = gateway.chat(f"Something else. {LONG}")
        assert elsewhere == other  # nobody has it, and it was not asked for longest
        home, cached, _ = gateway.chat(LONG, answer, "And the shuttle?")
        assert home == first
        assert cached >= 3 * 32
        assert gateway.figure("treadle_gateway_routed_total", by="hit") == 1
        known = gateway.blocks(first)

    with gateway_to(tmp_path, "--worker", workers.flag, name="next") as gateway:  # it knows nothing but what workers tell
        until(lambda: gateway.blocks(first) >= known)  # more were told while they were looked at
        home, cached, _ = gateway.chat(LONG, answer, "And the reed?")
        assert home == first
        assert cached >= 3 * 32
        workers.running[first].end()
        home, cached, _ = gateway.chat(LONG, answer, "And the heddles?")
        assert (home, cached) == (other, 0)
        until(lambda: gateway.blocks(first) == 0)


@needs_redis
def test_workers_that_are_replaced_under_load_lose_nobody(workers: Workers, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(redis_at(tmp_path))
        for name in "ab":
            workers.start(name, "--redis-url", url, "--name", name, *PATIENT)
        gateway = stack.enter_context(gateway_to(tmp_path, "--redis-url", url))
        for name in "ab":
            gateway.wait_for_ready(name)
        load = stack.enter_context(Load(gateway))
        load.wait_for(4)
        for name in "ab":
            assert workers.running[name].end(signal.SIGTERM, DRAIN_SECONDS) == 0
            load.wait_for(2)
            workers.start(name, "--redis-url", url, "--name", name, *PATIENT)
            gateway.wait_for_ready(name)
        load.wait_for(4)
    assert load.failed == []
    assert load.seen == {"a", "b"}


class Load:
    """Three clients that chat without a pause until it is left."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway, self._stop = gateway, threading.Event()
        self.answered, self.failed, self.seen = 0, list[str](), set[str]()
        self._threads = [threading.Thread(target=self._chat, args=(number,)) for number in range(3)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def wait_for(self, more: int) -> None:
        """More answers than there are now."""
        wanted = self.answered + more
        until(lambda: self.answered >= wanted)

    def _chat(self, number: int) -> None:
        while not self._stop.is_set():
            try:
                worker, _, _ = self._gateway.chat(f"Client {number} counts to {self.answered}.", tokens=12)
            except (AssertionError, httpx.HTTPError, KeyError) as error:
                self.failed.append(f"{type(error).__name__}: {error}")
                continue
            self.seen.add(worker)
            self.answered += 1


@contextmanager
def redis_at(folder: Path) -> Iterator[str]:
    """The URL of a Redis of this test alone."""
    assert REDIS is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [REDIS, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(folder)]
    child: subprocess.Popen[Any] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until(lambda: _listens(port))
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.kill()
        child.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0

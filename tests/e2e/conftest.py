"""A fabric brought up as a user would: `treadle up --detach`, in a home of its own. One for all tests, as a worker takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from treadle.nn import model_fetch

COMMAND_SECONDS_MAX = 300
HAPPENS_SECONDS_MAX = 120.0  # a worker that is started again takes a tenth of it, on a machine that does nothing else
PLAIN_KEY, KJV_KEY = "plain-key", "kjv-key"  # the second's requests use the memory unless they choose


@dataclass(frozen=True)
class RunningFabric:
    """What `treadle up` said, and the home it runs in: the shipped memory is there, chosen by requests, its rows mapped."""

    home: Path
    state: dict[str, Any]

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return run_treadle(self.home, *words)

    def status(self) -> dict[str, Any]:
        """`treadle status --json`; its exit code is not 0 while a service is away."""
        document: dict[str, Any] = json.loads(self.run("status", "--json").stdout)
        return document

    def service(self, name: str) -> dict[str, Any]:
        return next(service for service in self.status()["services"] if service["service"] == name)

    @property
    def worker_key(self) -> str:
        """That its workers ask for; those that others start beside it ask for none."""
        return Path(self.state["worker_key_file"]).read_text().strip()

    @property
    def url(self) -> str:
        return str(self.state["gateway_url"])

    @property
    def model(self) -> str:
        return str(self.state["model"])

    def client(self, key: str = PLAIN_KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=120)


def run_treadle(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TREADLE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "treadle.cli", *words], env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX
    )


def until(condition: Callable[[], Any], seconds: float = HAPPENS_SECONDS_MAX) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.1)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return model_fetch.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    home = tmp_path_factory.mktemp("home")
    keys = home / "keys"
    keys.write_text(f"{PLAIN_KEY}\n{KJV_KEY} engram=kjv\n")
    keys.chmod(0o600)
    up = run_treadle(
        home, "up", "--detach", "--json", "--gateway-port", "0", "--port-base", "0", "--engram-transport", "mapped", "--model", str(model_dir),
        "--api-key-file", str(keys),
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    running = RunningFabric(home, json.loads(up.stdout))
    yield running
    down = running.run("down")
    assert down.returncode == 0, down.stderr
    assert not Path(running.state["segment_dir"]).exists()


@pytest.fixture(scope="session")
def workers(fabric: RunningFabric, model_dir: Path) -> Iterator[dict[str, str]]:
    """Addresses of workers on the fabric's pool by how rows reach them: the fabric's own, which maps, and two beside it."""
    pool = fabric.service("engram-pool")["address"]
    with ExitStack() as stack:
        children = {}
        for transport in ("local", "rpc"):
            command = [
                sys.executable, "-m", "inference_worker", "--model", str(model_dir), "--engram-pool", pool, "--engram-transport", transport,
                "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
            ]  # fmt: skip
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(child.kill)
            children[transport] = child
        yield {"mapped": fabric.service("inference-worker")["address"]} | {
            transport: json.loads(child.stdout.readline())["listen"]
            for transport, child in children.items()
            if child.stdout is not None
        }
        for child in children.values():
            child.terminate()
        assert [child.wait(HAPPENS_SECONDS_MAX) for child in children.values()] == [0, 0]

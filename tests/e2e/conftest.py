"""A fabric brought up as a user would: `treadle up --detach`, in a home of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from treadle.nn import model_fetch

COMMAND_SECONDS_MAX = 300


@dataclass(frozen=True)
class RunningFabric:
    """What `treadle up` said, and the home it runs in. Its rows are fused: wrong or zero rows change the answers."""

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
    def url(self) -> str:
        return str(self.state["gateway_url"])

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=120)


def run_treadle(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TREADLE_HOME": str(home)}
    return subprocess.run(
        [sys.executable, "-m", "treadle.cli", *words], env=environment, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX
    )


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return model_fetch.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def fabric(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFabric]:
    home = tmp_path_factory.mktemp("home")
    up = run_treadle(
        home, "up", "--detach", "--json", "--gateway-port", "0", "--port-base", "0", "--engram-fusion", "on", "--engram-transport", "mapped",
        "--model", str(model_dir),
    )  # fmt: skip
    assert up.returncode == 0, up.stderr
    running = RunningFabric(home, json.loads(up.stdout))
    yield running
    down = running.run("down")
    assert down.returncode == 0, down.stderr
    assert not Path(running.state["segment_dir"]).exists()

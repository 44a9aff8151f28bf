"""The worker as a process: ready line, drain, and one clear line where it cannot start; and `treadle model`."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from typer.testing import CliRunner

from inference_worker.commands import app
from inference_worker.settings import EngineChoice, EngramTransport, Settings
from treadle.chassis.settings import WrongSetting
from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker
from treadle.contract.errors import NotFound
from treadle.contract.lookup_settings import LookupIndex, LookupSettings
from treadle.contract.policy import Late, TransportChoice, WaitPolicy
from treadle.inference.v1 import worker_pb2 as pb
from treadle.nn.model_folder import find_model_folder

FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")


def run(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*argv), capture_output=True, text=True, timeout=60, check=False, env=_environment())


def _command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "inference_worker", *FREE, *argv]


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


@pytest.fixture
def process(tiny_folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = _command("--model", str(tiny_folder), "--engram-transport", "off")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=_environment()) as child:
        yield child
        child.kill()


def test_a_worker_says_when_it_is_ready_serves_and_drains(process: subprocess.Popen[str], tiny_folder: Path) -> None:
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["ready"], ready["service"], ready["pid"]) == (True, "inference-worker", process.pid)
    with Worker(Endpoint(ready["listen"])) as worker:
        asked = pb.GenerateRequest(prompt_token_ids=[1, 2, 3], sampling=pb.Sampling(max_tokens=4, ignore_eos=True))
        responses = list(worker.generate(asked, 30.0))
        status = worker.status()
    assert sum(len(response.token_ids) for response in responses) == 4
    assert (status.model, status.model_dir, status.pid) == ("tiny", str(tiny_folder), process.pid)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 0


def test_a_default_memory_whose_pool_is_not_there_ends_the_start_with_one_line(tiny_folder: Path) -> None:
    done = run(
        "--model", str(tiny_folder), "--engram-model", "kjv", "--engram-pool", "127.0.0.1:1", "--engram-open-seconds-max", "0",
        "--log-level", "error",
    )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    ("argv", "word", "code"),
    [
        (("--step-tokens-max", "1"), "step_tokens_max", 2),
        (("--engram-fusion", "maybe"), "--engram-fusion", 2),
        (("--engram-wait-seconds-max", "-1"), "wait_seconds_max", 2),
        (("--model", "/nowhere"), "/nowhere", 1),
        (("--engine", "vllm", "--engram-prefetch", "false"), "engram_prefetch", 2),
        pytest.param(
            ("--engine", "vllm"),
            "make vllm-env",
            1,
            marks=pytest.mark.skipif(
                importlib.util.find_spec("vllm") is not None, reason="vllm is installed here: nothing is refused"
            ),
        ),
    ],
)
def test_a_wrong_setting_ends_the_start_with_one_line(argv: tuple[str, ...], word: str, code: int) -> None:
    done = run(*argv)
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert word in done.stderr


@pytest.mark.parametrize(
    "wrong",
    [
        {"threads": 0},
        {"model": ""},
        {"kv_tokens_max": 1},
        {"engram_open_seconds_max": -1.0},
        {"listen": "0.0.0.0:1"},
        {"engram_memories_max": 0},
        {"engram_model": "kjv", "engram_pool": ""},
        {"engram_fusion_weights": Path("fusion.safetensors")},
        {"engine": EngineChoice.VLLM, "engram_model": "kjv", "engram_fusion_weights": Path("fusion.safetensors")},
        {"engine": EngineChoice.VLLM, "golden_check_difference_max": 0.0},
        {"engine": EngineChoice.VLLM, "vllm_start_seconds_max": 0.0},
        {"engine": EngineChoice.VLLM, "prefix_index": LookupIndex.HNSW},
    ],
)
def test_settings_refuse_values_that_do_not_fit(wrong: dict[str, Any]) -> None:
    with pytest.raises(WrongSetting):
        Settings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prefix_lists_probed": 0}, "^prefix_lists_probed: 1 to 65536, got 0$"),
        ({"prefix_guard_percent": 101}, "^prefix_guard_percent: 0 to 100, got 101$"),
        ({"prefix_guard_percent": -1}, "^prefix_guard_percent: 0 to 100"),
    ],
)
def test_settings_of_lookups_are_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(WrongSetting, match=said):
        Settings(**wrong)


def test_an_index_that_is_not_installed_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from inference_worker.assembly import prefixes_of

    monkeypatch.setitem(sys.modules, "hnswlib", None)
    settings = Settings(asm_store="127.0.0.1:1", prefix_index=LookupIndex.HNSW)
    config: Any = None  # not looked at before
    with (
        pytest.raises(WrongSetting, match=r"^prefix_index 'hnsw' needs hnswlib: pip install"),
        prefixes_of(settings, config, tmp_path, CollectorRegistry()),
    ):
        pass


def test_settings_give_limits_policy_and_whether_there_is_an_engram() -> None:
    settings = Settings(sequences_max=3, engram_wait_seconds_max=0.5, engram_late=Late.FAIL)
    assert settings.limits.sequences_max == 3
    assert settings.policy == WaitPolicy(0.5, Late.FAIL)
    assert settings.lookup == LookupSettings()
    assert (settings.watches_pool, settings.has_default_memory) == (True, False)
    assert Settings(engram_model="kjv").has_default_memory
    assert not Settings(engram_model="none").has_default_memory
    off = Settings(engram_model="kjv", engram_transport=EngramTransport.OFF)
    assert (off.watches_pool, off.has_default_memory) == (False, False)
    assert not Settings(engram_pool="").watches_pool


def test_a_model_is_found_by_path_and_named_after_its_record_or_folder(tiny_folder: Path, tmp_path: Path) -> None:
    assert find_model_folder(str(tiny_folder)) == (tiny_folder.resolve(), "tiny")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "treadle.json").write_text('{"name": "smollm2-135m"}')
    assert find_model_folder(str(tmp_path))[1] == "smollm2-135m"
    with pytest.raises(NotFound):
        find_model_folder("no-such-model")


def test_model_ls_tells_what_can_be_fetched(tmp_path: Path) -> None:
    shown = CliRunner().invoke(app, ["ls", "--json", "--cache", str(tmp_path)])
    (entry,) = json.loads(shown.stdout)["models"]
    assert (entry["name"], entry["path"], entry["licence"]) == ("smollm2-135m", None, "Apache-2.0")
    assert "not fetched" in CliRunner().invoke(app, ["ls", "--cache", str(tmp_path)]).stdout


def test_model_fetch_prints_the_folder_and_fails_clearly(smollm_folder: Path) -> None:
    shown = CliRunner().invoke(app, ["fetch", "smollm2-135m", "--json"])
    assert json.loads(shown.stdout) == {"model": "smollm2-135m", "path": str(smollm_folder)}
    assert CliRunner().invoke(app, ["fetch", "smollm2-135m"]).stdout.strip() == str(smollm_folder)
    refused = CliRunner().invoke(app, ["fetch", "no-such-model"])
    assert refused.exit_code == 1
    assert "no-such-model" in refused.stderr


def test_the_commands_cost_no_heavy_import() -> None:
    code = "import inference_worker.commands, sys; print([m for m in ('torch', 'transformers', 'tokenizers', 'grpc') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True, env=_environment())
    assert done.stdout.strip() == "[]"


def test_a_worker_takes_the_transports_that_the_sdk_and_the_command_line_take() -> None:
    assert {transport.value for transport in EngramTransport} == {*(choice.value for choice in TransportChoice), "off"}

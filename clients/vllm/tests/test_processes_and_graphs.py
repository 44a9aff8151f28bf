"""vLLM as it is deployed: the scheduler and the model in processes of their own, and the model as a compiled graph."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from treadle.vllm import SCHEDULER_CLS, WORKER_CLS, MemoryConfig, engine_arguments

SECONDS_MAX = 500

DEPLOYED = """
import asyncio, json, sys
from pathlib import Path
from treadle.vllm import MemoryConfig, engine_arguments
from treadle.vllm.outcomes import EngineReports, outcome_of

async def main():
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    folder, pool, memory, prompt = Path(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
    config = MemoryConfig(engram_pool=pool, wait_seconds_max=20.0)
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(
        **engine_arguments(folder, config), dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, block_size=32,
        kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=48, disable_log_stats=True,
    ))
    said = {"opening": [], "answers": []}
    try:
        while not said["opening"] or said["opening"][-1] == "opening":
            said["opening"] += await engine.collective_rpc("open_engram_memory", args=(memory,))
            await asyncio.sleep(0.05)
        said["refused"] = await engine.collective_rpc("open_engram_memory", args=("kjv@1",))
        for number, chosen in enumerate((memory, memory, "nosuch@" + "0" * 64)):
            ours = {"engram": chosen}
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False, extra_args={"treadle": ours})
            async for last in engine.generate({"prompt_token_ids": prompt}, params, str(number)):
                pass
            (done,) = last.outputs
            logprobs = [found[token].logprob for token, found in zip(done.token_ids, done.logprobs or [])]
            outcome = outcome_of(last)
            said["answers"].append([list(done.token_ids), logprobs, last.num_cached_tokens, done.finish_reason, outcome.to_dict()])
        (reports,) = await engine.collective_rpc("take_engram_reports")
        said["reports"] = EngineReports.from_dict(reports).to_dict()
    finally:
        engine.shutdown()
    print("SAID " + json.dumps(said))

if __name__ == "__main__":
    asyncio.run(main())
"""


def run(code: str, tmp_path: Path, *argv: str, **environment: str) -> Any:
    """What a program says in the environment of a deployment: with vLLM's own processes."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(code))
    given = (
        os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"} | environment
    )
    done = subprocess.run([sys.executable, str(program), *argv], capture_output=True, text=True, timeout=SECONDS_MAX, env=given)
    said = [line for line in done.stdout.splitlines() if line.startswith("SAID ")]
    assert len(said) == 1, done.stderr[-3000:]
    return json.loads(said[0].removeprefix("SAID "))


@pytest.mark.slow
def test_outcomes_come_back_through_vllms_own_processes(
    smollm_folder: Path, pool: Any, embedded: Any, verses: Any, tmp_path: Path
) -> None:
    prompt, memory = verses(90, 9000), f"kjv@{pool.current['kjv']}"
    said = run(DEPLOYED, tmp_path, str(smollm_folder), pool.address, memory, str(prompt))
    assert said["opening"][-1] == "open"
    assert said["refused"][0].startswith("InvalidArgument")
    expected = embedded.say(prompt, "kjv", tokens=8)
    for (tokens, logprobs, cached, finish, outcome), hit in zip(said["answers"][:2], (0, 64), strict=True):
        assert (tokens, cached, finish) == (expected.tokens, hit, "length")
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        assert (outcome["memory"]["name"], outcome["degraded"], outcome["error"]) == ("kjv", False, None)
    assert [answer["tickets"] for *_, answer in said["answers"][:2]] == [
        18,
        16,
    ]  # two layers; two chunks and seven decodes, one and seven
    tokens, _, _, finish, outcome = said["answers"][2]
    assert (tokens, finish, outcome["error"]["kind"]) == ([], "error", "NotFound")
    assert len(said["reports"]["tickets"]) == 34
    assert {figures["tickets"] for figures in said["reports"]["figures"].values()} == {17}
    assert [memory["requests"] for memory in said["reports"]["memories"]] == [0]


def free_port() -> int:
    """Below those that the system hands out, so that nobody takes it before the server does, not even who asks whether it is there."""
    for port in range(20_000, 30_000):
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")


@pytest.mark.slow
def test_vllms_own_http_server_takes_choices_and_tells_outcomes(smollm_folder: Path, pool: Any, tmp_path: Path) -> None:
    """The command of docs/vllm.md."""
    port = free_port()
    ours = engine_arguments(smollm_folder, MemoryConfig(engram_pool=pool.address, default_memory="kjv", wait_seconds_max=20.0))
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(smollm_folder), "--dtype", "float32", "--host", "127.0.0.1",
        "--port", str(port), "--hf-overrides", json.dumps(ours["hf_overrides"]), "--worker-cls", WORKER_CLS, "--scheduler-cls", SCHEDULER_CLS,
        "--additional-config", json.dumps(ours["additional_config"]), "--enforce-eager", "--max-model-len", "512",
        "--kv-cache-memory-bytes", str(64 << 20), "--served-model-name", "m",
    ]  # fmt: skip
    given = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=given, start_new_session=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            wait_until_healthy(client, server, tmp_path / "log")
            asked = {"model": "m", "prompt": "In the beginning God created", "max_tokens": 4, "temperature": 0}
            plain = client.post("/v1/completions", json=asked).raise_for_status().json()
            chosen = asked | {"vllm_xargs": {"treadle": json.dumps({"engram": "none"})}}
            without = client.post("/v1/completions", json=chosen).raise_for_status().json()
            refused = client.post("/v1/completions", json=asked | {"vllm_xargs": {"treadle": json.dumps({"engram": "nosuch"})}})
        outcome = plain["kv_transfer_params"]["treadle"]
        assert (outcome["memory"]["name"], outcome["memory"]["version"]) == ("kjv", pool.current["kjv"])
        assert (outcome["tickets"], outcome["degraded"]) == (8, False)
        assert not (without.get("kv_transfer_params") or {}).get("treadle")
        assert refused.status_code == 500
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_until_healthy(client: httpx.Client, server: subprocess.Popen[bytes], log: Path) -> None:
    end, never = time.monotonic() + SECONDS_MAX, threading.Event()
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            never.wait(0.5)


COMPILED = """
import json, sys
from pathlib import Path
from treadle.vllm import MemoryConfig, engine_arguments
from treadle.vllm.outcomes import outcome_of
from vllm import LLM, SamplingParams

folder, pool, prompt = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
config = MemoryConfig(engram_pool=pool, fusion="on", wait_seconds_max=20.0)
llm = LLM(**engine_arguments(folder, config), dtype="float32", max_model_len=512, max_num_seqs=4, block_size=32,
          kv_cache_memory_bytes=64 << 20, max_num_batched_tokens=48)
said = []
for memory in ("none", "kjv", "smollm2-demo"):
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, detokenize=False, extra_args={"treadle": {"engram": memory}})
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    (done,) = output.outputs
    said.append([list(done.token_ids), [found[token].logprob for token, found in zip(done.token_ids, done.logprobs)]])
print("SAID " + json.dumps([str(llm.llm_engine.vllm_config.compilation_config.mode), said]))
"""


@pytest.mark.slow
def test_a_compiled_graph_gives_the_same_answers(
    smollm_folder: Path, pool: Any, embedded: Any, verses: Any, tmp_path: Path
) -> None:
    prompt = verses(90, 9500)
    mode, said = run(COMPILED, tmp_path, str(smollm_folder), pool.address, str(prompt), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    assert "NONE" not in mode
    assert mode != "0"
    for memory, (tokens, logprobs) in zip(("none", "kjv", "smollm2-demo"), said, strict=True):
        expected = embedded.say(prompt, memory, tokens=8)
        assert tokens == expected.tokens
        assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_an_engine_in_which_memories_would_be_wrong_does_not_start(smollm_folder: Path) -> None:
    from vllm import EngineArgs

    from treadle.contract.errors import InvalidArgument
    from treadle.vllm.support import check_model, check_supported

    ours: dict[str, Any] = engine_arguments(smollm_folder, MemoryConfig()) | {"max_model_len": 512, "dtype": "float32"}
    check_supported(EngineArgs(**ours).create_engine_config())
    for part, field, value, said in (
        ("parallel_config", "tensor_parallel_size", 2, "parallelism"),
        ("parallel_config", "enable_dbo", True, "--enable-dbo"),
        (None, "speculative_config", object(), "speculative"),
        (None, "kv_transfer_config", object(), "connectors"),
        ("scheduler_config", "async_scheduling", True, "--no-async-scheduling"),
        ("scheduler_config", "scheduler_cls", None, "--scheduler-cls"),
    ):
        config = EngineArgs(**ours).create_engine_config()
        setattr(config if part is None else getattr(config, part), field, value)
        with pytest.raises(InvalidArgument, match=said):
            check_supported(config)
    with pytest.raises(InvalidArgument, match="hf-overrides"):
        check_model(object())

"""A store's and a worker's own processes: prefixes are published, promoted and deleted, the store dies, and no worker starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from treadle.client.asm import AsmStore
from treadle.client.endpoint import Endpoint
from treadle.client.worker import Worker
from treadle.contract.errors import NotFound, Unavailable
from treadle.inference.v1 import worker_pb2 as pb

pytest.importorskip("asm_store.server", reason="the package treadle-asm-store is not installed: pip install -e services/asm-store")
FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
SECONDS = 60.0
OWN_MOUNTS = ("unshare", "--mount", "--propagation", "private")
MakePrefix = Callable[..., Path]
Prompt = Callable[..., tuple[int, ...]]
Soon = Callable[[Callable[[], bool]], None]


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], dict[str, Any]]]]:
    """Starts a process of a module, ended with the test; gives it and its ready line."""
    with ExitStack() as stack:

        def run(module: str, *argv: str, under: Sequence[str] = ()) -> tuple[subprocess.Popen[str], dict[str, Any]]:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            command = [*under, sys.executable, "-m", module, *FREE, *argv]
            child = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
            stack.callback(child.kill)
            assert child.stdout is not None
            return child, json.loads(child.stdout.readline())

        yield run


def asked(prompt: tuple[int, ...], prefix: str = "", version: str = "", **policy: Any) -> pb.GenerateRequest:
    patient = {"wait_seconds_max": 30.0}  # of the default an opening that takes a second on a busy machine degrades the answer
    request = pb.GenerateRequest(
        prompt_token_ids=prompt, sampling=pb.Sampling(max_tokens=8, ignore_eos=True), memory_policy=pb.MemoryPolicy(**(patient | policy)),
    )  # fmt: skip
    if prefix:
        request.prefix.CopyFrom(pb.PrefixChoice(name=prefix, version=version))
    return request


def answer(worker: Worker, request: pb.GenerateRequest) -> tuple[list[int], bool, list[pb.MemoryReport]]:
    responses = list(worker.generate(request, SECONDS))
    degraded = any(response.degraded for response in responses)
    return [token for response in responses for token in response.token_ids], degraded, list(responses[-1].memory)


def versions(worker: Worker) -> dict[str, str]:
    return {prefix.name: prefix.version for prefix in worker.status().prefixes}


def test_prefixes_come_change_and_go_and_the_store_with_them(
    start: Any, make_prefix: MakePrefix, prompt: Prompt, tiny_folder: Path, tmp_path: Path, soon: Soon
) -> None:
    rules, tokens, off_task = prompt(50, 100), prompt(40), prompt(30, 9)
    store_argv = ("--data-dir", str(tmp_path / "store"))
    store, ready = start("asm_store", *store_argv)
    served, listening = start("inference_worker", "--model", str(tiny_folder), "--engram-pool", "", "--asm-store", ready["listen"])
    with AsmStore(Endpoint(ready["listen"])) as asm, Worker(Endpoint(listening["listen"])) as worker:
        behind, _, _ = answer(worker, asked((*rules, *tokens)))
        plain, _, reports = answer(worker, asked(tokens))
        assert reports == []
        with pytest.raises(NotFound, match="there is no prefix 'rules' here; there is none to choose"):
            answer(worker, asked(tokens, "rules"))
        first = asm.publish(make_prefix(rules, [(*tokens, *behind)])).stored
        got, degraded, (report,) = answer(worker, asked(tokens, "rules"))  # at once, whether the worker has heard of it or not
        assert (got, degraded, got == plain) == (behind, False, False)
        assert (report.kind, report.name, report.version, report.prefix_tokens) == ("prefix", "rules", first.version, 50)
        assert (report.lookups > 0, report.lookups_outside, report.fell_back) == (True, 0, False)
        _, _, (report,) = answer(worker, asked(off_task, "rules"))
        assert report.fell_back

        second = asm.publish(make_prefix(rules, [(*tokens, *behind)], keep_kv=False)).stored
        soon(lambda: versions(worker) == {"rules": second.version})
        got, _, (report,) = answer(worker, asked(tokens, "rules"))
        assert (got, report.version) == (behind, second.version)
        _, degraded, (report,) = answer(worker, asked(off_task, "rules"))
        assert (degraded, report.missing_because) == (True, "off_task")
        _, _, (report,) = answer(worker, asked(tokens, "rules", first.version[:8]))
        assert report.version == first.version

        (status,) = worker.status().prefixes
        assert (status.open, status.prefix_tokens, status.fallbacks, status.refusal) == (True, 50, 1, "")
        assert status.mapped_bytes >= second.dictionary.nbytes
        metrics = httpx.get(f"http://{listening['metrics']}/metrics", trust_env=False).text
        assert 'treadle_worker_prefix_requests_total{outcome="exact"} 1.0' in metrics
        assert "treadle_worker_prefix_fallbacks_total 1.0" in metrics
        assert "treadle_worker_asm_store_answers 1.0" in metrics

        store.kill()
        store.wait()
        got, degraded, _ = answer(worker, asked(tokens, "rules"))  # mapped: it needs no store
        assert (got, degraded) == (behind, False)
        got, degraded, (report,) = answer(worker, asked(tokens, "guide", wait_seconds_max=0.05))
        assert (got, degraded, report.missing_because, report.prefix_tokens) == (plain, True, "unavailable", 0)
        with pytest.raises(Unavailable):
            answer(worker, asked(tokens, "guide", late=pb.LATE_POLICY_FAIL, wait_seconds_max=0.05))

        start("asm_store", *store_argv, "--listen", ready["listen"])
        with pytest.raises(NotFound, match="there is no prefix 'guide'"):
            soon(lambda: bool(answer(worker, asked(tokens, "guide", wait_seconds_max=0.05))) and False)
        asm.delete("rules")
        soon(lambda: versions(worker) == {})
        with pytest.raises(NotFound):
            answer(worker, asked(tokens, "rules"))
    served.terminate()
    assert served.wait(SECONDS) == 0


def test_a_workers_settings_say_how_its_prefixes_are_looked_up(
    start: Any, make_prefix: MakePrefix, prompt: Prompt, tiny_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("hnswlib", reason="hnswlib is not installed; the third index is not tested: pip install treadle-nn[hnsw]")
    tokens = prompt(40)
    _, ready = start("asm_store", "--data-dir", str(tmp_path / "store"))
    with AsmStore(Endpoint(ready["listen"])) as asm:
        asm.publish(make_prefix(prompt(50, 100), [tokens], keep_kv=False))
        outside = {}
        for percent, index in (("0", "scan"), ("0", "hnsw"), ("100", "scan")):
            _, listening = start(
                "inference_worker", "--model", str(tiny_folder), "--engram-pool", "", "--asm-store", ready["listen"],
                "--prefix-guard-percent", percent, "--prefix-index", index, "--prefix-lists-probed", "4",
            )  # fmt: skip
            with Worker(Endpoint(listening["listen"])) as worker:
                _, _, (report,) = answer(worker, asked(tokens, "rules"))
                outside[percent, index] = report.lookups_outside
    assert outside["100", "scan"] > outside["0", "scan"]  # of replays, whose cosines are 1 but for rounding
    assert outside["0", "hnsw"] == outside["0", "scan"]


def test_a_worker_starts_without_its_store_and_finds_it(
    start: Any, make_prefix: MakePrefix, prompt: Prompt, tiny_folder: Path, tmp_path: Path, soon: Soon
) -> None:
    store, ready = start("asm_store", "--data-dir", str(tmp_path / "store"))
    with AsmStore(Endpoint(ready["listen"])) as asm:
        asm.publish(make_prefix(prompt(20, 100), [prompt(20)]))
    store.kill()
    store.wait()
    _, listening = start("inference_worker", "--model", str(tiny_folder), "--engram-pool", "", "--asm-store", ready["listen"])
    with Worker(Endpoint(listening["listen"])) as worker:
        (unknown,) = worker.status().prefixes
        assert "has not answered yet" in unknown.refusal
        start("asm_store", "--data-dir", str(tmp_path / "store"), "--listen", ready["listen"])
        soon(lambda: [prefix.name for prefix in worker.status().prefixes] == ["rules"])
        _, _, (report,) = answer(worker, asked(prompt(20), "rules"))
        assert report.name == "rules"


def may_mount(folder: Path) -> bool:
    with suppress(FileNotFoundError):
        return (
            subprocess.run([*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", folder], capture_output=True, check=False).returncode == 0
        )
    return False


def cached(listening: dict[str, Any]) -> dict[str, float]:
    """What a worker's metrics say of its cache, without the names' beginning."""
    lines = httpx.get(f"http://{listening['metrics']}/metrics", trust_env=False).text.splitlines()
    named = "treadle_worker_asm_cache_"
    found = (line.removeprefix(named).split() for line in lines if line.startswith(named) and "_created" not in line)
    return {name: float(value) for name, value in found}


def test_a_store_with_other_mounts_serves_workers_by_way_of_their_cache(
    start: Any, make_prefix: MakePrefix, prompt: Prompt, tiny_folder: Path, tmp_path: Path, soon: Soon
) -> None:
    """The store's folder is a file system that only it sees, as on another host; two workers share a cache, and one is killed."""
    kept, cache = tmp_path / "store", tmp_path / "cache"
    kept.mkdir()
    if not may_mount(kept):
        pytest.skip("this user may not mount: run it as root, with CAP_SYS_ADMIN, to see a store in its own mount namespace")
    rules, tokens, off_task = prompt(50, 100), prompt(40), prompt(30, 9)
    under = (*OWN_MOUNTS, "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(kept))
    _, ready = start("asm_store", "--data-dir", str(kept / "data"), under=under)
    worker_argv = ("--model", str(tiny_folder), "--engram-pool", "", "--asm-store", ready["listen"], "--asm-cache", str(cache))
    killed, first_at = start("inference_worker", *worker_argv)
    with AsmStore(Endpoint(ready["listen"])) as asm:
        with Worker(Endpoint(first_at["listen"])) as worker:
            behind, _, _ = answer(worker, asked((*rules, *tokens)))
            stored = asm.publish(make_prefix(rules, [(*tokens, *behind)])).stored
            assert not (kept / "data").exists()
            got, degraded, (report,) = answer(worker, asked(tokens, "rules", wait_seconds_max=30.0))
            assert (got, degraded, report.version) == (behind, False, stored.version)
            _, _, (report,) = answer(worker, asked(off_task, "rules"))
            assert report.fell_back  # the exact KV has come, too
            brought = {'fetches_total{outcome="ok"}': 1, "fetched_bytes_total": stored.file_bytes, "bytes": stored.file_bytes}
            assert cached(first_at) == brought | {"hits_total": 0, "evictions_total": 0}
            killed.kill()
            killed.wait()
        served, second_at = start("inference_worker", *worker_argv)
        with Worker(Endpoint(second_at["listen"])) as worker:
            got, degraded, _ = answer(worker, asked(tokens, "rules", wait_seconds_max=30.0))
            assert (got, degraded) == (behind, False)
            assert {name: cached(second_at)[name] for name in ("hits_total", "fetched_bytes_total")} == {
                "hits_total": 1, "fetched_bytes_total": 0,
            }  # fmt: skip
            asm.delete("rules")
            soon(lambda: cached(second_at)["evictions_total"] == 1)
            assert not (cache / stored.version).exists()
            with pytest.raises(NotFound):
                answer(worker, asked(tokens, "rules"))
    served.terminate()
    assert served.wait(SECONDS) == 0
    _, near_at = start("inference_worker", *worker_argv[:-2], "--asm-cache-bytes-max", "0")
    with AsmStore(Endpoint(ready["listen"])) as asm, Worker(Endpoint(near_at["listen"])) as worker:
        asm.publish(make_prefix(rules, [(*tokens, *behind)]))
        with pytest.raises(Unavailable, match=r"another host.*asm_cache_bytes_max is 0"):
            answer(worker, asked(tokens, "rules", late=pb.LATE_POLICY_FAIL, wait_seconds_max=0.05))

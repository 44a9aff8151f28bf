"""A pool and a worker as processes: memories appear, change and go while requests run, and nothing is started again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from inference_worker.adapters.engram_pool import PoolOfMemories
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine import Engine
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.request import Request, Sampling
from inference_worker.domain.resident_versions import Choice
from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramPool, StepPrefetcher
from treadle.client.worker import Worker
from treadle.contract.errors import NotFound, Unavailable
from treadle.contract.policy import WaitPolicy
from treadle.inference.v1 import worker_pb2 as pb

FREE = ("--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
SECONDS = 60.0
Grow = Any  # conftest's FakePool: it makes the versions that the real pool loads
Soon = Callable[[Callable[[], bool]], None]


class Services:
    """Processes of this test, ended with it."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        self._stack, self._segments, self._model = stack, folder, model

    def pool(self, listen: str = "127.0.0.1:0") -> tuple[subprocess.Popen[str], str]:
        return self._start("engram_pool", "--segment-dir", str(self._segments), "--listen", listen)

    def worker(self, pool: str, *argv: str) -> tuple[subprocess.Popen[str], str]:
        patient = ("--engram-wait-seconds-max", "20")  # no answer is to be degraded because the machine was busy
        return self._start("inference_worker", "--model", str(self._model), "--engram-pool", pool, *patient, *argv)

    def _start(self, module: str, *argv: str) -> tuple[subprocess.Popen[str], str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", module, *FREE, *argv]
        child = self._stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        self._stack.callback(child.kill)
        assert child.stdout is not None
        return child, json.loads(child.stdout.readline())["listen"]


@pytest.fixture
def services(tmp_path: Path, tiny_folder: Path) -> Iterator[Services]:
    with ExitStack() as stack:
        yield Services(stack, tmp_path / "segments", tiny_folder)


def asked(memory: str | None, tokens: int = 8, version: str = "") -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        prompt_token_ids=range(1, 41), sampling=pb.Sampling(max_tokens=tokens, ignore_eos=True, top_logprobs=0),
        memory_policy=pb.MemoryPolicy(wait_seconds_max=5.0),
    )  # fmt: skip
    if memory is not None:
        request.engram.CopyFrom(pb.EngramChoice(model=memory, version=version))
    return request


def answer(worker: Worker, request: pb.GenerateRequest) -> tuple[list[float], list[pb.MemoryReport]]:
    responses = list(worker.generate(request, SECONDS))
    assert not any(response.degraded for response in responses)
    return [entry.logprob for response in responses for entry in response.logprobs], list(responses[-1].memory)


def current(worker: Worker) -> dict[str, str]:
    return {memory.model: memory.version for memory in worker.status().engram_models if not memory.refusal}


def test_a_memory_changes_and_goes_back_while_a_request_runs_and_nothing_restarts(
    services: Services, fake_pool: Grow, tiny_engram: Any, tmp_path: Path, soon: Soon
) -> None:
    _, address = services.pool()
    _, listen = services.worker(address)
    first, second = fake_pool.grow("kjv"), fake_pool.grow("kjv", seed=1)
    folders = [each.write(tmp_path / f"v{place}", tiny_engram[1]) for place, each in enumerate((first, second))]
    with EngramPool(Endpoint(address)) as pool, Worker(Endpoint(listen)) as worker:
        with pytest.raises(NotFound, match="there is none to choose"):
            answer(worker, asked("kjv"))
        pool.load_grown(folders[0])
        _, (report,) = answer(worker, asked("kjv"))  # at once, whether the worker has heard of it or not
        assert report.version == first.version
        plain, reports = answer(worker, asked(None))
        assert reports == []
        old, (report,) = answer(worker, asked("kjv"))
        assert old != plain
        assert (report.name, report.version, report.transport, report.shadowed) == ("kjv", first.version, "mapped", False)

        running = worker.generate(asked("kjv", tokens=150), SECONDS)
        begun = [next(running)]
        pool.load_grown(folders[1])
        soon(lambda: current(worker) == {"kjv": second.version})
        new, (report,) = answer(worker, asked("kjv"))
        assert (report.version, new == pytest.approx(old, abs=1e-3)) == (second.version, False)
        begun += list(running)
        assert begun[-1].memory[0].version == first.version
        kept = [entry.logprob for response in begun for entry in response.logprobs]
        assert len(kept) == 150
        assert kept[:8] == pytest.approx(old, abs=1e-4)
        held = {first.version: 0, second.version: 1}  # by the last request of the old version no more
        soon(lambda: {each.version: each.readers for each in pool.list_models()} == held)

        pool.promote("kjv")
        soon(lambda: current(worker) == {"kjv": first.version})
        back, (report,) = answer(worker, asked("kjv"))
        assert report.version == first.version
        assert back == pytest.approx(old, abs=1e-4)
        _, (report,) = answer(worker, asked("kjv", version=second.version[:8]))
        assert report.version == second.version
        pool.remove("kjv")
        soon(lambda: current(worker) == {})
        with pytest.raises(NotFound):
            answer(worker, asked("kjv"))


def test_every_transport_gives_a_batch_of_memories_the_same_bits(
    services: Services, fake_pool: Grow, tiny_engram: Any, tmp_path: Path, tiny: Any, tiny_folder: Path
) -> None:
    _, address = services.pool()
    with EngramPool(Endpoint(address)) as pool:
        for seed, name in enumerate(("kjv", "law")):
            pool.load_grown(fake_pool.grow(name, seed).write(tmp_path / name, tiny_engram[1]))
        answers = {transport: batch_of(pool, address, transport, tiny, tiny_folder) for transport in ("local", "mapped", "rpc")}
    assert answers["mapped"] == answers["local"]
    assert answers["rpc"] == answers["local"]
    kjv, law, none, again = answers["local"]
    assert again == pytest.approx(kjv, abs=1e-5)
    assert len({tuple(each) for each in (kjv, law, none)}) == 3


def batch_of(pool: EngramPool, address: str, transport: str, model: Any, folder: Path) -> list[list[float]]:
    """Log-probabilities of the same prompt with two memories, none, and the first again, in one batch of an engine in this process."""
    opener = Opener(model.config, folder / "tokenizer.json")
    catalogue = Catalogue(PoolOfMemories(Endpoint(address), transport), opener, open_max=2)
    vocabulary, prefetcher = read_vocabulary(folder / "tokenizer.json"), StepPrefetcher()
    engine = Engine(model, vocabulary, Limits(), prefetcher=prefetcher, engram_wait_seconds_max=20.0)
    patient, sampling = WaitPolicy(20.0), Sampling(max_tokens=8, ignore_eos=True, top_logprobs=0, prompt_logprobs=True)
    with closing(catalogue):
        catalogue.update(pool.list_models())
        whole = [Answer() for _ in range(4)]
        for name, each in zip(("kjv", "law", "", "kjv"), whole, strict=True):
            lease = catalogue.take(Choice(name)).result(SECONDS)
            assert lease.memory is None or lease.memory.transport == transport
            engine.submit(Request(tuple(range(1, 41)), sampling, policy=patient), each, lease)
        run_until_done(engine, whole)
    assert [(each.error, each.piece.degraded) for each in whole] == [(None, False)] * 4
    return [[entry.logprob for entry in [*each.piece.prompt_logprobs, *each.piece.logprobs]] for each in whole]


@pytest.mark.parametrize("transport", ["local", "rpc"])
def test_a_worker_takes_rows_by_the_transport_of_its_settings(
    transport: str, services: Services, fake_pool: Grow, tiny_engram: Any, tmp_path: Path
) -> None:
    _, address = services.pool()
    with EngramPool(Endpoint(address)) as pool:
        pool.load_grown(fake_pool.grow("kjv").write(tmp_path / "kjv", tiny_engram[1]))
    _, listen = services.worker(address, "--engram-transport", transport)
    with Worker(Endpoint(listen)) as worker:
        _, (report,) = answer(worker, asked("kjv"))
    assert (report.transport, report.rows_missing, report.shadowed) == (transport, 0, False)


def test_a_pool_that_dies_and_comes_back_is_found_again_and_open_memories_go_on_meanwhile(
    services: Services, fake_pool: Grow, tiny_engram: Any, tmp_path: Path, soon: Soon
) -> None:
    process, address = services.pool()
    _, listen = services.worker(address)
    kjv, law = fake_pool.grow("kjv"), fake_pool.grow("law", seed=1)
    with EngramPool(Endpoint(address)) as pool, Worker(Endpoint(listen)) as worker:
        for each in (kjv, law):
            pool.load_grown(each.write(tmp_path / each.model.name, tiny_engram[1]))
        soon(lambda: len(current(worker)) == 2)
        before, _ = answer(worker, asked("kjv"))
        process.kill()
        process.wait()
        assert answer(worker, asked("kjv"))[0] == pytest.approx(before, abs=1e-4)  # mapped: it needs no pool
        with pytest.raises(Unavailable):
            answer(worker, asked("law"))
        services.pool(address)
        until = time.monotonic() + 30
        while True:
            try:
                _, (report,) = answer(worker, asked("law"))
                break
            except Unavailable:
                assert time.monotonic() < until
        assert report.version == law.version


def test_a_worker_whose_pool_is_away_starts_and_says_why_nothing_can_be_chosen(services: Services) -> None:
    _, listen = services.worker("127.0.0.1:1")
    with Worker(Endpoint(listen)) as worker:
        assert answer(worker, asked(None))[1] == []
        (entry,) = worker.status().engram_models
        assert entry.model == ""
        assert "the engram pool at 127.0.0.1:1 has not answered yet" in entry.refusal
        with pytest.raises(Unavailable, match="has not answered yet"):
            answer(worker, asked("kjv"))


def test_a_default_memory_is_used_by_those_who_choose_none_and_left_out_by_those_who_choose_so(
    services: Services, fake_pool: Grow, tiny_engram: Any, tmp_path: Path
) -> None:
    _, address = services.pool()
    kjv = fake_pool.grow("kjv")
    with EngramPool(Endpoint(address)) as pool:
        pool.load_grown(kjv.write(tmp_path / "kjv", tiny_engram[1]))
    _, listen = services.worker(address, "--engram-model", "kjv")
    with Worker(Endpoint(listen)) as worker:
        silent, (report,) = answer(worker, asked(None))
        none, reports = answer(worker, asked(""))
        status = worker.status()
    assert (report.version, reports) == (kjv.version, [])
    assert silent != none
    assert (status.engram_model, status.engram_version, status.engram_fused) == ("kjv", kjv.version, True)
    assert [layer.tickets for layer in status.engram_layers] == [8, 8]
    assert [(each.model, each.default, each.open) for each in status.engram_models] == [("kjv", True, True)]

"""Memories with real processes: chosen by each request, the same bits by every way, spoilt by wrong rows, replaced while it runs."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

import engram_pool
from treadle.cli.held_out import NO_MEMORY, blocks_of, measure
from treadle.cli.memories import GrownMemory, held_out_text, shipped_memory
from treadle.cli.shuffled_memory import write_shuffled
from treadle.client import Fabric
from treadle.contract.errors import AccessDenied
from treadle.inference.v1 import worker_pb2 as pb

from .conftest import KJV_KEY, PLAIN_KEY, RunningFabric, until

PROMPT = "And the LORD spake unto Moses,"
HELD_OUT_TOKENS = 2560  # ten blocks: the shuffled rows' part is then chance of a few tenths of a percent
WITH_RATIO_MAX, SHUFFLED_RATIO_BAND = 0.9, 0.01
ANSWER_SECONDS_MAX = 120.0
NOTES_CHARACTERS = 24_000  # a little more than the fewest tokens that can be grown from
SMALL = ("--heads", "2", "--prime-base", "101", "--tokens", "2048", "--no-mix", "--threads", "1")  # one step


@pytest.fixture(scope="session")
def shipped() -> GrownMemory:
    memory = shipped_memory()
    assert memory is not None
    return memory


@pytest.fixture(scope="session")
def blocks(model_dir: Path) -> list[tuple[int, ...]]:
    """Blocks of chapters that the shipped memory has not learnt, spread over all of them."""
    return blocks_of(held_out_text(), model_dir / "tokenizer.json", HELD_OUT_TOKENS)


@pytest.fixture(scope="session")
def notes(fabric: RunningFabric, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A memory grown by the command from the text that ships, as little as can be: it changes figures, not minds."""
    folder = tmp_path_factory.mktemp("notes")
    with lzma.open(Path(next(iter(engram_pool.__path__))) / "shipped" / "kjv.txt.xz", "rt", encoding="utf-8") as file:
        (folder / "notes.txt").write_text(file.read(NOTES_CHARACTERS), encoding="utf-8")
    (folder / "other.txt").write_text(held_out_text()[:4000], encoding="utf-8")
    grown = fabric.run(
        "engram", "grow", "--text", str(folder / "notes.txt"), "--held-out", str(folder / "other.txt"), "--name", "notes", *SMALL,
        "--model", str(model_dir), "--out", str(folder / "notes"),
    )  # fmt: skip
    assert grown.returncode == 0, grown.stderr
    return folder / "notes"


def complete(fabric: RunningFabric, model: str = "", key: str = "", **treadle: Any) -> tuple[str, list[dict[str, Any]]]:
    """Greedy text behind PROMPT, and the memories that it reports."""
    client = fabric.client(key) if key else fabric.client()
    extra = {"treadle": treadle} if treadle else None
    answer = client.completions.create(model=model or fabric.model, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=extra)
    told: dict[str, Any] = (answer.model_extra or {}).get("treadle") or {}
    assert not told.get("degraded")
    return answer.choices[0].text, told.get("memory") or []


def version_that_answers(fabric: RunningFabric, engram: str) -> str:
    """Of the memory that a request chooses so; "" while it is not there."""
    try:
        return str(complete(fabric, engram=engram)[1][0]["version"])
    except openai.BadRequestError:
        return ""


def prompt_logprobs(address: str, key: str, block: Sequence[int], memory: str) -> tuple[list[float], list[str]]:
    """Of a block's tokens and of eight more, from a worker that does nothing else meanwhile; and the transports it reports."""
    request = pb.GenerateRequest(
        prompt_token_ids=block, engram=pb.EngramChoice(model=memory),
        sampling=pb.Sampling(max_tokens=8, prompt_logprobs=True, top_logprobs=0, ignore_eos=True),
        memory_policy=pb.MemoryPolicy(wait_seconds_max=10.0),
    )  # fmt: skip
    with Fabric(worker=address, key=key) as sdk:
        answers = list(sdk.worker.generate(request, ANSWER_SECONDS_MAX))
    assert not answers[-1].degraded
    logprobs = [token.logprob for answer in answers for token in (*answer.prompt_logprobs, *answer.logprobs)]
    return logprobs, [report.transport for report in answers[-1].memory]


def test_a_request_chooses_its_memory_by_field_by_alias_or_by_its_key_and_has_none_otherwise(
    fabric: RunningFabric, shipped: GrownMemory
) -> None:
    plain, reports = complete(fabric)
    assert reports == []
    by_field, (report,) = complete(fabric, engram="kjv")
    assert by_field != plain
    assert (report["name"], report["version"], report["shadowed"]) == ("kjv", shipped.model.version, False)
    for answer, (same,) in (
        complete(fabric, model=f"{fabric.model}+kjv"),
        complete(fabric, key=KJV_KEY),
        complete(fabric, engram=f"kjv@{shipped.model.version[:8]}"),
    ):
        assert (answer, same["version"]) == (by_field, shipped.model.version)
    assert complete(fabric, key=KJV_KEY, engram="none") == (plain, [])
    assert complete(fabric, key=KJV_KEY, model=f"{fabric.model}+none") == (plain, [])
    assert f"{fabric.model}+kjv" in [model.id for model in fabric.client().models.list().data]


def test_the_worker_refuses_whoever_passes_the_gateway_by_without_its_key(
    fabric: RunningFabric, blocks: list[tuple[int, ...]]
) -> None:
    address = fabric.service("inference-worker")["address"]
    with Fabric(worker=address) as stranger, pytest.raises(AccessDenied):
        stranger.worker.status()
    with pytest.raises(AccessDenied):
        prompt_logprobs(address, PLAIN_KEY, blocks[0], NO_MEMORY)  # a key of the gateway is none of the worker
    with Fabric(worker=address, key=fabric.worker_key) as ours:
        assert ours.worker.status().model == fabric.model


def test_a_choice_that_contradicts_itself_or_is_not_there_is_told(fabric: RunningFabric) -> None:
    with pytest.raises(openai.BadRequestError, match="choose different memories"):
        complete(fabric, model=f"{fabric.model}+kjv", engram="none")
    with pytest.raises(openai.BadRequestError, match="there is no memory 'tales' here; there is 'kjv'"):
        complete(fabric, engram="tales")


def test_every_way_that_rows_come_gives_the_same_bits(
    fabric: RunningFabric, workers: dict[str, str], blocks: list[tuple[int, ...]]
) -> None:
    key = fabric.worker_key
    seen = {transport: prompt_logprobs(address, key, blocks[0], "kjv") for transport, address in workers.items()}
    assert {transport: ways for transport, (_, ways) in seen.items()} == {way: [way] for way in ("mapped", "local", "rpc")}
    assert len(seen["mapped"][0]) == len(blocks[0]) - 1 + 8
    assert seen["local"][0] == seen["mapped"][0] == seen["rpc"][0]
    assert seen["mapped"][0] != prompt_logprobs(workers["mapped"], key, blocks[0], NO_MEMORY)[0]


def test_wrong_rows_lose_all_that_the_memory_gains(
    fabric: RunningFabric, shipped: GrownMemory, blocks: list[tuple[int, ...]], tmp_path: Path
) -> None:
    wrong = write_shuffled(shipped.folder, tmp_path / "shuffled", name="kjv-shuffled")
    loaded = fabric.run("pool", "load", "--grown", str(tmp_path / "shuffled"))
    assert loaded.returncode == 0, loaded.stderr
    until(lambda: version_that_answers(fabric, wrong.name) == wrong.version)
    with Fabric(worker=fabric.service("inference-worker")["address"], key=fabric.worker_key) as sdk:
        scores = measure(sdk.worker, blocks, (NO_MEMORY, "kjv", wrong.name))
    assert scores["kjv"].versions == {shipped.model.version}
    assert scores[wrong.name].versions == {wrong.version}
    assert [score.degraded for score in scores.values()] == [0, 0, 0]
    frozen = scores[NO_MEMORY].perplexity
    assert scores["kjv"].perplexity <= WITH_RATIO_MAX * frozen
    assert scores[wrong.name].perplexity == pytest.approx(frozen, rel=SHUFFLED_RATIO_BAND)
    assert fabric.run("pool", "rm", wrong.name).returncode == 0


def test_a_memory_is_grown_loaded_replaced_and_rolled_back_while_the_same_processes_run(
    fabric: RunningFabric, notes: Path, blocks: list[tuple[int, ...]], tmp_path: Path
) -> None:
    processes = {service["service"]: service["pid"] for service in fabric.status()["services"]}
    first = GrownMemory.read(notes).model.version
    assert version_that_answers(fabric, "notes") == ""
    assert fabric.run("pool", "load", "--grown", str(notes)).returncode == 0
    until(lambda: version_that_answers(fabric, "notes") == first)
    worker, key = fabric.service("inference-worker")["address"], fabric.worker_key
    assert prompt_logprobs(worker, key, blocks[0], "notes")[0] != prompt_logprobs(worker, key, blocks[0], NO_MEMORY)[0]

    second = write_shuffled(notes, tmp_path / "notes", name="notes").version
    assert fabric.run("pool", "load", "--grown", str(tmp_path / "notes")).returncode == 0
    until(lambda: version_that_answers(fabric, "notes") == second)
    assert version_that_answers(fabric, f"notes@{first[:8]}") == first
    assert fabric.run("pool", "rollback", "notes").returncode == 0
    until(lambda: version_that_answers(fabric, "notes") == first)
    assert fabric.run("pool", "promote", "notes", second[:12]).returncode == 0
    until(lambda: version_that_answers(fabric, "notes") == second)

    listed = {memory["model"]: memory["version"] for memory in fabric.service("inference-worker")["figures"]["memories"]}
    assert listed["notes"] == second
    assert processes == {service["service"]: service["pid"] for service in fabric.status()["services"]}
    assert fabric.run("pool", "rm", "notes").returncode == 0
    until(lambda: version_that_answers(fabric, "notes") == "")

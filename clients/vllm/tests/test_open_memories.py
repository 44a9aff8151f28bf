"""Memories in the process of the model: opened once, bounded, closed when out of use; and which versions are current."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from treadle.contract import Fusion, RowLayout
from treadle.contract.errors import DeadlineExceeded, FingerprintMismatch, InvalidArgument, NotFound, ResourceExhausted
from treadle.contract.families import demo_model
from treadle.nn.token_map import compressed_token_map, token_map_digest
from treadle.vllm import MemoryConfig, memories
from treadle.vllm.config import Choice
from treadle.vllm.current_versions import CurrentVersions
from treadle.vllm.memories import LanguageModel, Memories

SECONDS_MAX = 30.0


def until(is_so: Callable[[], Any]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not is_so():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def own_pool(start_pool: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return start_pool(tmp_path_factory.mktemp("own") / "segments")


@pytest.fixture(scope="module")
def load(own_pool: Any, smollm_folder: Path) -> Callable[..., str]:
    """Loads a small random memory for SmolLM2, the current version of its name from then on."""
    token_map, size = compressed_token_map(smollm_folder / "tokenizer.json")

    def version(name: str, seed: int = 0) -> str:
        template = demo_model(
            name, layers=(1, 2), token_map=token_map_digest(token_map), compressed_vocab_size=size, pad_id=2, prime_base=101, heads=2,
            row=RowLayout(32, 16, "bf16"), fusion=Fusion("demo"),
        )  # fmt: skip
        with own_pool.client() as client:
            return str(client.load_random(template, token_map, seed=seed, keep_previous=True).version)

    return version


@pytest.fixture
def make(own_pool: Any, smollm_folder: Path) -> Iterator[Callable[..., Memories]]:
    made: list[Memories] = []

    def of(layers: int = 30, **settings: Any) -> Memories:
        config = replace(MemoryConfig(engram_pool=own_pool.address), **settings)
        model = LanguageModel(layers, 49152, 576, lambda: smollm_folder / "tokenizer.json")
        made.append(Memories(config, model, torch.device("cpu")))
        return made[-1]

    yield of
    for one in made:
        one.close()


def readers(pool: Any, name: str) -> dict[str, int]:
    with pool.client() as client:
        return {one.version: one.readers for one in client.list_models() if one.model.name == name}


def test_a_version_is_opened_once_and_a_bare_name_means_the_current_one(make: Any, load: Any, own_pool: Any) -> None:
    version, here = load("once"), make()
    first, second, bare = here.take(Choice("once", version)), here.take(Choice("once", version)), here.take(Choice("once"))
    assert first is second is bare
    assert (first.requests, first.fused, first.used.transport) == (3, False, "mapped")  # random weights: shadowed
    assert readers(own_pool, "once") == {version: 1}
    here.close()
    assert readers(own_pool, "once") == {version: 0}


def test_beyond_the_limit_the_longest_idle_is_closed_and_those_in_use_stay(make: Any, load: Any) -> None:
    here = make(memories_max=2)
    choices = [Choice(name, load(name)) for name in ("a", "b", "c")]
    one, two = here.take(choices[0]), here.take(choices[1])
    with pytest.raises(ResourceExhausted, match="memories_max"):
        here.take(choices[2])
    here.release(two)
    here.release(one)
    here.take(choices[2])
    assert [figures.name for figures in here.figures] == ["a", "c"]


def test_names_that_nothing_has_close_no_memory(make: Any, load: Any, own_pool: Any) -> None:
    here = make(memories_max=2)
    held, used = (Choice(name, load(name)) for name in ("a-held", "a-used"))
    until(lambda: here.open_ahead(held) == "open")
    here.release(here.take(used))
    for number in range(3):
        with pytest.raises(NotFound):
            here.take(Choice(f"never-{number}"))
    until(lambda: all(here.open_ahead(Choice(f"nor-{number}")).startswith("NotFound") for number in range(2)))
    here.tidy()
    assert [figures.name for figures in here.figures] == ["a-held", "a-used"]
    other = Choice("a-third", load("a-third"))
    here.take(other)
    assert [figures.name for figures in here.figures] == ["a-held", "a-third"]


def test_an_opening_that_finds_every_place_in_use_by_then_is_closed_again(make: Any, load: Any, own_pool: Any) -> None:
    here, late = make(memories_max=1), Choice("late", load("late"))
    first = Choice("first", load("first"))
    here.release(here.take(first))
    with own_pool.frozen():
        assert here.open_ahead(late) == "opening"
        memory = here.take(first)
    until(lambda: here.open_ahead(late) != "opening")
    assert "memories_max" in here.open_ahead(late)
    assert readers(own_pool, "late") == {late.version: 0}
    here.release(memory)
    until(lambda: here.open_ahead(late) == "open")
    assert [figures.name for figures in here.figures] == ["late"]


def test_a_superseded_version_is_closed_when_its_last_request_is_over(
    make: Any, load: Any, own_pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memories, "SUPERSEDED_SECONDS", 0.0)
    here, old = make(), load("swap", 1)
    memory = here.take(Choice("swap", old))
    new = load("swap", 2)
    here.take(Choice("swap", new))
    here.tidy()
    assert readers(own_pool, "swap") == {old: 1, new: 1}
    here.release(memory)
    here.tidy()
    assert readers(own_pool, "swap") == {old: 0, new: 1}


def test_a_memory_for_another_model_is_refused_by_the_field_and_nothing_stays_open(make: Any, load: Any, own_pool: Any) -> None:
    version = load("deep")
    with pytest.raises(FingerprintMismatch, match="layers"):
        make(layers=2).take(Choice("deep", version))
    assert readers(own_pool, "deep") == {version: 0}
    with pytest.raises(NotFound):
        make().take(Choice("never"))
    with pytest.raises(InvalidArgument, match="no pool"):
        make(engram_pool="").take(Choice("deep"))


def test_a_slow_opening_ends_the_wait_and_not_the_opening(make: Any, load: Any, own_pool: Any) -> None:
    here, choice = make(open_seconds_max=0.1), Choice("slow", load("slow"))
    with own_pool.frozen():
        assert here.open_ahead(choice) == "opening"
        with pytest.raises(DeadlineExceeded, match="still being opened"):
            here.take(choice)
    until(lambda: here.open_ahead(choice) == "open")
    assert here.take(choice).requests == 1
    until(lambda: here.open_ahead(Choice("never")) not in ("opening", "open"))


def test_fusion_weights_of_a_file_stand_in_for_the_pools(make: Any, own_pool: Any, tmp_path: Path) -> None:
    with own_pool.client() as client:
        (tmp_path / "fusion").write_bytes(client.read_fusion("kjv"))
    assert make(fusion_weights={"kjv": str(tmp_path / "fusion")}).take(Choice("kjv")).fused
    with pytest.raises(NotFound, match="no such fusion weights"):
        make(fusion_weights={"kjv": str(tmp_path / "absent")}).take(Choice("kjv"))


def test_current_versions_are_heard_of_and_outlive_a_pool_that_is_silent(load: Any, own_pool: Any) -> None:
    versions = CurrentVersions(MemoryConfig(engram_pool=own_pool.address))
    try:
        old = load("watched", 3)
        until(lambda: versions.of("watched") == old)
        new = load("watched", 4)
        until(lambda: versions.of("watched") == new)
        with own_pool.frozen():
            assert versions.of("watched") == new
        assert versions.of("never") == ""
    finally:
        versions.close()

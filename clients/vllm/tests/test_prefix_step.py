"""One step behind long prefixes by itself: whose numbers go where, and whose failure is whose."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from treadle.client.asm import map_folder
from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    KeyMode,
    Prefix,
    RowDtype,
    tensor_name,
)
from treadle.contract.dictionary_file import tensor_info, write_folder
from treadle.contract.errors import NotFound
from treadle.contract.lookup_settings import LookupSettings
from treadle.contract.policy import WaitPolicy
from treadle.vllm.config import MemoryConfig
from treadle.vllm.prefix_step import Member, PrefixStep, RunningPrefix
from treadle.vllm.prefixes import HeldPrefix, Prefixes
from treadle.vllm.step import RunningRequest
from treadle.vllm.windows import Span

HEADS, HEAD_DIM, LAYERS, ENTRIES, DIGEST = 2, 8, 2, 16, "ab" * 32
COUNTS = (3, 1, 4)  # tokens of each request in the step


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a dictionary of random numbers, whose guard calls about half of random lookups outside."""
    chance = np.random.default_rng(1)
    settings = DictionarySettings(key=KeyMode.OWN_POSITION, dtype=RowDtype.F32, entries=ENTRIES, heads_joined=1)
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        keys = chance.standard_normal((1, ENTRIES, HEADS * HEAD_DIM), dtype=np.float32)
        parts = {
            "keys": keys / np.linalg.norm(keys, axis=-1, keepdims=True), "counts": np.ones((1, ENTRIES), np.int32),
            "states": chance.standard_normal((1, ENTRIES, HEADS, HEAD_DIM), dtype=np.float32),
            "log_z": chance.standard_normal((1, ENTRIES, HEADS), dtype=np.float32),
            "cosine_quantiles": np.concatenate([np.full((1, 51), 0.4), np.ones((1, QUANTILES - 51))], axis=1).astype(np.float32),
        }  # fmt: skip
        tensors |= {tensor_name(layer, name): np.ascontiguousarray(rows) for name, rows in parts.items()}
    infos = tuple((name, tensor_info(rows, "I32" if rows.dtype == np.int32 else "F32")) for name, rows in sorted(tensors.items()))
    model = DictionaryModel(DIGEST, DIGEST, DIGEST, LAYERS, HEADS, HEADS, HEAD_DIM)
    made = Dictionary(
        "rules", model, tuple(range(LAYERS)), Prefix(DIGEST, 9, (9,)), Calibration(DIGEST, 1, ENTRIES), settings, infos
    )
    write_folder(tmp_path, made, tensors)
    return tmp_path


@pytest.fixture
def held(folder: Path) -> Iterator[HeldPrefix]:
    """It, open."""
    opened = HeldPrefix(map_folder(folder), LookupSettings())
    yield opened
    opened.close()


def a_step(held: HeldPrefix, counts: tuple[int, ...]) -> tuple[PrefixStep, list[RunningRequest]]:
    """A step of requests that begin, one after the other."""
    requests, members, place = [RunningRequest(None, WaitPolicy(1.0)) for _ in counts], [], 0
    for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
        request.prefix = RunningPrefix(held, exact=False, begins_anew=False, fails=False, prompt_tokens=count)
        members.append(Member(request, request.prefix, Span(row, 0, count, place), np.arange(place, place + count)))
        place += count
    rope: Any = None  # not asked for by keys at their own position
    return PrefixStep(members, place, rope, np.zeros(place, np.int32), 1.0), requests


def merged(held: HeldPrefix, counts: tuple[int, ...], *numbers: Tensor) -> tuple[Tensor, list[RunningRequest]]:
    """What the rows see after a step; numbers: rotated, out and log_z, [LAYERS, T, ...]."""
    step, requests = a_step(held, counts)
    rotated, out, log_z = (each.clone() for each in numbers)
    for layer in range(LAYERS):
        step.merge(layer, rotated[layer], out[layer], log_z[layer])
    step.finish()
    return out, requests


@pytest.mark.parametrize("spoilt", ["query", "log_z"])
def test_numbers_that_are_none_end_their_own_request_and_the_others_of_its_prefix_go_on(held: HeldPrefix, spoilt: str) -> None:
    draw, total = torch.Generator().manual_seed(2), sum(COUNTS)
    rotated, out = (torch.randn(LAYERS, total, HEADS, HEAD_DIM, generator=draw) for _ in range(2))
    log_z = torch.randn(LAYERS, total, HEADS, generator=draw)
    expected, sound = merged(held, COUNTS, rotated, out, log_z)
    if spoilt == "query":
        rotated[1, 3] = torch.nan  # the second request's one row, in the second layer
    else:
        log_z[1, 3, 0] = torch.nan  # as of an output that is all zeros
    got, requests = merged(held, COUNTS, rotated, out, log_z)
    assert [request.error is not None for request in requests] == [False, True, False]
    assert requests[1].error is not None
    assert (requests[1].error.kind, requests[1].dirty_from) == ("Unavailable", 0)
    for rows in (slice(0, 3), slice(4, 8)):
        torch.testing.assert_close(got[:, rows], expected[:, rows])
    used = [[request.prefix.used for request in each if request.prefix is not None] for each in (requests, sound)]
    assert [used[0][at] for at in (0, 2)] == [used[1][at] for at in (0, 2)]
    assert 0 < used[0][2].lookups_outside < used[0][2].lookups


def test_lookups_are_made_as_the_configuration_says(folder: Path) -> None:
    config = MemoryConfig.of({"treadle": {"prefix_guard_percent": 100, "prefix_lists_probed": 7}})
    strict = HeldPrefix(map_folder(folder), config.lookup)
    queries = torch.randn(5, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(3))
    found = strict.memory.lookup(0, queries, queries)
    assert found is not None
    assert found.outside.all()
    assert strict.memory._layers[0].entries.lists_probed == 7  # type: ignore[attr-defined]
    strict.close()


def test_an_index_that_is_not_installed_stops_the_engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hnswlib", None)
    with pytest.raises(NotFound, match="needs hnswlib"):
        Prefixes(MemoryConfig(prefix_index="hnsw"), folder)

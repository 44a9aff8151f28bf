"""Grown memories on disk, their shuffled copies, and perplexity from a worker's log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from treadle.cli.held_out import NO_MEMORY, blocks_of, measure
from treadle.cli.memories import GrownMemory
from treadle.cli.shuffled_memory import write_shuffled
from treadle.contract import DataLoss, EngramModel, InvalidArgument, NotFound, Table
from treadle.contract.table_manifest import version_of_rows
from treadle.inference.v1 import worker_pb2 as pb

Grow = Callable[..., EngramModel]


def test_a_folder_says_its_name_and_which_model_it_was_made_for(grow: Grow, tmp_path: Path) -> None:
    model = grow(tmp_path / "notes", "notes", hidden=960)
    memory = GrownMemory.read(tmp_path / "notes")
    assert (memory.name, memory.model) == ("notes", model)
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30, "hidden_size": 960}')
    assert memory.misfit(tmp_path) == ""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 30, "hidden_size": 576}')
    assert "notes was made for fake-135m (30 layers of 960)" in memory.misfit(tmp_path)


def test_a_folder_that_is_none_is_told_by_the_file_that_is_missing_or_wrong(grow: Grow, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"manifest.json cannot be read.*treadle engram grow"):
        GrownMemory.read(tmp_path)
    grow(tmp_path / "notes", "notes")
    (tmp_path / "notes" / "card.json").write_text("[]")
    with pytest.raises(InvalidArgument, match=r"card.json: an object expected"):
        GrownMemory.read(tmp_path / "notes")


def test_a_shuffled_copy_has_the_same_rows_in_other_places_and_digests_that_are_true(grow: Grow, tmp_path: Path) -> None:
    before = grow(tmp_path / "kjv", "kjv")
    after = write_shuffled(tmp_path / "kjv", tmp_path / "copy", name="kjv-shuffled")
    assert GrownMemory.read(tmp_path / "copy").model == after
    assert (after.name, after.fusion, after.token_map) == ("kjv-shuffled", before.fusion, before.token_map)
    own, copied = load_file(tmp_path / "kjv" / "rows.safetensors"), load_file(tmp_path / "copy" / "rows.safetensors")
    assert np.array_equal(own["token_map"], copied["token_map"])
    for layer, table in after.tables:
        rows, wrong = own[f"{layer}.rows"], copied[f"{layer}.rows"]
        assert table == Table(len(wrong), version_of_rows(wrong)) != before.table(layer)
        assert not np.array_equal(rows, wrong)
        assert sorted(map(bytes, rows)) == sorted(map(bytes, wrong))
    assert (tmp_path / "copy" / "fusion.safetensors").read_bytes() == (tmp_path / "kjv" / "fusion.safetensors").read_bytes()


def test_the_same_seed_shuffles_alike_and_another_does_not(grow: Grow, tmp_path: Path) -> None:
    grow(tmp_path / "kjv", "kjv")
    first, again, other = (
        write_shuffled(tmp_path / "kjv", tmp_path / str(at), name="wrong", seed=seed) for at, seed in enumerate((1, 1, 2))
    )
    assert first == again
    assert first != other


def test_a_copy_is_never_written_over_and_torn_rows_are_found(grow: Grow, tmp_path: Path) -> None:
    grow(tmp_path / "kjv", "kjv")
    with pytest.raises(InvalidArgument, match="is there already"):
        write_shuffled(tmp_path / "kjv", tmp_path / "kjv", name="wrong")
    (tmp_path / "kjv" / "rows.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    with pytest.raises(DataLoss, match="layer 1"):
        write_shuffled(tmp_path / "kjv", tmp_path / "copy", name="wrong")


class MadeUpWorker:
    """Gives each token the same log-probability, by memory, in two messages."""

    def __init__(self, logprobs: dict[str, float], *, short: bool = False) -> None:
        self.logprobs, self.short = logprobs, short
        self.asked: list[pb.GenerateRequest] = []

    def generate(self, request: pb.GenerateRequest, timeout_seconds: float) -> Iterator[pb.GenerateResponse]:
        self.asked.append(request)
        name = request.engram.model
        tokens = [pb.TokenLogprob(token_id=token, logprob=self.logprobs[name]) for token in request.prompt_token_ids[1:]]
        yield pb.GenerateResponse(prompt_logprobs=tokens[:3])
        if not self.short:
            yield pb.GenerateResponse(prompt_logprobs=tokens[3:])
        report = pb.MemoryReport(name=name, version="ab", transport="mapped", tickets=4, tickets_in_time=3)
        yield pb.GenerateResponse(memory=[report] if name else [])


def test_perplexity_is_the_exponential_of_the_mean_over_all_predicted_tokens() -> None:
    worker: Any = MadeUpWorker({NO_MEMORY: -2.0, "kjv": -1.5})
    ticks: list[tuple[int, int]] = []
    scores = measure(worker, [(1, 2, 3, 4, 5), (6, 7, 8, 9, 10)], (NO_MEMORY, "kjv"), lambda done, of: ticks.append((done, of)))
    assert scores["kjv"].perplexity == pytest.approx(math.exp(1.5))
    assert scores[NO_MEMORY].perplexity == pytest.approx(math.exp(2.0))
    assert scores["kjv"].document() == {
        "memory": "kjv", "perplexity": pytest.approx(math.exp(1.5)), "tokens": 8, "versions": ["ab"], "transports": ["mapped"],
        "degraded": 0, "tickets": 8, "tickets_in_time": 6, "rows_missing": 0,
    }  # fmt: skip
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(request.HasField("engram") and request.sampling.prompt_logprobs for request in worker.asked)  # none is a choice, too


def test_log_probabilities_that_are_missing_are_no_perplexity() -> None:
    worker: Any = MadeUpWorker({NO_MEMORY: -2.0}, short=True)
    with pytest.raises(DataLoss, match="of 3 tokens, not of the 4"):
        measure(worker, [(1, 2, 3, 4, 5)], (NO_MEMORY,))


def test_blocks_are_spread_over_the_whole_text(cli: Any) -> None:
    tokenizer, text = cli.home / "model" / "tokenizer.json", "in the beginning " * 1000
    blocks = blocks_of(text, tokenizer, 512)
    assert [len(block) for block in blocks] == [256, 256]
    assert blocks[0][:4] == (0, 1, 2, 0)
    assert blocks[1][0] == 10 * 256 % 3  # the eleventh and last whole block
    with pytest.raises(InvalidArgument, match="has 3000 tokens, 4096"):
        blocks_of(text, tokenizer, 4096)
    with pytest.raises(NotFound, match="no such file"):
        blocks_of(text, cli.home / "none.json", 256)

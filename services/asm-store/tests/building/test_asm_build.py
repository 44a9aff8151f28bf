"""Builds on a tiny model, from tokens to a folder that engines can look into."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asm_store.building.build import Build, Order
from asm_store.building.codebooks import LayerSamples, add_up, fit
from asm_store.building.collection import OPENING_MAX, Collection, batches, opening_of, positions_of
from asm_store.building.prefix import load_tokenizer
from asm_store.building.prefix_kv import read_prefix_kv
from asm_store.building.self_traces import write_traces
from asm_store.building.spill import Spill
from asm_store.building.stepping import Before, encode, step
from asm_store.building.traces import Trace
from asm_store.domain.extending import write_extended
from treadle.contract.dictionary import Aggregation, ChunkMerge, Dictionary, Grouping, KeyMode, RowDtype, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, check_digests, map_tensors, read_manifest
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument
from treadle.kernels import as_numbers
from treadle.nn.attention import merge
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model
from treadle.nn.prefix_memory import PrefixMemory

Orders = Callable[..., Order]


def some_tokens(count: int, seed: int) -> Trace:
    return tuple(int(token) for token in np.random.default_rng(seed).integers(0, 200, count))


def opened(folder: Path) -> tuple[Dictionary, dict[str, Any]]:
    dictionary = read_manifest(folder)
    tensors = map_tensors(folder / TENSORS_FILE, dictionary)
    check_digests(tensors, dictionary)
    return dictionary, tensors


def logits_behind(model: CausalLM, before: Before, trace: Trace) -> torch.Tensor:
    return model.logits(step(model, before, [trace], [model.new_kv()]))


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"grouping": Grouping.INDIVIDUAL, "heads_joined": 2}, {"aggregation": Aggregation.EQ5, "dtype": RowDtype.F32},
        {"key": KeyMode.ROPE_UNIFIED, "key_position": 9, "ridge_ppm": 1000}, {"lists": 4, "dtype": RowDtype.BF16, "layers": (0, 2)}, {"matched_keys": 6, "heads_joined": 2},
    ],
)  # fmt: skip
def test_a_folder_is_whole_and_can_be_looked_into(build: Orders, tiny: CausalLM, settings: dict[str, Any]) -> None:
    order = build(**settings)
    dictionary, tensors = opened(order.out)
    memory = PrefixMemory(dictionary, tensors)
    assert sorted(path.name for path in order.out.iterdir()) == ["card.json", "dictionary.safetensors", "manifest.json"]
    assert dictionary.prefix.tokens == memory.position_offset == len(order.prefix)
    assert dictionary.calibration.traces == 36
    for layer in dictionary.layers:
        counts, log_z = tensors[tensor_name(layer, "counts")], tensors[tensor_name(layer, "log_z")]
        assert counts.min() > 0
        assert np.isfinite(log_z).all()
        assert (np.diff(tensors[tensor_name(layer, "cosine_quantiles")], axis=1) >= 0).all()
    near, far = (logits_behind(tiny, before, order.traces[9]) for before in (Before.dictionary(memory), Before()))
    assert near.shape == far.shape
    assert not torch.allclose(near, far)


def test_a_card_says_what_was_measured_on_traces_held_out(build: Orders) -> None:
    card = json.loads((build().out / "card.json").read_text())
    assert card["calibration"]["held_out_traces"] == 4
    assert set(card["fit"]) == {"0", "1", "2"}
    assert card["fidelity"]["nothing"]["kl"] > 0
    assert card["fidelity"]["dictionary"]["tokens"] == card["calibration"]["held_out_tokens"]


@pytest.mark.parametrize("matched_keys", [0, 5])
def test_with_an_entry_for_every_sample_the_model_answers_as_with_the_prefix(
    build: Orders, tiny: CausalLM, matched_keys: int
) -> None:
    traces = different_tokens()
    count = sum(map(len, traces))
    order = build(
        traces=traces, entries=count, key=KeyMode.OWN_POSITION, heads_joined=2, grouping=Grouping.SHARED, dtype=RowDtype.F32,
        iterations=0, held_out_every=0, matched_keys=matched_keys,
    )  # fmt: skip
    memory = PrefixMemory(*opened(order.out))
    prefix = encode(tiny, order.prefix, (len(order.prefix),))
    for trace in traces:
        full = logits_behind(tiny, Before(prefix.length, shared=prefix), trace)
        torch.testing.assert_close(logits_behind(tiny, Before.dictionary(memory), trace), full, rtol=0, atol=1e-4)


def different_tokens() -> tuple[Trace, ...]:
    return tuple(tuple(range(first, first + 12)) for first in range(0, 120, 12))


def test_the_same_order_gives_the_same_version(order: Orders, tiny: CausalLM, tmp_path: Path) -> None:
    versions = {Build(order(out=tmp_path / name), model=tiny).run()[0].version for name in ("one", "two")}
    assert len(versions) == 1
    assert Build(order(out=tmp_path / "three", seed=1), model=tiny).run()[0].version not in versions


def test_a_trace_longer_than_a_step_runs_alone_and_in_pieces(
    order: Orders, tiny: CausalLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    traces = (tuple(range(50)), (1, 2, 3), (4, 5))
    assert batches([(1,) * 200, (1,) * 100, (1,) * 156, (1,) * 300]) == [range(1), range(1, 3), range(3, 4)]
    assert [len(batch) for batch in batches(traces)] == [3]
    whole, _ = Build(order(out=tmp_path / "whole", traces=traces, entries=8), model=tiny).run()
    monkeypatch.setattr("asm_store.building.collection.STEP_ROWS", 16)
    assert [len(batch) for batch in batches(traces)] == [1, 2]
    Build(order(out=tmp_path / "pieces", traces=traces, entries=8), model=tiny).run()
    for name, tensor in opened(tmp_path / "whole")[1].items():
        if name.endswith("log_z"):
            np.testing.assert_allclose(tensor, opened(tmp_path / "pieces")[1][name], atol=1e-3)
    assert whole.calibration.tokens == 55


@pytest.mark.parametrize("key", list(KeyMode))
def test_what_all_traces_begin_with_runs_once_and_counts_for_each(
    tiny: CausalLM, order: Orders, key: KeyMode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    prefix, opening = encode(tiny, order().prefix, (len(order().prefix),)), (7, 8, 9, 10)
    traces = (*(opening + each for each in different_tokens()), opening + tuple(range(40)), (*opening, 99))
    monkeypatch.setattr("asm_store.building.collection.STEP_ROWS", 30)
    tokens, ran, forward = sum(map(len, traces)), list[int](), tiny.forward

    def counting(new: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        ran[-1] += len(new)
        return forward(new, *rest, **more)

    monkeypatch.setattr(tiny, "forward", counting)
    spills = []
    for name in ("once", "each"):
        ran.append(0)
        spill = Spill(tmp_path / name, (0, 1), 4, 8, exact=True)
        collection = Collection(tiny, Before(prefix.length, shared=prefix), traces, spill, key)
        *_, last = collection.run()
        assert collection.tokens_of(last) == tokens
        spills.append([spill.read(layer, 0, tokens) for layer in (0, 1)])
        monkeypatch.setattr("asm_store.building.collection.opening_of", lambda traces: ())
    assert ran == [tokens - (len(traces) - 1) * len(opening), tokens]
    for once, each in zip(*spills, strict=True):
        for part in ("queries", "a", "log_z"):
            torch.testing.assert_close(getattr(once, part), getattr(each, part), rtol=0, atol=1e-4)


def test_the_opening_of_traces_leaves_a_token_of_each() -> None:
    assert opening_of([(1, 2, 3), (1, 2, 3, 4), (1, 2, 5)]) == (1, 2)
    assert opening_of([(1, 2), (1, 2)]) == (1,)
    assert opening_of([(1, 2, 3), (4,)]) == opening_of([(1, 2, 3)]) == ()
    assert len(opening_of([tuple(range(1000))] * 2)) == OPENING_MAX


def test_more_entries_than_different_keys_are_entries_all_the_same(order: Orders, tiny: CausalLM, tmp_path: Path) -> None:
    """In the first layer a key follows from its token alone; a store takes in keys of length 1 and nothing else."""
    traces = tuple(tuple((first + place) % 7 for place in range(30)) for first in range(12))
    made, _ = Build(order(out=tmp_path / "made", traces=traces, entries=64), model=tiny).run()
    tensors = opened(tmp_path / "made")[1]
    for name, tensor in tensors.items():
        if name.endswith(".keys"):
            rows = as_numbers(tensor, tensors.get(f"{name[: -len('keys')]}key_scales"))
            np.testing.assert_allclose(np.linalg.norm(rows, axis=-1), 1.0, atol=0.01)
    assert made.settings.entries == 64


def test_shards_of_the_samples_added_in_any_order_make_the_same_entries(order: Orders, tiny: CausalLM, tmp_path: Path) -> None:
    wanted = order()
    prefix = encode(tiny, wanted.prefix, (len(wanted.prefix),))
    spill = Spill(tmp_path / "spill", (1,), 4, 8, exact=False)
    collection = Collection(tiny, Before(prefix.length, shared=prefix), wanted.traces, spill, KeyMode.PRE_ROPE)
    *_, last = collection.run()
    tokens = collection.tokens_of(last)
    model, standing = dictionary_model(wanted.model_folder, tiny.config), positions_of(wanted.traces, prefix.length)
    samples = LayerSamples(spill, 1, wanted.recipe.settings, model, tiny.rope, standing)
    centroids = fit(samples, tokens, None)
    (whole,) = add_up(samples, centroids, 0, tokens, None)
    cuts = [0, 1, 50, 120, 121, 300, tokens]
    shards = [add_up(samples, centroids, first, end, None)[0] for first, end in pairwise(cuts)]
    for places in ([5, 0, 3, 1, 4, 2], [2, 4, 0, 1, 5, 3]):
        merged = add_up(samples, centroids, 0, 0, None)[0]
        for place in places:
            merged.merge(shards[place])
        for name in ("keys", "a", "log_z"):
            torch.testing.assert_close(getattr(merged.aggregated(), name), getattr(whole.aggregated(), name), rtol=1e-5, atol=1e-5)


def test_a_build_in_chunks_holds_one_whole_prefix_at_a_time(order: Orders, tiny: CausalLM) -> None:
    wanted, held = order(chunk_tokens=16, keep_prefix_kv=True), list[int]()

    def watch(what: str, done: int, of: int) -> None:
        if what == "reading the prefix in one piece":
            held.append(whole_prefixes())

    gc.collect()  # what other tests left
    before = whole_prefixes()
    Build(wanted, watch, model=tiny).run()
    assert max(held) - before == 1
    kept = read_prefix_kv(wanted.out, read_manifest(wanted.out), tiny)
    assert torch.equal(kept.keys(1), encode(tiny, wanted.prefix, (40,)).keys(1))


def whole_prefixes() -> int:
    """Keys and values of 40 tokens or more that are held in this process."""
    return sum(type(found) is SequenceKV and found.length >= 40 for found in gc.get_objects())


def test_prefix_kv_is_kept_where_asked_for(build: Orders, tiny: CausalLM) -> None:
    order = build(keep_prefix_kv=True)
    dictionary = read_manifest(order.out)
    kept, exact = read_prefix_kv(order.out, dictionary, tiny), encode(tiny, order.prefix, (len(order.prefix),))
    for layer in range(3):
        assert torch.equal(kept.keys(layer), exact.keys(layer))
        assert torch.equal(kept.values(layer), exact.values(layer))
    with (order.out / "prefix_kv.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(DataLoss, match="sha256"):
        read_prefix_kv(order.out, dictionary, tiny)


def test_a_mean_over_chunks_is_their_sum_less_the_logarithm_of_their_number(build: Orders, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"chunk_tokens": 16, "dtype": RowDtype.F32}
    total = build(out=tmp_path / "sum", chunk_merge=ChunkMerge.SUM, **fields)
    mean = build(out=tmp_path / "mean", chunk_merge=ChunkMerge.MEAN, **fields)
    assert read_manifest(total.out).prefix.chunks == (16, 16, 8)
    _, summed = opened(total.out)
    _, averaged = opened(mean.out)
    for layer in range(3):
        log_z, states = tensor_name(layer, "log_z"), tensor_name(layer, "states")
        np.testing.assert_allclose(summed[log_z] - np.log(3), averaged[log_z], atol=1e-4)
        np.testing.assert_allclose(summed[states], averaged[states], atol=1e-4)


def test_chunks_are_encoded_alone_at_their_true_positions(tiny: CausalLM) -> None:
    tokens = tuple(range(40))
    whole, alone = encode(tiny, tokens, (24, 16)), encode(tiny, tokens[24:], (16,), 24)
    first = encode(tiny, tokens[:24], (24,))
    for layer in range(3):
        torch.testing.assert_close(whole.keys(layer)[24:], alone.keys(layer))
        torch.testing.assert_close(whole.keys(layer)[:24], first.keys(layer))


def test_a_further_chunk_has_its_bases_keys_and_its_own_states(
    build: Orders, order: Orders, tiny: CausalLM, tmp_path: Path
) -> None:
    base = build(out=tmp_path / "base", lists=4)
    further = order(out=tmp_path / "further", base=base.out, prefix=base.prefix[:16], lists=4)
    dictionary, _ = Build(further, model=tiny).run()
    before = dict(read_manifest(base.out).tensors)
    after = dict(dictionary.tensors)
    for layer in range(3):
        for part in ("keys", "key_scales", "list_keys", "list_starts"):
            assert after[tensor_name(layer, part)].sha256 == before[tensor_name(layer, part)].sha256
        assert after[tensor_name(layer, "states")].sha256 != before[tensor_name(layer, "states")].sha256
    assert (dictionary.prefix.first, dictionary.prefix.tokens) == (40, 16)
    with pytest.raises(InvalidArgument, match="further chunk alone, read behind 40 tokens"):
        Build(order(out=tmp_path / "behind", base=further.out, lists=4), model=tiny)
    assert json.loads((further.out / "card.json").read_text())["base"] == read_manifest(base.out).version


@pytest.mark.parametrize("how", list(ChunkMerge))
def test_a_base_extended_by_a_further_chunk_stands_for_both(
    build: Orders, order: Orders, tiny: CausalLM, tmp_path: Path, how: ChunkMerge
) -> None:
    traces = different_tokens()
    fields: dict[str, Any] = {
        "traces": traces, "entries": 120, "heads_joined": 2, "dtype": RowDtype.F32, "iterations": 0, "held_out_every": 0, "layers": (0,),
        "chunk_merge": how,
    }  # fmt: skip
    base = build(out=tmp_path / "base", **fields)
    chunk = order(out=tmp_path / "chunk", base=base.out, prefix=some_tokens(24, 9), **fields)
    Build(chunk, model=tiny).run()
    both, _ = write_extended(tmp_path / TENSORS_FILE, opened(base.out), opened(chunk.out))
    memory = PrefixMemory(both, map_tensors(tmp_path / TENSORS_FILE, both))
    assert memory.position_offset == 64
    over_base = Taken.of(tiny, Before(40, shared=encode(tiny, base.prefix, (40,))), traces)
    over_chunk = Taken.of(tiny, Before(64, shared=encode(tiny, chunk.prefix, (24,), 40)), traces)
    states, log_z = merge(over_base.a, over_base.log_z, over_chunk.a, over_chunk.log_z)
    found = memory.lookup(0, over_chunk.queries, over_chunk.rotated)
    assert found is not None
    torch.testing.assert_close(found.states, states, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.log_z, log_z - (np.log(2) if how is ChunkMerge.MEAN else 0.0), rtol=0, atol=1e-4)


class Taken:
    """What traces see of a shared prefix in layer 0, computed without a builder."""

    queries: torch.Tensor
    rotated: torch.Tensor
    a: torch.Tensor
    log_z: torch.Tensor

    @classmethod
    def of(cls, model: CausalLM, before: Before, traces: Sequence[Trace]) -> Taken:
        taken = cls()
        step(model, replace(before, collect=taken), traces, [model.new_kv() for _ in traces])
        return taken

    def take(self, layer: int, queries: torch.Tensor, rotated: torch.Tensor, a: torch.Tensor, log_z: torch.Tensor) -> None:
        if layer == 0:
            self.queries, self.rotated, self.a, self.log_z = queries, rotated, a, log_z


def test_a_further_chunk_of_another_kind_is_refused_by_the_field(
    build: Orders, order: Orders, tiny: CausalLM, tmp_path: Path
) -> None:
    base = build(out=tmp_path / "base")
    with pytest.raises(FingerprintMismatch, match="settings"):
        Build(order(out=tmp_path / "a", base=base.out, entries=16), model=tiny)
    with pytest.raises(FingerprintMismatch, match="layers"):
        Build(order(out=tmp_path / "b", base=base.out, layers=(0,)), model=tiny)


def test_the_model_writes_its_own_traces_the_same_for_the_same_seed(order: Orders, tiny: CausalLM, tmp_path: Path) -> None:
    versions = [
        Build(order(out=tmp_path / str(place), self_traces=24, held_out_every=0), model=tiny).run()[0] for place in range(2)
    ]
    assert versions[0].calibration == versions[1].calibration
    assert versions[0].calibration.traces == 24
    assert versions[0].calibration.tokens <= 24 * 120
    other, _ = Build(order(out=tmp_path / "other", self_traces=24, held_out_every=0, seed=7), model=tiny).run()
    assert other.calibration.digest != versions[0].calibration.digest


def test_every_second_trace_of_a_model_that_chats_is_a_chat(tiny: CausalLM, tiny_folder: Path) -> None:
    tokenizer, prefix = load_tokenizer(tiny_folder), encode(tiny, tuple(range(30)), (30,))
    before = Before(30, shared=prefix)
    traces = write_traces(tiny, before, tuple(range(30)), tokenizer, lambda prompt: f"<u>{prompt}</u><a>", 20, 0)
    texts = [tokenizer.decode(list(trace)) for trace in traces]
    chats = [text for text in texts if text.startswith("<u>")]
    assert (len(traces), len(chats)) == (20, 10)
    assert all("</u><a>" in text for text in chats)
    assert traces == write_traces(tiny, before, tuple(range(30)), tokenizer, lambda prompt: f"<u>{prompt}</u><a>", 20, 0)


def test_too_few_samples_are_refused_before_any_work(order: Orders, tiny: CausalLM) -> None:
    wanted = order(entries=4096)
    with pytest.raises(InvalidArgument, match="4096 entries need as many calibration samples"):
        Build(wanted, model=tiny)
    assert not wanted.out.exists()


def test_a_prefix_that_leaves_no_positions_is_refused(order: Orders, tiny: CausalLM) -> None:
    with pytest.raises(InvalidArgument, match="knows 1024 positions"):
        Build(order(prefix=(1,) * 1024), model=tiny).run()


def test_a_model_with_damaged_weights_is_refused(order: Orders, tiny_folder: Path) -> None:
    damaged = CausalLM.load(tiny_folder)
    damaged.weights.layers[1].mlp_norm[3] = torch.nan
    with pytest.raises(InvalidArgument, match="layer 2: queries of a trace hold NaN"):
        Build(order(), model=damaged).run()


def test_numbers_that_are_not_finite_are_refused_by_layer(tmp_path: Path) -> None:
    spill = Spill(tmp_path, (3,), 2, 4, exact=False)
    fine, log_z = torch.ones(5, 2, 4), torch.ones(5, 2)
    with pytest.raises(InvalidArgument, match="layer 3: states of a trace hold NaN"):
        spill.append(3, fine, fine * torch.nan, log_z)
    with pytest.raises(InvalidArgument, match=r"layer 3: queries of .* too large for fp16"):
        spill.append(3, fine * 1e6, fine, log_z)


def test_a_spill_that_lost_tokens_is_refused(tmp_path: Path) -> None:
    spill = Spill(tmp_path, (0,), 2, 4, exact=True)
    spill.append(0, torch.ones(5, 2, 4), torch.ones(5, 2, 4), torch.ones(5, 2))
    spill.cut(3)
    with pytest.raises(DataLoss, match="ends before token 4"):
        spill.read(0, 0, 4)
    with pytest.raises(DataLoss, match="shorter than 5 tokens"):
        spill.cut(5)

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engram_pool.growing.corpus import Corpus
from engram_pool.growing.grower import Grower, spread_of
from engram_pool.growing.memory import Memory
from engram_pool.growing.recipe import Recipe
from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.nn.frozen import FrozenLM
from treadle_bench.grow import measuring, memory_run
from treadle_bench.grow.driver import Place, drive, is_done
from treadle_bench.grow.material import Material, some_blocks
from treadle_bench.grow.memory_run import snapshots, states_of
from treadle_bench.grow.ngram_run import training_order
from treadle_bench.grow.runs import ALL, MAIN_TOKENS, MARKS, Kind, Run, marks_of, needs, ordered_runs
from treadle_bench.grow.store import Record, Scores, Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

VOCABULARY, LENGTH = 120, 32
RECIPE = Recipe(layers=(1, 2), dim=32, heads=2, prime_base=101, block_tokens=LENGTH, mix_every=3, seed=4)
STEP_TOKENS = LENGTH * RECIPE.blocks_per_step


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FrozenLM:
    folder = tmp_path_factory.mktemp("tiny-llama")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return FrozenLM.load(folder, torch.float32)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    blocks = np.random.default_rng(3).integers(3, VOCABULARY, size=(46, LENGTH))
    return Corpus(train=blocks[:38], held_out=blocks[38:42], mix=blocks[42:], other=blocks[:0], digest="text", names=("made",))


@pytest.fixture
def grower(model: FrozenLM, corpus: Corpus) -> Callable[[], Grower]:
    def make() -> Grower:
        token_map = np.arange(VOCABULARY, dtype=np.int32)
        spread = spread_of(model, corpus.train, RECIPE.layers)
        memory = Memory.begin("made", RECIPE, token_map, VOCABULARY, 2, model.config.hidden, spread)
        return Grower(model, memory, corpus, RECIPE)

    return make


def test_every_mark_gets_the_first_state_at_or_behind_it_and_the_last_the_end(grower: Callable[[], Grower], tmp_path: Path) -> None:
    marks = (STEP_TOKENS, 3 * STEP_TOKENS - 5, ALL)
    found = snapshots(grower(), tmp_path, marks)
    assert [each.mark for each in found] == list(marks)
    assert [each.tokens for each in found] == [STEP_TOKENS, 3 * STEP_TOKENS, 38 * LENGTH]
    assert [each.cpu_seconds for each in found] == sorted(each.cpu_seconds for each in found)
    assert all(each.path.with_suffix(".safetensors").is_file() for each in found)


def test_a_run_that_was_cut_short_ends_as_one_that_was_not(
    grower: Callable[[], Grower], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = grower()
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    snapshots(whole, tmp_path / "whole", (ALL,))
    monkeypatch.setattr(memory_run, "SAVE_STEPS", 2)

    class Killed(Exception):
        pass

    cut = grower()
    run = cut.run

    def killed() -> object:
        for report in run():
            yield report
            if report.step == 7:
                raise Killed

    monkeypatch.setattr(cut, "run", killed)
    with pytest.raises(Killed):
        snapshots(cut, tmp_path / "cut", (STEP_TOKENS, ALL))
    resumed = grower()
    found = snapshots(resumed, tmp_path / "cut", (STEP_TOKENS, ALL))
    assert [each.tokens for each in found] == [STEP_TOKENS, 38 * LENGTH]
    for layer in RECIPE.layers:
        assert torch.equal(resumed.memory.layers[layer].rows, whole.memory.layers[layer].rows)
        assert torch.equal(resumed.memory.layers[layer].wkv, whole.memory.layers[layer].wkv)


def test_marks_that_are_reached_are_not_trained_again(grower: Callable[[], Grower], tmp_path: Path) -> None:
    first = snapshots(grower(), tmp_path, (STEP_TOKENS,))
    again = grower()
    assert snapshots(again, tmp_path, (STEP_TOKENS,)) == first
    assert again.step_done == 0


def test_the_n_gram_rival_counts_the_blocks_that_the_memory_saw_first(grower: Callable[[], Grower], corpus: Corpus) -> None:
    seen = np.concatenate([blocks for mix, blocks in grower().plan if not mix])
    np.testing.assert_array_equal(training_order(len(corpus.train), RECIPE.seed), seen)


def test_single_tokens_losses_sum_to_the_blocks(model: FrozenLM, corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_pool.growing.evaluation import score

    monkeypatch.setattr(measuring, "TOKENS_A_BLOCK", LENGTH - 1)
    losses = measuring.token_losses(model, corpus.held_out)
    assert losses.shape == (len(corpus.held_out), LENGTH - 1)
    np.testing.assert_allclose(losses.sum(1), score(model, corpus.held_out).nats, rtol=1e-5)


def test_a_smaller_sample_is_part_of_no_sample_s_whim() -> None:
    blocks = np.zeros((125, 4), dtype=np.int64)
    assert some_blocks(blocks, 500).tolist() == list(range(125))
    chosen = some_blocks(blocks, 64)
    assert len(chosen) == 64
    assert (chosen[0], chosen[-1]) == (0, 124)
    assert chosen.tolist() == some_blocks(blocks, 64).tolist()


def test_other_texts_than_the_baseline_s_are_refused(tmp_path: Path, corpus: Corpus) -> None:
    store = Store(tmp_path)
    store.put(Record("kjv", Kind.FROZEN, 0, 0, "on", {}, LENGTH, digest="one"))
    measuring.require_same_texts(store, Material("kjv", "one", corpus, {}))
    with pytest.raises(FingerprintMismatch, match="texts of kjv"):
        measuring.require_same_texts(store, Material("kjv", "other", corpus, {}))


def test_overlaps_are_added_to_a_baseline_that_is_there_and_change_nothing_else_of_it(tmp_path: Path, corpus: Corpus) -> None:
    store, material = Store(tmp_path), Material("kjv", "one", corpus, {})
    overlaps = {"held-parts": {"ngram_tokens": 24, "held": 0.0113, "itself": 0.0164}}
    assert not measuring.note_overlaps(store, material, overlaps)  # nothing was measured yet
    frozen = Record("kjv", Kind.FROZEN, 0, 0, "on", {"held-parts": Scores((0,), (1.0,))}, LENGTH, digest="one", notes={"a": 1})
    store.put(frozen)
    assert not measuring.note_overlaps(store, material, overlaps)  # its losses of single tokens are gone: measure anew
    measuring.frozen_losses_path(store, "kjv").touch()
    assert measuring.note_overlaps(store, material, overlaps)
    assert store.get("kjv", Kind.FROZEN, 0, 0) == replace(frozen, notes={"a": 1, measuring.OVERLAP_NOTE: overlaps})
    with pytest.raises(FingerprintMismatch, match="texts of kjv"):
        measuring.note_overlaps(store, Material("kjv", "other", corpus, {}), overlaps)


def test_the_baseline_keeps_the_overlaps_that_were_measured_with_it(
    tmp_path: Path, corpus: Corpus, model: FrozenLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "TOKENS_A_BLOCK", LENGTH - 1)
    store, material = Store(tmp_path), Material("kjv", "one", corpus, {"held-parts": corpus.held_out})
    overlaps = {"held-parts": {"ngram_tokens": 24, "held": 0.1, "itself": 0.2}}
    measuring.measure_frozen(Run("kjv", Kind.FROZEN), material, model, store, measuring.QUICK, overlaps)
    assert store.get("kjv", Kind.FROZEN, 0, 0).notes[measuring.OVERLAP_NOTE] == overlaps


def test_a_memory_is_done_when_its_marks_and_all_states_of_the_last_are_there(tmp_path: Path) -> None:
    store, run = Store(tmp_path), Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS)
    sets = {"held-parts": Scores((0,), (1.0,))}
    for mark in MARKS:
        for state in states_of(run, mark):
            assert not is_done(run, store)
            store.put(Record("kjv", Kind.MEMORY, 0, mark, state, sets, LENGTH))
    assert is_done(run, store)
    assert len(states_of(run, MARKS[-1])) == 7
    assert states_of(Run("kjv", Kind.TOY, 0, MAIN_TOKENS), 300_000) == ("on",)
    assert states_of(Run("kjv", Kind.MEMORY, 1, MAIN_TOKENS), MAIN_TOKENS) == ("on",)


def test_a_run_that_stops_early_keeps_its_plan_and_its_name() -> None:
    runs = ordered_runs(stop_at=300_000)
    assert {run.stop_at for run in runs if run.kind is not Kind.FROZEN} == {300_000}
    assert all(run.tokens == MAIN_TOKENS for run in runs if run.kind is not Kind.FROZEN)
    memory = Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS, stop_at=300_000)
    assert memory in runs
    assert memory.key == Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS).key
    assert marks_of(memory) == (50_000, 100_000, 300_000)
    assert needs(Run("kjv", Kind.LORA, 0, MAIN_TOKENS, stop_at=300_000))[-1] == memory
    with pytest.raises(InvalidArgument, match="first mark"):
        ordered_runs(stop_at=10)


def test_a_smaller_sample_is_a_part_of_the_whole_one() -> None:
    for count in (31, 128, 165, 500):
        blocks = np.zeros((count, LENGTH), dtype=np.int64)
        for name in ("held-parts", "held-wholes", "jack-sheppard"):
            whole, mark = (set(sample.numbers(name, blocks).tolist()) for sample in (measuring.WHOLE, measuring.MARK))
            assert mark <= whole
            assert len(mark) == min(measuring.MARK.limit(name), count)


def test_a_run_that_fails_and_those_that_need_it_are_handed_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    frozen, memory = Run("kjv", Kind.FROZEN), Run("kjv", Kind.MEMORY, 0, MAIN_TOKENS)
    said: list[str] = []
    place = Place(tmp_path / "work", tmp_path / "no-books", tmp_path / "no-model")
    assert drive([frozen, memory], place, say=said.append) == [frozen, memory]
    assert any("FAILED kjv-frozen" in line for line in said)
    assert not any("started kjv-memory" in line for line in said)
    assert "no such text" in capfd.readouterr().err


def test_nothing_starts_once_the_budget_is_spent_and_jobs_have_a_limit(tmp_path: Path) -> None:
    place, run = Place(tmp_path, tmp_path, tmp_path), Run("kjv", Kind.FROZEN)
    said: list[str] = []
    assert drive([run], place, budget_seconds=0.0, say=said.append) == [run]
    assert not any("started" in line for line in said)
    with pytest.raises(InvalidArgument, match="--jobs"):
        drive([run], place, jobs=99)

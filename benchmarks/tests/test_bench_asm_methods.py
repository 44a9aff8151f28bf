import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from treadle.contract.dictionary import DictionarySettings, Grouping, RowDtype
from treadle.contract.errors import InvalidArgument
from treadle.nn.model import CausalLM
from treadle_bench.asm import costs, evaluation, operating, sweeps
from treadle_bench.asm.answering import Before, before_prefix, encode_prefix, label_log_probs
from treadle_bench.asm.attention_matching import match, match_head
from treadle_bench.asm.cells import Cells
from treadle_bench.asm.compact_kv import kept_of
from treadle_bench.asm.dictionaries import Builder
from treadle_bench.asm.evaluation import Plan, run
from treadle_bench.asm.heatmap import Watched, grid_of
from treadle_bench.asm.kvpress_script import kept_keys
from treadle_bench.asm.methods import STORAGE_PERCENT, Bench, Kind, Method, dictionaries_of, methods_of, named, rival_tokens
from treadle_bench.asm.options import settings_of
from treadle_bench.asm.tables import lines_of
from treadle_bench.asm.tasks import Split, Task

PREFIX_TOKENS = 60
SETTINGS = DictionarySettings(dtype=RowDtype.F32, entries=32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights, so large that its prefix matters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what transformers says at import is not ours to mend
        import transformers
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=120, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=256, tie_word_embeddings=True, initializer_range=0.3,
    )  # fmt: skip
    made = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    (made / "tokenizer.json").write_text("{}")
    return made


@pytest.fixture(scope="module")
def model(folder: Path) -> CausalLM:
    return CausalLM.load(folder)


def make_task(seed: int = 0, traces: int = 60) -> Task:
    draw = np.random.default_rng(seed)

    def text(tokens: int) -> tuple[int, ...]:
        return tuple(int(token) for token in draw.integers(0, 100, tokens))

    questions = tuple(text(6) for _ in range(20))
    return Task(
        "clinc20", seed, tuple(text(6) for _ in range(PREFIX_TOKENS // 6)), tuple(text(8) for _ in range(traces)), questions,
        ((101, 102), (101, 103), (104,)), tuple(number % 3 for number in range(20)),
    )  # fmt: skip


def kl(full: np.ndarray, other: np.ndarray) -> float:
    return float((np.exp(full) * (full - other)).sum(1).mean())


def test_a_label_of_several_tokens_has_the_product_of_theirs(model: CausalLM) -> None:
    task = make_task()
    found = label_log_probs(model, task.questions, task.labels, before_prefix(model, task.prefix))
    for question, row in list(zip(task.questions, found, strict=True))[:3]:
        expected = []
        for label in task.labels:
            tokens = torch.tensor([*task.prefix, *question, *label])
            hidden = model.forward(tokens, torch.arange(len(tokens)), [0, len(tokens)], [model.new_kv()])
            scores = model.logits(hidden).log_softmax(-1)
            first = len(tokens) - len(label) - 1
            expected.append(float(sum(scores[first + at, token] for at, token in enumerate(label))))
        assert row == pytest.approx(np.array(expected) - np.logaddexp.reduce(expected), abs=1e-4)


def test_all_keys_of_a_prefix_kept_are_the_prefix(model: CausalLM) -> None:
    task = make_task()
    kv = encode_prefix(model, task.prefix)
    full = label_log_probs(model, task.questions, task.labels, Before(kv.length, kv))
    config = model.config
    compact = kept_of(kv, config, torch.ones(config.layers, config.kv_heads, kv.length, dtype=torch.bool), kv.length)
    assert compact.tokens == kv.length
    assert label_log_probs(model, task.questions, task.labels, Before(kv.length, memory=compact)) == pytest.approx(full, abs=1e-4)


def test_heads_may_keep_different_numbers_of_keys_and_one_may_keep_none(model: CausalLM) -> None:
    task, config = make_task(), model.config
    kv = encode_prefix(model, task.prefix)
    kept = torch.zeros(config.layers, config.kv_heads, kv.length, dtype=torch.bool)
    none = label_log_probs(model, task.questions, task.labels, Before(kv.length))
    empty = kept_of(kv, config, kept, kv.length)
    assert label_log_probs(model, task.questions, task.labels, Before(kv.length, memory=empty)) == pytest.approx(none, abs=1e-4)
    kept[:, 0, :10] = True
    some = kept_of(kv, config, kept, kv.length)
    assert some.tokens == 5
    assert np.isfinite(label_log_probs(model, task.questions, task.labels, Before(kv.length, memory=some))).all()


def test_attention_matching_comes_nearer_with_more_keys_and_beats_the_keys_alone(model: CausalLM) -> None:
    task = make_task(traces=200)
    kv = encode_prefix(model, task.prefix)
    full = label_log_probs(model, task.questions, task.labels, Before(kv.length, kv))
    few, many = (
        kl(
            full,
            label_log_probs(model, task.questions, task.labels, Before(kv.length, memory=match(model, kv, task.traces, tokens))),
        )
        for tokens in (6, 40)
    )
    none = kl(full, label_log_probs(model, task.questions, task.labels, Before(kv.length)))
    assert many < few < none


def test_matched_values_and_biases_give_outputs_and_masses_of_the_whole_prefix() -> None:
    torch.manual_seed(0)
    keys, values, queries = torch.randn(40, 8), torch.randn(40, 8), torch.randn(400, 8)
    compact_keys, compact_values, biases = match_head(queries, keys, values, 40)
    assert torch.allclose(compact_keys, keys)
    assert torch.allclose(biases, torch.zeros(40), atol=1e-3)
    assert torch.allclose(compact_values, values, atol=2e-2)


def test_a_dictionary_costs_what_its_entries_say(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    task = make_task()
    for grouping in Grouping:
        for joined in (1, 3):
            settings = replace(SETTINGS, grouping=grouping, heads_joined=joined)
            built = Builder(model, folder, task, tmp_path).build(settings)
            storage, traffic, nbytes = costs.of_dictionary(built.dictionary)
            stored, read = costs.entry_tokens(model.config, settings)
            assert storage == pytest.approx(100 * settings.entries * stored / PREFIX_TOKENS)
            assert 100 * settings.entries * read / PREFIX_TOKENS < traffic < storage
            assert nbytes == built.dictionary.nbytes


def test_a_dictionary_is_nearer_to_its_prefix_than_nothing_is(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    bench = Bench(model, folder, make_task(traces=200), tmp_path)
    found = {}
    for method in (Method(Kind.FULL), Method(Kind.NONE), Method(Kind.DICTIONARY, 256, replace(SETTINGS, entries=256))):
        found[method.kind] = label_log_probs(model, bench.task.questions, bench.task.labels, bench.place(method).before)
    full = found[Kind.FULL]
    assert kl(full, found[Kind.DICTIONARY]) < kl(full, found[Kind.NONE])


def test_the_dictionary_that_is_mapped_has_the_bytes_that_the_goal_names(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    built = Builder(model, folder, make_task(), tmp_path).build(replace(SETTINGS, matched_keys=8))
    grown, tensors = operating._grown(built.dictionary, 300_000)
    entry = built.dictionary.nbytes / SETTINGS.entries
    assert 300_000 <= grown.nbytes < 300_000 + entry
    assert sum(tensor.nbytes for tensor in tensors.values()) == grown.nbytes


def test_settings_share_a_run_of_the_traces_unless_it_would_differ(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    builder, spill = Builder(model, folder, make_task(), tmp_path), tmp_path / "spill" / "0.queries"
    builder.build(SETTINGS)
    first = spill.stat().st_ino
    builder.build(replace(SETTINGS, entries=16, heads_joined=3, grouping=Grouping.INDIVIDUAL))
    assert spill.stat().st_ino == first
    kept = spill.open("rb")  # so that its inode is not given to the next file
    builder.build(SETTINGS, chunk_tokens=30)
    assert spill.stat().st_ino != first
    kept.close()


def test_rivals_are_measured_at_the_storage_and_at_the_traffic_of_each_dictionary(model: CausalLM) -> None:
    task = make_task()
    mine = dictionaries_of(task, model, SETTINGS, quick=False)
    names = {method.name for method in methods_of(task, model, SETTINGS, quick=False)}
    assert {"full", "none", *(method.name for method in mine)} <= names
    matched = {method.variant: method.settings.matched_keys for method in mine if method.settings and method.size == 1024}
    assert matched["wide"] == matched["c3"] * 3 // 2 > matched["c3"] > 0
    assert {method.settings.matched_keys > 0 for method in mine if method.settings} == {True, False}
    sizes = rival_tokens(task, model, mine)
    assert sizes
    for tokens in sizes:
        assert 0 < tokens < PREFIX_TOKENS
        assert {f"am-{tokens}", f"kvzip-{tokens}"} <= names


def test_methods_of_prefixes_of_different_lengths_share_a_line_where_they_are_of_one_size(model: CausalLM) -> None:
    lines = []
    for prefix in (1011, 1028):
        large = replace(SETTINGS, entries=1024, matched_keys=prefix // 4)
        small = replace(SETTINGS, entries=prefix // 56, matched_keys=prefix // 6)
        of_prefix = [
            Method(Kind.FULL).line(100), Method(Kind.MATCHING, prefix // 5).line(100 * (prefix // 5) / prefix),
            Method(Kind.DICTIONARY, 1024, large).line(128.3), Method(Kind.DICTIONARY, 1024, large, "c3").line(330),
            Method(Kind.DICTIONARY, 1024, replace(large, matched_keys=0)).line(102), Method(Kind.DICTIONARY, prefix // 56, small).line(19.9),
        ]  # fmt: skip
        lines.append(of_prefix)
    assert lines[0] == lines[1] == ["full", "am-20%", "asm-k1024", "asm-k1024-c3", "asm-k1024-m0", "asm-20%"]


@pytest.mark.parametrize("dtype", [RowDtype.F32, RowDtype.I8])
def test_a_dictionary_for_a_share_of_the_storage_takes_no_more(
    model: CausalLM, folder: Path, tmp_path: Path, dtype: RowDtype
) -> None:
    task = make_task()
    bench = Bench(model, folder, task, tmp_path)
    small = dictionaries_of(task, model, replace(SETTINGS, dtype=dtype), quick=False)[-len(STORAGE_PERCENT) :]
    for method, percent in zip(small, STORAGE_PERCENT, strict=True):
        assert 0.6 * percent < bench.place(method).cost[0] <= percent


def test_only_names_methods_and_the_whole_prefix_is_always_among_them(model: CausalLM) -> None:
    everything = methods_of(make_task(), model, SETTINGS, quick=True)
    assert {method.kind for method in named(everything, ["none"])} == {Kind.FULL, Kind.NONE}
    with pytest.raises(InvalidArgument, match="there are full"):
        named(everything, ["nothing"])


def test_a_run_goes_on_where_it_stopped_and_says_what_has_no_figure(
    model: CausalLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(evaluation, "load_task", lambda name, seed, data, tokenizer, **rest: make_task(seed))
    plan = Plan(tmp_path, folder, tmp_path / "out", SETTINGS, ("clinc20",), (0, 1), split=Split.TEST)

    def asked(task: Task, model: CausalLM) -> list[Method]:
        too_many = Method(Kind.DICTIONARY, 4096, replace(SETTINGS, entries=4096))
        return [Method(Kind.FULL), Method(Kind.NONE), Method(Kind.TRUNCATED, 20), too_many]

    said: list[str] = []
    first = run(plan, said.append, asked)
    assert first.done == 6
    assert set(first.failed) == {"clinc20.s0.asm-k4096", "clinc20.s1.asm-k4096"}
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert run(plan, said.append, asked).done == 6
    assert stamps == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    cell = Cells(tmp_path / "out").get("clinc20", 0, "icl-20")
    assert cell.storage == pytest.approx(100 * 18 / PREFIX_TOKENS)  # three whole examples of six tokens


def test_a_two_level_lookup_that_scans_every_list_misses_nothing(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    task = make_task(traces=100)
    bench = Bench(model, folder, task, tmp_path)
    recalls = {}
    for probed in (1, 8):
        method = Method(Kind.DICTIONARY, 64, replace(SETTINGS, entries=64, lists=8), f"lists8-probed{probed}", lists_probed=probed)
        before = bench.place(method).before
        label_log_probs(model, task.questions, task.labels, before)
        assert isinstance(before.memory, Watched)
        assert before.memory.lookups > 0
        recalls[probed] = before.memory.recall
    assert recalls[1] < recalls[8] == 1.0


def test_a_grid_is_made_of_lines_of_lists(model: CausalLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(evaluation, "load_task", lambda name, seed, data, tokenizer, **rest: make_task(seed, traces=100))
    plan = Plan(tmp_path, folder, tmp_path / "out", SETTINGS, ("clinc20",), (0,), quick=True)
    assert not run(plan, lambda text: None, lambda task, model: sweeps.list_methods(task, model, SETTINGS, quick=True)).failed
    grid = grid_of(lines_of(Cells(tmp_path / "out")))
    assert set(grid) == {(8, 1), (8, 4)}
    assert grid[8, 1][2] < grid[8, 4][2]  # fewer lists, less traffic


def test_every_variant_of_a_sweep_and_of_chunks_can_be_built(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    task = make_task(traces=100)
    bench = Bench(model, folder, task, tmp_path)
    wanted = sweeps.settings_methods(task, model, SETTINGS, quick=True) + sweeps.chunk_methods(task, model, SETTINGS, quick=True)
    for method in wanted:
        found = label_log_probs(model, task.questions[:4], task.labels, bench.place(method).before)
        assert np.isfinite(found).all(), method.name


def test_kept_keys_are_found_by_marks_or_by_the_keys_themselves() -> None:
    whole = torch.randn(2, 6, 4)
    marked = (torch.tensor([0, 0, 0]), torch.tensor([0, 0, 1]), torch.tensor([1, 2, 5]))
    assert kept_keys(whole, whole, marked).tolist() == [[True, False, False, True, True, True], [True] * 5 + [False]]
    places = [[0, 3], [4, 5]]
    pruned = torch.stack([whole[head, chosen] for head, chosen in enumerate(places)])
    assert [np.flatnonzero(row).tolist() for row in kept_keys(pruned, whole, None)] == places


def test_settings_of_a_command_line_are_those_of_the_manifest() -> None:
    assert settings_of(["heads_joined=3", "grouping=individual"]) == DictionarySettings(
        heads_joined=3, grouping=Grouping.INDIVIDUAL
    )
    for wrong in ("colour=red", "grouping=none", "entries=many", "entries"):
        with pytest.raises(InvalidArgument, match="--set"):
            settings_of([wrong])


def test_pressed_sizes_are_known_beforehand(model: CausalLM, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="kvpress runs once"):
        Bench(model, folder, make_task(), tmp_path).place(Method(Kind.KVZIP, 12))

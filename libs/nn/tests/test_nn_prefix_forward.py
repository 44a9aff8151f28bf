"""The forward behind something: a shared prefix, dictionaries of it, and the collector that dictionaries are made from."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from treadle.contract.dictionary import Dictionary, Grouping, KeyMode, RowDtype
from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.nn.attention import attention, causal_mask, merge
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse

Make = Callable[..., tuple[Dictionary, dict[str, Any]]]
EXACT = {"key": KeyMode.OWN_POSITION, "dtype": RowDtype.F32}
TOLERANCE = 1e-4  # of a logit, fp32
RULES = (
    "Rules of the lending library. A reader may borrow five books for three weeks. Each book may be renewed twice, unless another "
    "reader waits for it. A late book costs ten cents a day, at most four euros. Maps, newspapers and books printed before 1900 are "
    "read in the house. Children under twelve need the signature of a parent. A lost card costs three euros. The library is open "
    "from nine to seven, on Saturdays until two, and closed in August.\n"
)
QUESTIONS = (
    "Question: How long may I keep a book?\nAnswer: three weeks\n", "Question: What does a lost card cost?\nAnswer: three euros\n",
    "Question: May I take an old map home?\nAnswer: no, it is read in the house\n", "Question: When do you close on Saturday?\nAnswer: at two\n",
)  # fmt: skip


def run(
    model: CausalLM, batch: Sequence[tuple[list[int], int, SequenceKV]], uses: Sequence[PrefixUse | None] | None = None, **more: Any
) -> list[Tensor]:
    """One step of (ids, position of the first, kv); logits [T, vocab] of each request."""
    starts = [0]
    for ids, _, _ in batch:
        starts.append(starts[-1] + len(ids))
    tokens = torch.tensor([token for ids, _, _ in batch for token in ids])
    positions = torch.cat([torch.arange(first, first + len(ids)) for ids, first, _ in batch])
    hidden = model.forward(tokens, positions, starts, [kv for _, _, kv in batch], prefixes=uses, **more)
    return list(torch.split(model.logits(hidden), [len(ids) for ids, _, _ in batch]))


def prefilled(model: CausalLM, ids: list[int]) -> SequenceKV:
    kv = model.new_kv()
    run(model, [(ids, 0, kv)])
    return kv


def random_ids(model: CausalLM, count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [int(token) for token in torch.randint(0, model.config.vocab, (count,), generator=draw)]


def assert_same(left: Tensor, right: Tensor, tolerance: float = TOLERANCE) -> None:
    assert float((left - right).abs().max()) <= tolerance
    assert torch.equal(left.argmax(-1), right.argmax(-1))


def behind(model: CausalLM, prefix: list[int], ids: list[int]) -> Tensor:
    """Logits of `ids` behind the prefix, in one plain forward."""
    return run(model, [(prefix + ids, 0, model.new_kv())])[0][len(prefix) :]


@pytest.fixture(scope="module")
def learnt(
    tiny: CausalLM, collected: type, make_dictionary: Make
) -> Callable[..., tuple[PrefixMemory, list[int], list[list[int]]]]:
    """Returns a function: (seed, settings) -> a memory of a random prefix, the prefix, and the texts whose queries it holds."""

    def learn(seed: int = 0, **settings: Any) -> tuple[PrefixMemory, list[int], list[list[int]]]:
        prefix, texts = random_ids(tiny, 40, seed), [random_ids(tiny, count, seed + count) for count in (12, 7, 20)]
        states = collected()
        run(tiny, [(ids, 40, tiny.new_kv()) for ids in texts], shared=prefilled(tiny, prefix), collect=states)
        dictionary, tensors = make_dictionary(tiny, states, 40, **(EXACT | settings))
        return PrefixMemory(dictionary, tensors), prefix, texts

    return learn


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3"])
def test_a_shared_prefix_equals_one_at_the_head_of_every_sequence(name: str, make_tiny: Callable[[str], Path]) -> None:
    model = CausalLM.load(make_tiny(name))
    prefix, texts = random_ids(model, 50, 1), [random_ids(model, count, count) for count in (9, 1, 30)]
    shared, kvs = prefilled(model, prefix), [model.new_kv() for _ in texts]
    expected = [behind(model, prefix, [*ids, 5, 6]) for ids in texts]
    got = run(model, [(ids, 50, kv) for ids, kv in zip(texts, kvs, strict=True)], shared=shared)
    went_on = run(model, [([5, 6], 50 + len(ids), kv) for ids, kv in zip(texts, kvs, strict=True)], shared=shared)
    for first, second, whole in zip(got, went_on, expected, strict=True):
        assert_same(torch.cat((first, second)), whole)
    assert shared.length == 50


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_collector_takes_every_query_and_its_exact_state_over_the_prefix(
    name: str, make_tiny: Callable[[str], Path], collected: type
) -> None:
    model = CausalLM.load(make_tiny(name))
    prefix, texts = random_ids(model, 30, 1), [random_ids(model, count, count) for count in (6, 11)]
    states, kvs, shared = collected(), [model.new_kv() for _ in texts], prefilled(model, prefix)
    run(model, [(ids, 30, kv) for ids, kv in zip(texts, kvs, strict=True)], shared=shared, collect=states)
    whole = model.new_kv()
    run(model, [(prefix + texts[1], 0, whole)])
    assert sorted(states.layers) == list(range(model.config.layers))
    for layer, (queries, rotated, a, log_z) in states.layers.items():
        assert queries.shape == rotated.shape == a.shape == (17, model.config.heads, model.config.head_dim)
        torch.testing.assert_close(queries.norm(dim=-1), rotated.norm(dim=-1))
        own = attention(rotated[6:], kvs[1].keys(layer), kvs[1].values(layer), with_state=True)
        merged, merged_log_z = merge(a[6:], log_z[6:], *own)
        full = attention(rotated[6:], whole.keys(layer), whole.values(layer), causal_mask(11, 41), with_state=True)
        torch.testing.assert_close((merged, merged_log_z), full, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("grouping", list(Grouping))
@pytest.mark.parametrize("joined", [1, 2])
@pytest.mark.parametrize("lists", [0, 5])
def test_a_dictionary_of_all_queries_replays_them_exactly(
    tiny: CausalLM, learnt: Callable[..., Any], grouping: Grouping, joined: int, lists: int
) -> None:
    memory, prefix, texts = learnt(grouping=grouping, heads_joined=joined, lists=lists)
    uses = [PrefixUse(memory) for _ in texts]
    got = run(tiny, [(ids, memory.position_offset, tiny.new_kv()) for ids in texts], uses)
    for ids, logits in zip(texts, got, strict=True):
        assert_same(logits, behind(tiny, prefix, ids))
        assert float((logits - run(tiny, [(ids, 40, tiny.new_kv())])[0]).abs().max()) > 0.1  # what no prefix would give


def test_a_replay_in_chunks_and_single_tokens_equals_one_in_a_whole(tiny: CausalLM, learnt: Callable[..., Any]) -> None:
    memory, prefix, texts = learnt()
    use, kv, parts = PrefixUse(memory), tiny.new_kv(), []
    for first, end in ((0, 7), (7, 8), (8, 9), (9, 20)):
        parts += run(tiny, [(texts[2][first:end], 40 + first, kv)], [use])
    assert_same(torch.cat(parts), behind(tiny, prefix, texts[2]))
    assert use.lookups == 20 * tiny.config.layers * memory.dictionary.lookups * memory.dictionary.codebooks


def test_requests_with_different_dictionaries_and_none_in_one_batch_equal_single_runs(
    tiny: CausalLM, learnt: Callable[..., Any]
) -> None:
    one, _, texts = learnt(seed=0)
    two, _, _ = learnt(seed=1, key=KeyMode.PRE_ROPE, dtype=RowDtype.I8, heads_joined=2)
    memories = [one, None, two, one, None]
    batch = [texts[0], texts[1], texts[1][:3], texts[2], texts[0][:1]]
    uses = [memory and PrefixUse(memory) for memory in memories]
    firsts = [0 if memory is None else memory.position_offset for memory in memories]
    together = run(tiny, [(ids, first, tiny.new_kv()) for ids, first in zip(batch, firsts, strict=True)], uses)
    for ids, first, memory, use, got in zip(batch, firsts, memories, uses, together, strict=True):
        alone = PrefixUse(memory) if memory else None
        assert_same(got, run(tiny, [(ids, first, tiny.new_kv())], [alone])[0], 2e-5)
        if alone is not None and use is not None:
            assert (use.lookups, use.lookups_outside) == (alone.lookups, alone.lookups_outside)
            assert use.lookups > 0


def test_requests_with_the_same_dictionary_share_one_lookup_a_layer(
    tiny: CausalLM, learnt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, _, texts = learnt()
    asked: list[tuple[int, int]] = []
    original = PrefixMemory.lookup

    def watched(self: PrefixMemory, layer: int, queries: Tensor, *more: Any) -> Any:
        asked.append((layer, len(queries)))
        return original(self, layer, queries, *more)

    monkeypatch.setattr(PrefixMemory, "lookup", watched)
    uses = [PrefixUse(memory), None, PrefixUse(memory)]
    run(tiny, [(ids, 40, tiny.new_kv()) for ids in texts], uses)
    assert asked == [(layer, 12 + 20) for layer in range(tiny.config.layers)]


def test_layers_without_a_dictionary_see_the_shared_prefix_or_nothing(
    tiny: CausalLM, collected: type, make_dictionary: Make
) -> None:
    prefix, ids = random_ids(tiny, 40, 3), random_ids(tiny, 15, 4)
    states, shared = collected(), prefilled(tiny, prefix)
    run(tiny, [(ids, 40, tiny.new_kv())], shared=shared, collect=states)
    del states.layers[1]
    memory = PrefixMemory(*make_dictionary(tiny, states, 40, **EXACT))
    queries = torch.zeros(1, tiny.config.heads, tiny.config.head_dim)
    assert memory.lookup(1, queries, queries) is None
    use = PrefixUse(memory)
    assert_same(run(tiny, [(ids, 40, tiny.new_kv())], [use], shared=shared)[0], behind(tiny, prefix, ids))
    assert use.lookups == 15 * 2 * memory.dictionary.lookups
    alone = run(tiny, [(ids, 40, tiny.new_kv())], [PrefixUse(memory)])[0]
    assert float((alone - behind(tiny, prefix, ids)).abs().max()) > 1e-2


def test_a_collector_behind_dictionaries_takes_the_exact_states_of_the_queries_that_they_lead_to(
    tiny: CausalLM, learnt: Callable[..., Any], collected: type
) -> None:
    memory, prefix, _ = learnt(key=KeyMode.PRE_ROPE, dtype=RowDtype.I8)
    other, shared, states = random_ids(tiny, 9, 77), prefilled(tiny, prefix), collected()
    with_dictionary = run(tiny, [(other, 40, tiny.new_kv())], [PrefixUse(memory)], shared=shared, collect=states)[0]
    assert torch.equal(with_dictionary, run(tiny, [(other, 40, tiny.new_kv())], [PrefixUse(memory)])[0])
    for layer, (_, rotated, a, log_z) in states.layers.items():
        every = torch.ones(9, 40, dtype=torch.bool)
        exact = attention(rotated, shared.keys(layer), shared.values(layer), every, with_state=True)
        torch.testing.assert_close((a, log_z), exact, atol=1e-5, rtol=1e-5)


def test_a_step_that_fails_counts_no_lookup(tiny: CausalLM, learnt: Callable[..., Any]) -> None:
    memory, _, texts = learnt()
    use, kv = PrefixUse(memory), tiny.new_kv()

    def fail(layer: int, hidden: Tensor) -> Tensor:
        if layer == 2:
            raise RuntimeError("the rows did not come")
        return hidden

    with pytest.raises(RuntimeError, match="rows did not come"):
        tiny.forward(torch.tensor(texts[0]), torch.arange(40, 52), [0, 12], [kv], fail, [use])
    assert (use.lookups, use.lookups_outside, kv.length) == (0, 0, 0)


def test_numbers_that_are_none_end_their_own_request_and_the_others_of_its_prefix_go_on(
    tiny: CausalLM, learnt: Callable[..., Any]
) -> None:
    memory, prefix, texts = learnt()
    uses, batch = [PrefixUse(memory, contained=True) for _ in texts], [(ids, 40, tiny.new_kv()) for ids in texts]

    def spoil(layer: int, hidden: Tensor) -> Tensor:
        if layer == 1:
            hidden = hidden.clone()
            hidden[15] = torch.nan  # one row of the second request, as rows of a memory may be
        return hidden

    got = run(tiny, batch, uses, before_layer=spoil)
    assert [type(use.failure) for use in uses] == [type(None), InvalidArgument, type(None)]
    assert uses[1].lookups == 0
    for at in (0, 2):
        assert_same(got[at], behind(tiny, prefix, texts[at]))
        alone = PrefixUse(memory)
        run(tiny, [(texts[at], 40, tiny.new_kv())], [alone])
        assert (uses[at].lookups, uses[at].outside_of) == (alone.lookups, alone.outside_of)


def test_a_lookup_that_fails_is_raised_where_nobody_contains_it(tiny: CausalLM, learnt: Callable[..., Any]) -> None:
    memory, _, texts = learnt()
    uses = [PrefixUse(memory), PrefixUse(memory, contained=True)]
    batch = [(ids, 40, tiny.new_kv()) for ids in texts[:2]]
    with pytest.raises(InvalidArgument, match="NaN"):
        run(tiny, batch, uses, before_layer=lambda layer, hidden: hidden * torch.nan)


def test_what_does_not_fit_is_refused(
    tiny: CausalLM, learnt: Callable[..., Any], make_tiny: Callable[[str], Path], collected: type
) -> None:
    memory, prefix, _ = learnt()
    shared = prefilled(tiny, prefix)
    with pytest.raises(FingerprintMismatch, match=r"model\.head_dim"):
        run(other := CausalLM.load(make_tiny("qwen3")), [([1, 2], 40, other.new_kv())], [PrefixUse(memory)])
    with pytest.raises(InvalidArgument, match="prefixes: one for each of 1 requests"):
        run(tiny, [([1, 2], 40, tiny.new_kv())], [PrefixUse(memory), None])
    with pytest.raises(InvalidArgument, match="give its KV as `shared`"):
        run(tiny, [([1, 2], 40, tiny.new_kv())], collect=collected())
    with pytest.raises(InvalidArgument, match="a sequence of its own"):
        run(tiny, [([1, 2], 40, shared)], shared=shared)


def test_a_bf16_model_reads_a_dictionary_of_the_fp32_one(learnt: Callable[..., Any], make_tiny: Callable[[str], Path]) -> None:
    memory, prefix, texts = learnt()
    half = CausalLM.load(make_tiny("llama"), torch.bfloat16)
    (got,) = run(half, [(texts[0], 40, half.new_kv())], [PrefixUse(memory)])
    wanted = behind(half, prefix, texts[0])
    assert float((got - wanted).abs().mean()) < 0.1 * float((run(half, [(texts[0], 40, half.new_kv())])[0] - wanted).abs().mean())


@pytest.fixture(scope="module")
def library(smollm2: CausalLM, smollm2_folder: Path, collected: type) -> tuple[list[int], list[list[int]], Any]:
    """A prefix of rules, questions about them, and the states that these saw over the rules in all 30 layers."""
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    prefix, texts = list(tokenizer.encode(RULES).ids), [list(tokenizer.encode(text).ids) for text in QUESTIONS]
    states = collected()
    run(smollm2, [(ids, len(prefix), smollm2.new_kv()) for ids in texts], shared=prefilled(smollm2, prefix), collect=states)
    return prefix, texts, states


@pytest.mark.parametrize("settings", [{"heads_joined": 3, "grouping": Grouping.INDIVIDUAL}, {}], ids=["individual-3", "shared-1"])
def test_smollm2_replays_its_calibration_exactly_over_30_layers(
    smollm2: CausalLM, library: tuple[list[int], list[list[int]], Any], make_dictionary: Make, settings: dict[str, Any]
) -> None:
    prefix, texts, states = library
    memory = PrefixMemory(*make_dictionary(smollm2, states, len(prefix), **EXACT, **settings))
    uses = [PrefixUse(memory) for _ in texts]
    got = run(smollm2, [(ids, len(prefix), smollm2.new_kv()) for ids in texts], uses)
    for ids, logits in zip(texts, got, strict=True):
        assert_same(logits, behind(smollm2, prefix, ids), 1e-4)  # max difference over all positions, argmax 100 %


@pytest.mark.parametrize(("dtype", "tolerance"), [(RowDtype.BF16, 0.1), (RowDtype.I8, 0.25)])
def test_smollm2_with_rows_of_fewer_bits_stays_close(
    smollm2: CausalLM, library: tuple[list[int], list[list[int]], Any], make_dictionary: Make, dtype: RowDtype, tolerance: float
) -> None:
    prefix, texts, states = library
    dictionary, tensors = make_dictionary(smollm2, states, len(prefix), key=KeyMode.OWN_POSITION, dtype=dtype)
    (got,) = run(smollm2, [(texts[0], len(prefix), smollm2.new_kv())], [PrefixUse(PrefixMemory(dictionary, tensors))])
    wanted, without = (
        behind(smollm2, prefix, texts[0]).log_softmax(-1),
        run(smollm2, [(texts[0], len(prefix), smollm2.new_kv())])[0],
    )

    def divergence(logits: Tensor) -> float:
        return float((wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean())

    assert divergence(got) < 0.02
    assert divergence(got) < tolerance * divergence(without)

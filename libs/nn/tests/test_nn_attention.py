"""Attention and its states against the formula written out, and RoPE turned back."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treadle.contract.errors import InvalidArgument
from treadle.nn import attention as attention_module
from treadle.nn.attention import AttentionState, attention, attention_state, causal_mask, merge
from treadle.nn.model import CausalLM
from treadle.nn.rope import rotate


def written_out(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D)) v and log Z, head by head and in fp64."""
    outs, log_zs = [], []
    for head in range(q.shape[1]):
        shared = head * k.shape[1] // q.shape[1]
        scores = q[:, head].double() @ k[:, shared].double().T / math.sqrt(q.shape[2])
        scores = scores.masked_fill(~mask, -math.inf)
        outs.append(scores.softmax(-1) @ v[:, shared].double())
        log_zs.append(scores.exp().sum(-1).log())
    return torch.stack(outs, 1).float(), torch.stack(log_zs, 1).float()


def draw(rows: int, keys: int, heads: int, kv_heads: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, h, 16, generator=random) for n, h in ((rows, heads), (keys, kv_heads), (keys, kv_heads)))
    return q, k, v


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (8, 1)])
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 33), (20, 20), (7, 40)])
def test_attention_equals_the_formula_with_and_without_its_state(heads: int, kv_heads: int, rows: int, keys: int) -> None:
    q, k, v = draw(rows, keys, heads, kv_heads)
    expected, expected_log_z = written_out(q, k, v, causal_mask(rows, keys))
    out, log_z = attention(q, k, v, with_state=True)
    torch.testing.assert_close(attention(q, k, v), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(log_z, expected_log_z, atol=2e-6, rtol=1e-5)
    assert log_z.dtype == torch.float32


def test_a_mask_chooses_the_keys() -> None:
    q, k, v = draw(5, 12, 4, 2)
    mask = torch.rand(5, 12, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[:, 3] = True
    expected, _ = written_out(q, k, v, mask)
    torch.testing.assert_close(attention(q, k, v, mask), expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(attention(q, k, v, mask, with_state=True)[0], expected, atol=2e-6, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 9),
    before=st.integers(0, 30),
    cut=st.integers(0, 39),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=st.integers(0, 99),
)
def test_states_over_two_parts_of_the_keys_merge_to_the_state_over_all(
    rows: int, before: int, cut: int, scale: float, seed: int
) -> None:
    q, k, v = draw(rows, before + rows, 6, 2, seed)
    q = q * scale  # 30: a softmax of one key, and log Z in the hundreds
    mask, cut = causal_mask(rows, before + rows), min(cut, before + rows)
    whole, whole_log_z = attention(q, k, v, with_state=True)
    first = attention(q, k[:cut], v[:cut], mask[:, :cut], with_state=True)
    second = attention(q, k[cut:], v[cut:], mask[:, cut:], with_state=True)
    merged, merged_log_z = merge(*first, *second)
    torch.testing.assert_close(merged, whole, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(merged_log_z, whole_log_z, atol=1e-5, rtol=1e-5)
    swapped, _ = merge(*second, *first)
    torch.testing.assert_close(swapped, merged)


def test_a_row_that_sees_no_key_has_an_empty_state_and_merges_without_effect() -> None:
    q, k, v = draw(3, 5, 4, 2)
    nothing, log_z = attention(q, k, v, torch.zeros(3, 5, dtype=torch.bool), with_state=True)
    assert not nothing.any()
    assert log_z.isneginf().all()
    something = attention(q, k, v, with_state=True)
    torch.testing.assert_close(merge(nothing, log_z, *something), something)
    twice_nothing, still_empty = merge(nothing, log_z, nothing, log_z)
    assert not twice_nothing.any()
    assert still_empty.isneginf().all()


CASES = 10_000


def drawn_states(count: int, seed: int, spread: float = 1e4) -> tuple[Tensor, Tensor]:
    """`count` states of CASES cases: a [count, CASES, 2, 8] and log Z [count, CASES, 2] up to `spread` either way, every ninth empty.

    Half of the cases have their log Z within 30 of each other, where both sides count.
    """
    random = torch.Generator().manual_seed(seed)
    log_z = (torch.rand(1, CASES, 2, generator=random) * 2 - 1) * spread + torch.randn(count, CASES, 2, generator=random) * 10
    far = torch.rand(count, CASES, 2, generator=random) < 0.25
    log_z = torch.where(far, (torch.rand(count, CASES, 2, generator=random) * 2 - 1) * spread, log_z).clamp(-spread, spread)
    empty = torch.rand(count, CASES, 2, generator=random) < 1 / 9
    a = torch.randn(count, CASES, 2, 8, generator=random)
    return a.masked_fill(empty.unsqueeze(-1), 0.0), log_z.masked_fill(empty, -math.inf)


def merged_in_fp64(a: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """All states of the first dimension at once, by the definition, weights relative to the largest."""
    log_z = log_z.double()
    peak = log_z.amax(0)
    weights = (log_z - torch.where(peak.isneginf(), 0.0, peak)).exp()
    total = weights.sum(0)
    out = (weights.unsqueeze(-1) * a.double()).sum(0) / total.clamp_min(1e-300).unsqueeze(-1)
    return out.float(), (total.log() + torch.where(peak.isneginf(), 0.0, peak)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ten_thousand_merges_of_two_states_are_exact_and_commute_and_none_is_nan(dtype: torch.dtype) -> None:
    a, log_z = drawn_states(2, seed=11)
    a = a.to(dtype)
    out, out_log_z = merge(a[0], log_z[0], a[1], log_z[1])
    expected, expected_log_z = merged_in_fp64(a, log_z)
    assert out.dtype == out_log_z.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)  # NaN would not be close
    torch.testing.assert_close(out_log_z, expected_log_z, atol=1e-5, rtol=2e-7)
    swapped, swapped_log_z = merge(a[1], log_z[1], a[0], log_z[0])
    torch.testing.assert_close(swapped, out, atol=1e-6, rtol=1e-6)
    assert torch.equal(swapped_log_z, out_log_z)


def test_ten_thousand_merges_of_three_states_do_not_depend_on_what_is_merged_first() -> None:
    for spread, tolerance in ((100.0, 1e-5), (1e4, 4e-3)):  # the sum of two log Z of 1e4 is rounded to 1e-3, and a weight with it
        a, log_z = drawn_states(3, seed=12, spread=spread)
        left = merge(*merge(a[0], log_z[0], a[1], log_z[1]), a[2], log_z[2])
        right = merge(a[0], log_z[0], *merge(a[1], log_z[1], a[2], log_z[2]))
        expected = merged_in_fp64(a, log_z)
        for got in (left, right):
            torch.testing.assert_close(got[0], expected[0], atol=tolerance, rtol=tolerance)
            torch.testing.assert_close(got[1], expected[1], atol=1e-5, rtol=4e-7)


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 17, 64])
def test_states_over_shards_merge_in_any_order_to_the_state_over_all(shards: int) -> None:
    q, k, v = draw(6, 640, 9, 3, seed=shards)
    q = q * 3
    whole, whole_log_z = attention_state(q, k, v)
    random = torch.Generator().manual_seed(shards)
    cuts = [0, *sorted(torch.randperm(639, generator=random)[: shards - 1].add(1).tolist()), 640]
    states = [attention_state(q, k[first:end], v[first:end]) for first, end in pairwise(cuts)]
    for _ in range(5):
        left = list(states)
        while len(left) > 1:  # any two that are left
            one, other = (left.pop(int(torch.randint(len(left), (), generator=random))) for _ in range(2))
            left.append(merge(*one, *other))
        torch.testing.assert_close(left[0][0], whole, atol=1e-5, rtol=0)
        torch.testing.assert_close(left[0][1], whole_log_z, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_precision_keys_are_summed_in_fp32(dtype: torch.dtype) -> None:
    q, k, v = (part.to(dtype) for part in draw(4, 300, 4, 2))
    expected, expected_log_z = written_out(q.float(), k.float(), v.float(), torch.ones(4, 300, dtype=torch.bool))
    out, log_z = attention_state(q, k, v)
    assert out.dtype == log_z.dtype == torch.float32
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(log_z, expected_log_z, atol=1e-6, rtol=1e-6)


def test_states_written_out_in_pieces_equal_those_of_torchs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_module._FUSED is not None, "torch has no kernel that tells log Z any more: states are slower, not wrong"
    q, k, v = draw(33, 50, 4, 2)
    mask = torch.rand(33, 50, generator=torch.Generator().manual_seed(1)) < 0.5
    whole = attention_state(q, k, v), attention(q, k, v, with_state=True), attention(q, k, v, mask, with_state=True)
    monkeypatch.setattr(attention_module, "_FUSED", None)
    monkeypatch.setattr(attention_module, "SCORES_AT_ONCE", 4 * 50 * 5)
    monkeypatch.setattr(attention_module, "CAUSAL_ROWS", 7)
    pieces = attention_state(q, k, v), attention(q, k, v, with_state=True), attention(q, k, v, mask, with_state=True)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-5)


def test_a_state_over_no_keys_is_empty() -> None:
    q, k, v = draw(3, 5, 4, 2)
    nothing, log_z = attention_state(q, k[:0], v[:0])
    assert nothing.shape == q.shape
    assert not nothing.any()
    assert log_z.isneginf().all()


def test_a_state_says_the_base_of_its_logarithm_and_merges_with_another() -> None:
    q, k, v = draw(3, 20, 4, 2)
    first, second, whole = (attention_state(q, k[part], v[part]) for part in (slice(0, 8), slice(8, 20), slice(0, 20)))
    binary = AttentionState(first[0], first[1] / math.log(2.0), log_base="2")
    merged = binary.merged(AttentionState(*second))
    assert merged.log_base == "e"
    torch.testing.assert_close((merged.a, merged.log_z), whole, atol=1e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="log_base"):
        AttentionState(*first, log_base="10")
    with pytest.raises(InvalidArgument, match="log_z"):
        AttentionState(first[0], first[1].half())
    with pytest.raises(InvalidArgument, match="log_z: float32"):
        merge(*first, second[0], second[1].half())


def test_a_memory_with_e_times_the_weight_leaves_the_expected_share() -> None:
    q, k, v = draw(2, 8, 4, 2)
    out, log_z = attention(q, k, v, with_state=True)
    merged, _ = merge(out, log_z, torch.zeros_like(out), log_z + 1.0)
    torch.testing.assert_close(merged, out / (1.0 + math.e))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v = draw(4, 6, 4, 2)
    with pytest.raises(InvalidArgument, match="attention"):
        attention(q, k[:, :1].repeat(1, 3, 1), v)
    with pytest.raises(InvalidArgument, match="cannot be the last of 3 keys"):
        attention(q, k[:3], v[:3])
    with pytest.raises(InvalidArgument, match="mask: bool"):
        attention(q, k, v, torch.ones(4, 6))


def test_a_key_turned_back_by_its_position_is_itself_again(tiny: CausalLM) -> None:
    keys = torch.randn(50, 2, tiny.config.head_dim, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(200, 250)
    there = rotate(keys, tiny.rope.angles(positions))
    torch.testing.assert_close(rotate(there, tiny.rope.angles(-positions)), keys, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        rotate(there, tiny.rope.angles(torch.full((50,), 7))), rotate(keys, tiny.rope.angles(positions + 7)), atol=1e-5, rtol=1e-5
    )

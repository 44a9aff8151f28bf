"""Attention and its states against the formula written out, and RoPE turned back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from treadle.contract.errors import InvalidArgument
from treadle.nn.attention import attention, causal_mask, merge
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

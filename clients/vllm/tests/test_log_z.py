"""log Z of vLLM's own CPU kernel, by running it again with a sink, against attention that tells it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from treadle.nn.attention import attention

HEADS, KV_HEADS, HEAD_DIM, BLOCK, BLOCKS = 6, 2, 64, 32, 8


def kernel(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's output of the last rows of one sequence, and `log_z_of` of it."""
    from vllm import _custom_ops as ops  # which registers the kernels

    from treadle.vllm.prefix_attention import log_z_of

    rows, count, dtype = len(query), len(keys), query.dtype
    cache = torch.zeros(BLOCKS, KV_HEADS, 2 * BLOCK, HEAD_DIM, dtype=dtype)
    key_cache, value_cache = cache.chunk(2, dim=2)
    scales = {"k_scale": 1.0, "v_scale": 1.0, "kv_cache_dtype": "auto"}
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, torch.arange(count) + BLOCK, "vec", **scales)
    starts, lengths = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([count], dtype=torch.int32)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=1, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, seq_lens=lengths, dtype=dtype, query_start_loc=starts,
        causal=True, sliding_window_size=-1, isa="vec", enable_kv_split=True, dynamic_causal=None, kv_cache_dtype="auto",
    )  # fmt: skip

    def attend(out: Tensor, sinks: Tensor | None) -> None:
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key_cache, value_cache=value_cache, output=out, query_start_loc=starts, seq_lens=lengths,
            scale=HEAD_DIM**-0.5, causal=True, alibi_slopes=None, sliding_window=-1,
            block_table=torch.arange(1, BLOCKS, dtype=torch.int32).unsqueeze(0), softcap=0, scheduler_metadata=plan, s_aux=sinks,
            dynamic_causal=None, **scales,
        )  # fmt: skip

    out = torch.empty(query.shape, dtype=dtype)
    attend(out, None)
    return out, log_z_of(attend, out, rows)


@pytest.mark.parametrize(("dtype", "difference_max"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-3)])
@pytest.mark.parametrize(("rows", "count"), [(1, 200), (20, 100), (64, 64)])
def test_log_z_is_that_of_attention_written_out(dtype: torch.dtype, difference_max: float, rows: int, count: int) -> None:
    torch.manual_seed(0)
    query, keys, values = (
        torch.randn(rows, HEADS, HEAD_DIM),
        torch.randn(count, KV_HEADS, HEAD_DIM),
        torch.randn(count, KV_HEADS, HEAD_DIM),
    )
    query, keys, values = (each.to(dtype) for each in (query, keys, values))
    out, log_z = kernel(query, keys, values)
    a, wanted = attention(query, keys, values, with_state=True)
    assert float((out - a).abs().max()) < (1e-5 if dtype is torch.float32 else 2e-2)
    assert float((log_z - wanted).abs().max()) < difference_max


@pytest.mark.parametrize("shift", [-300.0, -60.0, 0.0, 43.0, 200.0, 900.0])
def test_log_z_far_from_zero_takes_another_sink(shift: float) -> None:
    """All scores of a row moved by the same number: a query and keys that share a direction."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(8, HEADS, HEAD_DIM), torch.randn(40, KV_HEADS, HEAD_DIM), torch.randn(40, KV_HEADS, HEAD_DIM)
    query[..., 0], keys[..., 0] = 8.0, shift * HEAD_DIM**0.5 / 8.0
    _, log_z = kernel(query, keys, values)
    _, wanted = attention(query, keys, values, with_state=True)
    assert abs(float(wanted.mean()) - shift) < 10.0
    assert float((log_z - wanted).abs().max()) < 2e-5 + 1e-6 * abs(shift)


def test_log_z_that_no_sink_reaches_is_not_a_number() -> None:
    torch.manual_seed(0)
    query, keys, values = torch.randn(1, HEADS, HEAD_DIM), torch.randn(4, KV_HEADS, HEAD_DIM), torch.zeros(4, KV_HEADS, HEAD_DIM)
    _, log_z = kernel(query, keys, values)
    assert bool(log_z.isnan().all())

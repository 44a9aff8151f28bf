"""Attention Matching (arXiv 2602.16284): a prefix as fewer keys and values, each key with a bias, all in closed form.

For each layer and key/value head, from reference queries q with outputs y and masses m = sum exp(q k / sqrt d) over the whole prefix:
1. keys C: those of the prefix with the highest root mean square of attention (their section 3.3, "highest attention keys")
2. biases beta = log w: w = argmin |Phi w - m| with Phi = exp(q C / sqrt d), e^-3 <= w <= e^3 (their 3.2, bounded least squares)
3. values V: least squares of softmax(q C / sqrt d + beta) V = y (their equation for C_v), with a small ridge
As there, queries are those of a model that already uses compact keys: a second pass takes them behind the first pass's result, where
the paper goes layer by layer. Reference queries are a dictionary's own calibration traces, so that both see the same.
Written from the paper's description. Does not evaluate (`answering`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asm_store.building.matching import bounded_least_squares, least_squares
from treadle.nn.kv import SequenceKV
from treadle.nn.matched_keys import MatchedKeys
from treadle.nn.model import CausalLM
from treadle_bench.asm.answering import Before, run_all
from treadle_bench.asm.compact_kv import CompactKV
from treadle_bench.asm.tasks import Tokens

QUERY_TOKENS_MAX = 2048  # reference queries, of all heads of a group: 6,144 rows for SmolLM2
PASSES = 2


@dataclass(slots=True, eq=False)
class _Queries:
    """Takes the rotated queries of every layer out of a forward (a PrefixCollector)."""

    layers: list[list[Tensor]]

    def take(self, layer: int, queries: Tensor, rotated: Tensor, a: Tensor, log_z: Tensor) -> None:
        self.layers[layer].append(rotated.to(torch.float32).clone())


def match(model: CausalLM, prefix: SequenceKV, traces: tuple[Tokens, ...], tokens: int) -> CompactKV:
    """A prefix's KV as `tokens` compact keys of each head. prefix: its whole KV; traces: what follows it, for reference queries."""
    compact = None
    for _ in range(PASSES):
        queries = reference_queries(model, prefix, traces, compact)
        layers = [
            match_layer(queries[layer], prefix.keys(layer).float(), prefix.values(layer).float(), tokens)
            for layer in range(model.config.layers)
        ]
        compact = CompactKV(model.config, layers, prefix.length)
    assert compact is not None
    return compact


def reference_queries(model: CausalLM, prefix: SequenceKV, traces: tuple[Tokens, ...], compact: CompactKV | None) -> list[Tensor]:
    """[tokens, H, head_dim] for each layer, of the first traces of QUERY_TOKENS_MAX tokens, behind `compact` or the whole prefix."""
    used, count = list[Tokens](), 0
    for trace in traces:
        if count + len(trace) > QUERY_TOKENS_MAX and used:
            break
        used.append(trace)
        count += len(trace)
    taken = _Queries([[] for _ in range(model.config.layers)])
    run_all(model, used, Before(prefix.length, prefix, compact), taken)
    return [torch.cat(layer) for layer in taken.layers]


def match_layer(queries: Tensor, keys: Tensor, values: Tensor, tokens: int) -> MatchedKeys:
    """One layer's compact keys. queries: rotated [n, H, D]; keys, values: of the whole prefix, [S, KV, D]; all fp32."""
    count, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.view(count, kv_heads, heads // kv_heads, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    matched = [match_head(grouped[head], keys[:, head], values[:, head], min(tokens, len(keys))) for head in range(kv_heads)]
    return MatchedKeys(*(torch.stack(part) for part in zip(*matched, strict=True)))


def match_head(queries: Tensor, keys: Tensor, values: Tensor, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(keys [tokens, D], values [tokens, D], biases [tokens]) for queries [n, D] over keys and values [S, D]."""
    scores = queries @ keys.T / math.sqrt(queries.shape[1])
    peak = scores.max(1, keepdim=True).values
    masses = (scores - peak).exp()  # every row by its own largest: least squares then weighs queries alike
    total = masses.sum(1, keepdim=True)
    attention = masses / total
    chosen = attention.square().mean(0).topk(tokens).indices.sort().values
    weights = bounded_least_squares(masses[:, chosen], total[:, 0])
    shares = masses[:, chosen] * weights
    shares /= shares.sum(1, keepdim=True)
    return keys[chosen], least_squares(shares, attention @ values), weights.log()

"""Makes the manifests of the known Engram families: primes and multipliers, derived once and stored.

Sources: Engram demo code and paper (arXiv 2601.07372), DeepSeek-V4.1 and Qwen PLE as served by vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from treadle.contract.engram_model import EngramModel, Family, Fusion
from treadle.contract.row_layout import RowLayout, Scale

PLE_SEED = 1234  # of Qwen's published checkpoints
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment, 2^64 / golden ratio
_WORD = (1 << 64) - 1
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)  # Miller-Rabin with these is exact below 3.3e24


def hash_multipliers(vocabulary: int, layer: int, order_max: int, seed: int = 0) -> tuple[int, ...]:
    """Odd multipliers of one layer, demo and V4.1 families; `vocabulary` is the number of compressed ids.

    Drawn from numpy's PCG64 stream with seed `seed + 10007 * layer`, below half of what int64 allows, then made odd.
    """
    half = max(1, ((1 << 63) - 1) // vocabulary // 2)
    drawn = np.random.default_rng(seed + 10007 * layer).integers(0, half, size=order_max, dtype=np.int64)
    return tuple(2 * int(r) + 1 for r in drawn)


def ple_multipliers(vocabulary: int, order_max: int, index: int = 0, seed: int = PLE_SEED) -> tuple[int, ...]:
    """Odd multipliers of Qwen's PLE layer number `index` (0 for the first one), by SplitMix64."""
    half, base = max(1, ((1 << 63) - 1) // vocabulary // 2), seed + 10007 * index
    return tuple(2 * (_splitmix64((base + _GOLDEN * (i + 1)) & _WORD) % half) + 1 for i in range(order_max))


def head_primes(base: Sequence[int], layers: int, heads: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes [layer][order][head], all different over the whole model: each the smallest unused one from `base[order]` on."""
    seen: set[int] = set()
    return tuple(tuple(_take(heads, start, seen) for start in base) for _ in range(layers))


def demo_model(
    name: str, *, layers: Sequence[int], token_map: str, compressed_vocab_size: int, pad_id: int, prime_base: int,
    orders: Sequence[int] = (2, 3), heads: int = 8, row: RowLayout, fusion: Fusion | None = None, seed: int = 0,
) -> EngramModel:  # fmt: skip
    """A template of the `engram-demo` family; `prime_base` is the smallest number of rows of a head."""
    return EngramModel(
        name=name, family=Family.DEMO, layers=tuple(layers), orders=tuple(orders), heads=heads,
        primes=head_primes([prime_base] * len(orders), len(layers), heads),
        multipliers=tuple(hash_multipliers(compressed_vocab_size, layer, max(orders), seed) for layer in layers),
        pad_id=pad_id, row=row, compressed_vocab_size=compressed_vocab_size, token_map=token_map, fusion=fusion,
    )  # fmt: skip


def deepseek_v41_model(
    name: str, *, token_map: str, pad_id: int, compressed_vocab_size: int = 99_092, layers: Sequence[int] = (1, 14),
    prime_base: int = 16_000_000, order_max: int = 4, orders: Sequence[int] | None = None, heads: int = 8, head_dim: int = 256,
    row: RowLayout | None = None, fusion: Fusion | None = None, seed: int = 0,
) -> EngramModel:  # fmt: skip
    """A template of the `deepseek-v4.1` family: FP8 values and ue8m0 scales in 264-byte rows by default.

    orders: n-gram orders, rising; None: 2 to `order_max`        row: another layout; `head_dim` is then not read
    seed:   of the multipliers; DeepSeek's is 0
    """
    orders = tuple(range(2, order_max + 1) if orders is None else orders)
    row = row or RowLayout(head_dim + head_dim // 32, head_dim, "fp8_e4m3", Scale("ue8m0", 32))
    return EngramModel(
        name=name, family=Family.DEEPSEEK_V41, layers=tuple(layers), orders=orders, heads=heads,
        primes=head_primes([prime_base] * len(orders), len(layers), heads),
        multipliers=tuple(hash_multipliers(compressed_vocab_size, layer, max(orders), seed) for layer in layers),
        pad_id=pad_id, row=row, compressed_vocab_size=compressed_vocab_size, token_map=token_map, fusion=fusion,
    )  # fmt: skip


def qwen_ple_model(
    name: str, *, layers: Sequence[int] = (0,), eos_id: int = 248_044, vocabulary: int = 248_320, prime_base: int = 20_000_000,
    order_max: int = 3, heads: int = 8, row: RowLayout, seed: int = PLE_SEED,
) -> EngramModel:  # fmt: skip
    """A template of the `qwen-ple` family: raw token ids, EOS is both pad and segment boundary; as published one layer, 16 rows."""
    orders = tuple(range(2, order_max + 1))
    return EngramModel(
        name=name, family=Family.QWEN_PLE, layers=tuple(layers), orders=orders, heads=heads,
        primes=head_primes([prime_base] * len(orders), len(layers), heads),
        multipliers=tuple(ple_multipliers(vocabulary, order_max, index, seed) for index in range(len(layers))),
        pad_id=eos_id, eos_id=eos_id, row=row,
    )  # fmt: skip


def _take(count: int, start: int, seen: set[int]) -> tuple[int, ...]:
    taken = tuple(prime for prime, _ in zip((p for p in _primes_from(start) if p not in seen), range(count), strict=False))
    seen.update(taken)
    return taken


def _primes_from(start: int) -> Iterator[int]:
    candidate = start
    while True:
        if _is_prime(candidate):
            yield candidate
        candidate += 1


def _is_prime(number: int) -> bool:
    if number < 2:
        return False
    for prime in _WITNESSES:
        if number % prime == 0:
            return number == prime
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(witness, odd, twos, number) for witness in _WITNESSES)


def _passes(witness: int, odd: int, twos: int, number: int) -> bool:
    value = pow(witness, odd, number)
    if value in (1, number - 1):
        return True
    for _ in range(twos - 1):
        value = value * value % number
        if value == number - 1:
            return True
    return False


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)

"""One Engram layer's hash as arrays: built once from the manifest, used in every step.

Owns the checks that make the hash exact and memory-safe (map digest, id range, no overflow). Does not hash.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, Family, FingerprintMismatch, InvalidArgument

_T = TypeVar("_T", bound=np.generic)
_PRODUCT_MAX = (1 << 63) - 1  # id x multiplier stays a non-negative int64: then XOR and remainder are the same in every word type


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class HashPlan:
    """What decides the row ids of one layer. Arrays are read-only and owned by the plan; make it with `from_model`.

    orders:      [n] int32, rising; order_max is the last one (Nmax)
    multipliers: [Nmax] uint64, multiplier k belongs to the token k places back
    primes:      [C] int64, order-major, head-minor; C = n x heads
    offsets:     [C] int64, where each head's rows begin: the exclusive prefix sum of the primes
    pad:         stands for what is blocked, compressed already (qwen-ple: the EOS id)
    eos:         ends a segment (qwen-ple), -1 for the other families
    token_map:   [V] int32 raw -> compressed ids, or None where ids stay raw
    rows_hashed: sum of the primes: row ids lie in [0, rows_hashed)
    token_limit: raw ids from here on are refused: V, or without a map the first id whose product would leave int64
    """

    family: Family
    order_max: int
    orders: NDArray[np.int32]
    heads: int
    multipliers: NDArray[np.uint64]
    primes: NDArray[np.int64]
    offsets: NDArray[np.int64]
    pad: int
    eos: int
    token_map: NDArray[np.int32] | None
    rows_hashed: int
    token_limit: int

    @property
    def columns(self) -> int:
        """C, row ids for each token."""
        return int(self.primes.shape[0])

    @classmethod
    def from_model(cls, model: EngramModel, layer: int, token_map: NDArray[np.int32] | None) -> Self:
        """The plan of `layer`. `token_map` is copied; it must be the one that the model's digest names (None for qwen-ple).

        Raises FingerprintMismatch("token_map", ...) for another map; InvalidArgument for a layer without a table, a map where
        none belongs or the reverse, and numbers whose products would overflow int64.
        """
        position = model.layer_position(layer)
        multipliers = model.multipliers[position]
        limit = _PRODUCT_MAX // max(multipliers) + 1
        mapped = _checked_map(model, token_map, limit)
        token_limit = limit if mapped is None else int(mapped.shape[0])
        for name, token in (("pad_id", model.pad_id), ("eos_id", model.eos_id)):
            if token is not None and token >= token_limit:
                raise InvalidArgument(
                    f"{name}: {token} is not below {token_limit}, the number of token ids that {model.name} can hash"
                )
        primes = np.array(model.primes[position], dtype=np.int64).reshape(-1)
        return cls(
            family=model.family, order_max=model.order_max, orders=_frozen(np.array(model.orders, dtype=np.int32)), heads=model.heads,
            multipliers=_frozen(np.array(multipliers, dtype=np.uint64)), primes=_frozen(primes),
            offsets=_frozen(np.cumsum(primes) - primes), pad=model.pad_id if mapped is None else int(mapped[model.pad_id]),
            eos=-1 if model.eos_id is None else model.eos_id, token_map=mapped, rows_hashed=int(primes.sum()), token_limit=token_limit,
        )  # fmt: skip


def _checked_map(model: EngramModel, token_map: NDArray[np.int32] | None, limit: int) -> NDArray[np.int32] | None:
    if model.token_map is None or model.compressed_vocab_size is None:
        if token_map is not None:
            raise InvalidArgument(f"token_map: {model.name} hashes raw token ids, pass None")
        return None
    if not isinstance(token_map, np.ndarray) or token_map.dtype != np.int32 or token_map.ndim != 1 or token_map.size == 0:
        raise InvalidArgument(f"token_map: {model.name} needs its map of raw to compressed ids, int32 [V]")
    digest = hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
    if digest != model.token_map:
        raise FingerprintMismatch("token_map", model.token_map, digest)
    if int(token_map.min()) < 0 or int(token_map.max()) >= min(model.compressed_vocab_size, limit):
        raise InvalidArgument(
            f"token_map: compressed ids lie in [0, {min(model.compressed_vocab_size, limit)}), got {token_map.min()} to {token_map.max()}"
        )
    return _frozen(token_map.copy())


def _frozen(array: NDArray[_T]) -> NDArray[_T]:
    array.setflags(write=False)
    return array

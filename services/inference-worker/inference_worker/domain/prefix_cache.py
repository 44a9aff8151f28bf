"""KV of prompt prefixes, kept for later requests with the same beginning; exact, bounded in bytes.

A block is BLOCK_TOKENS tokens. Its key is a chain hash over everything its KV depends on: salt, model, Engram version
and whether it is fused, the long prefix's version and how it is used, and every token up to the block's end. Owns keys, room and eviction; not what a block holds
(the engine clones KV into it), nor who may enter (the engine never offers blocks of a degraded request).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from treadle.contract.version import canonical_json

BLOCK_TOKENS = 32  # small enough that little of a shared prefix is computed again, large enough that keys cost nothing


class Sized(Protocol):
    """Something that knows its bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory."""


BlockT = TypeVar("BlockT", bound=Sized)


@dataclass(frozen=True, slots=True)
class BlockKeys:
    """Makes keys; `identity` is what KV depends on besides tokens and salt: model, dtype, Engram version, fused."""

    identity: Mapping[str, str]

    def root(self, salt: str) -> bytes:
        """The key before the first block of a request with this salt."""
        return hashlib.sha256(canonical_json({"identity": dict(self.identity), "salt": salt})).digest()

    def extend(self, keys: list[bytes], salt: str, tokens: Sequence[int]) -> None:
        """Append the keys of the full blocks of `tokens` that `keys` does not have yet. [n] sha256 digests, 32 bytes each."""
        for block in range(len(keys), len(tokens) // BLOCK_TOKENS):
            before = keys[-1] if keys else self.root(salt)
            ids = array("Q", tokens[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS])
            keys.append(hashlib.sha256(before + ids.tobytes()).digest())


class PrefixCache(Generic[BlockT]):
    """Blocks by key, least recently used out first. One thread's: the engine's."""

    def __init__(self, bytes_max: int, on_evicted: Callable[[bytes], None] = lambda _: None) -> None:
        """on_evicted: called with the key of each block that goes; its children are gone before."""
        self._bytes_max, self._on_evicted = bytes_max, on_evicted
        self._blocks: OrderedDict[bytes, BlockT] = OrderedDict()
        self.byte_count = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def match(self, keys: Sequence[bytes]) -> list[BlockT]:
        """The blocks of the longest cached beginning of `keys`; they count as used now."""
        found = []
        for key in keys:
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
        self.touch(keys[: len(found)])
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """Count these blocks as used now, the first as the last used."""
        # A block without those before it can never match: a chain is therefore given up from its end.
        for key in reversed(keys):
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def put(self, chain: Sequence[bytes], block: BlockT) -> bool:
        """Keep the block of the last key of `chain`, evicting others for it; whether it is kept now.

        One larger than the whole cache is not kept, nor one without the block before it: it could never match.
        """
        key, before = chain[-1], chain[:-1]
        if key in self._blocks:
            return True
        if block.nbytes > self._bytes_max or (before and before[-1] not in self._blocks):
            return False
        if self.byte_count + block.nbytes > self._bytes_max:
            self.touch(before)
        while self.byte_count + block.nbytes > self._bytes_max:
            oldest = next(iter(self._blocks))
            if before and oldest == before[-1]:  # only its own beginning is left to go
                return False
            self._evict(oldest)
        self._blocks[key] = block
        self.byte_count += block.nbytes
        return True

    def _evict(self, key: bytes) -> None:
        self.byte_count -= self._blocks.pop(key).nbytes
        self.evicted += 1
        self._on_evicted(key)

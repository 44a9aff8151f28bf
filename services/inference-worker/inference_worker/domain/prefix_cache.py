"""KV of prompt prefixes, kept for later requests with the same beginning; exact, bounded in bytes.

A block is BLOCK_TOKENS tokens. Its key is a chain hash over everything its KV depends on: salt, model, Engram version
and whether it is fused, and every token up to the block's end. Owns keys, room and eviction; not what a block holds
(the engine clones KV into it), nor who may enter (the engine never offers blocks of a degraded request).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
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

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
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

    def put(self, key: bytes, block: BlockT) -> None:
        """Keep a block, evicting others for it; one larger than the whole cache is not kept."""
        if key in self._blocks or block.nbytes > self._bytes_max:
            return
        while self.byte_count + block.nbytes > self._bytes_max:
            _, old = self._blocks.popitem(last=False)
            self.byte_count -= old.nbytes
            self.evicted += 1
        self._blocks[key] = block
        self.byte_count += block.nbytes

"""Which beginnings of prompts lie in the prefix cache of one worker, as its own events tell.

Owns the names' translation into keys that the gateway can make from a prompt: a chain hash over cache salt, memory
(NAME@VERSION) and all tokens up to a block's end. So it is exact, whatever the worker hashes itself, and needs nothing
of it but tokens. What is lost (a limit, a broken stream) costs a worse choice of worker and nothing else.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEY_BYTES = 16  # a collision sends one prompt to a worse worker, no more
BLOCK_BYTES = 260  # of memory for an indexed block, about: entry, name, key and three places in tables (measured, CPython 3.11)


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """One block of a worker's prefix cache; `parent` "": it begins a sequence."""

    name: bytes
    parent: bytes
    token_ids: Sequence[int]
    cache_salt: str
    memory: str


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """What a worker tells: first `cleared` (all told before is gone), then `removed`, then `stored`."""

    stored: Sequence[CachedBlock] = ()
    removed: Sequence[bytes] = ()
    cleared: bool = False
    snapshot_complete: bool = False


class Room:
    """How many blocks may be indexed, of all workers together."""

    def __init__(self, blocks_max: int) -> None:
        self.blocks_max, self.blocks = blocks_max, 0
        self.left_out = 0

    def take(self) -> bool:
        """Whether there is room for one more; counts it in, or as left out."""
        if self.blocks >= self.blocks_max:
            self.left_out += 1
            return False
        self.blocks += 1
        return True

    def give(self, blocks: int) -> None:
        """So many are gone."""
        self.blocks -= blocks


@dataclass(slots=True, eq=False)
class _Block:
    key: bytes
    parent: _Block | None
    name: bytes
    children: int = 0
    there: bool = True


class BlockIndex:
    """Blocks of one worker. complete: all that it has told since the last start; False before, and while it cannot be heard."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._blocks: dict[bytes, _Block] = {}
        self._keys: dict[bytes, int] = {}  # how many blocks that are there have the key
        self.complete = False

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def clear(self) -> None:
        """Forget everything: nothing is known of the worker's cache."""
        self._room.give(len(self._blocks))
        self._blocks.clear()
        self._keys.clear()
        self.complete = False

    def apply(self, changes: BlockChanges) -> None:
        """Take in what the worker tells."""
        if changes.cleared:
            self.clear()
        for name in changes.removed:
            self._remove(name)
        for block in changes.stored:
            self._store(block)
        self.complete = self.complete or changes.snapshot_complete

    def _store(self, block: CachedBlock) -> None:
        known = self._blocks.get(block.name)
        if known is not None:
            if not known.there:
                known.there = True
                self._keys[known.key] = self._keys.get(known.key, 0) + 1
            return
        parent = self._blocks.get(block.parent) if block.parent else None
        if block.parent and parent is None:  # it was left out itself
            self._room.left_out += 1
            return
        if not self._room.take():
            return
        before = root_key(block.cache_salt, block.memory) if parent is None else parent.key
        key = next_key(before, block.token_ids)
        self._blocks[block.name] = _Block(key, parent, block.name)
        self._keys[key] = self._keys.get(key, 0) + 1
        if parent is not None:
            parent.children += 1

    def _remove(self, name: bytes) -> None:
        block = self._blocks.get(name)
        if block is None or not block.there:
            return
        block.there = False
        count = self._keys.pop(block.key) - 1
        if count:
            self._keys[block.key] = count
        # A block that is gone before its children is remembered for its key: it may come back and make them match again.
        while block is not None and not block.there and not block.children:
            del self._blocks[block.name]
            self._room.give(1)
            block = block.parent
            if block is not None:
                block.children -= 1


def root_key(cache_salt: str, memory: str) -> bytes:
    """The key before the first block of prompts with this salt and memory (NAME@VERSION, "": none)."""
    return _digest(json.dumps([cache_salt, memory]).encode())


def next_key(before: bytes, token_ids: Sequence[int]) -> bytes:
    """The key of the block with these tokens behind the one with the key `before`."""
    return _digest(before + array("I", token_ids).tobytes())


def prompt_keys(token_ids: Sequence[int], cache_salt: str, memory: str, block_tokens: int) -> Iterator[bytes]:
    """The keys of a prompt's full blocks, as far as a worker can use them: the last token is always computed."""
    key = root_key(cache_salt, memory)
    for first in range(0, len(token_ids) - block_tokens, block_tokens):
        key = next_key(key, token_ids[first : first + block_tokens])
        yield key


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES).digest()

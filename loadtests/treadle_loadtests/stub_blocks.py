"""The prefix cache of a worker without a model: names of blocks, least recently used out first, and who hears of changes.

Holds no KV: a block is its name and what the event about it says. Also what one cache of the summed size would have held
(`trace`), so that both follow the same rule.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

CHANGES_MAX = 4096  # that wait for one watcher; one that is slower is told everything anew
BLOCKS_TOLD_AT_ONCE = 256  # in one message: with 512 tokens a block it stays below 1 MiB


@dataclass(frozen=True, slots=True)
class Block:
    """`block_tokens` tokens behind the block `parent`; an empty parent begins a sequence."""

    name: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    cache_salt: str
    memory: str


@dataclass(frozen=True, slots=True)
class Change:
    """What happened to the cache; `cleared`: all that was told before is gone; `complete`: this ends what was there before."""

    stored: Sequence[Block] = ()
    removed: Sequence[bytes] = ()
    cleared: bool = False
    complete: bool = False


def chain(token_ids: Sequence[int], block_tokens: int, salt: str = "", memory: str = "") -> list[Block]:
    """The full blocks of a prompt. A name depends on all tokens up to the block's end, the salt and the memory."""
    blocks: list[Block] = []
    before = hashlib.sha256(f"{salt}\n{memory}".encode()).digest()
    for first in range(0, len(token_ids) - block_tokens + 1, block_tokens):
        ids = tuple(token_ids[first : first + block_tokens])
        name = hashlib.sha256(before + array("Q", ids).tobytes()).digest()
        blocks.append(Block(name, blocks[-1].name if blocks else b"", ids, salt, memory))
        before = name
    return blocks


class BlockCache:
    """At most `blocks_max` blocks."""

    def __init__(self, blocks_max: int) -> None:
        self._blocks_max = blocks_max
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()
        self._watchers: set[asyncio.Queue[Change]] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, blocks: Sequence[Block]) -> int:
        """How many of the first blocks are there; they count as used now."""
        count = 0
        while count < len(blocks) and blocks[count].name in self._blocks:
            count += 1
        self._touch(blocks[:count])
        return count

    def store(self, blocks: Sequence[Block]) -> None:
        """Keep the blocks of a prompt, evicting others for them; of one longer than the cache its beginning."""
        kept = blocks[: self._blocks_max]
        new = [block for block in kept if block.name not in self._blocks]
        for block in new:
            self._blocks[block.name] = block
        self._touch(kept)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._blocks_max)]
        if new or removed:
            self._tell(Change(new, removed))

    async def watch(self) -> AsyncGenerator[Change, None]:
        """What is there, then what changes, until the caller closes the generator."""
        queue: asyncio.Queue[Change] = asyncio.Queue(CHANGES_MAX)
        self._watchers.add(queue)
        try:
            for change in self._everything():
                yield change
            while True:
                change = await queue.get()
                if not change.cleared:
                    yield change
                    continue
                for change in self._everything():
                    yield change
        finally:
            self._watchers.discard(queue)

    def _touch(self, blocks: Sequence[Block]) -> None:
        for block in reversed(blocks):  # a chain is given up from its end: a block without those before it never matches
            self._blocks.move_to_end(block.name)

    def _everything(self) -> list[Change]:
        # Used last stands last, and a parent is used after its children: turned around, every parent comes first.
        blocks = list(reversed(self._blocks.values()))
        parts = [blocks[first : first + BLOCKS_TOLD_AT_ONCE] for first in range(0, len(blocks), BLOCKS_TOLD_AT_ONCE)]
        return [Change(cleared=True), *(Change(part) for part in parts), Change(complete=True)]

    def _tell(self, change: Change) -> None:
        for queue in self._watchers:
            if queue.full():
                while not queue.empty():
                    queue.get_nowait()
                change = Change(cleared=True)  # what was dropped is told anew with all the rest
            queue.put_nowait(change)

"""The index of cached blocks against a model that keeps every beginning whole."""

from __future__ import annotations

import hashlib
import random
import sys
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference_gateway.domain.block_index import BLOCK_BYTES, BlockChanges, BlockIndex, CachedBlock, Room, prompt_keys

BLOCK = 2
Beginning = tuple[str, str, tuple[int, ...]]  # salt, memory, all tokens up to a block's end


def name_of(beginning: Beginning) -> bytes:
    return hashlib.sha256(repr(beginning).encode()).digest()


def block_of(beginning: Beginning) -> CachedBlock:
    salt, memory, tokens = beginning
    parent = name_of((salt, memory, tokens[:-BLOCK])) if len(tokens) > BLOCK else b""
    return CachedBlock(name_of(beginning), parent, tokens[-BLOCK:], salt, memory)


def cached(index: BlockIndex, tokens: tuple[int, ...], salt: str = "", memory: str = "") -> int:
    """Leading tokens of a prompt that the index knows."""
    count = 0
    for key in prompt_keys(tokens, salt, memory, BLOCK):
        if key not in index:
            break
        count += BLOCK
    return count


def truly_cached(there: set[Beginning], tokens: tuple[int, ...], salt: str, memory: str) -> int:
    """The same, by looking at every beginning; the last token of a prompt is always computed."""
    count = 0
    while count + BLOCK < len(tokens) and (salt, memory, tokens[: count + BLOCK]) in there:
        count += BLOCK
    return count


Words = st.lists(st.integers(0, 1), max_size=9).map(tuple)
Step = st.tuples(st.sampled_from(["store", "store", "store", "remove", "clear"]), st.sampled_from(["", "t"]), Words, st.randoms())


@settings(max_examples=200, deadline=None)
@given(st.lists(Step, max_size=60), st.lists(Words, min_size=1, max_size=8))
def test_the_index_finds_what_a_worker_would_find_whatever_is_stored_and_removed(
    steps: list[tuple[str, str, tuple[int, ...], random.Random]], prompts: list[tuple[int, ...]]
) -> None:
    room = Room(1 << 20)
    index, there = BlockIndex(room), set[Beginning]()
    for kind, salt, tokens, chance in steps:
        if kind == "clear":
            there.clear()
            index.apply(BlockChanges(cleared=True))
        elif kind == "remove" and there:  # any block, so also one whose children stay
            gone = chance.choice(sorted(there))
            there.discard(gone)
            index.apply(BlockChanges(removed=[name_of(gone)]))
        else:
            chain = [(salt, "m@1", tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            new = [beginning for beginning in chain if beginning not in there]
            there.update(new)
            index.apply(BlockChanges(stored=[block_of(beginning) for beginning in new]))
        for prompt in [*prompts, tokens]:
            for each in ("", "t"):
                assert cached(index, prompt, each, "m@1") == truly_cached(there, prompt, each, "m@1")
            assert cached(index, prompt, "", "m@2") == cached(index, prompt, "", "") == 0
    assert room.blocks == len(index)
    for beginning in sorted(there):
        index.apply(BlockChanges(removed=[name_of(beginning)]))
    assert room.blocks == len(index) == 0  # nothing is remembered of what is gone


def chain_of(length: int, first: int = 0) -> list[CachedBlock]:
    tokens = tuple(range(first, first + length * BLOCK))
    return [block_of(("", "", tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]


def test_an_index_is_complete_between_its_snapshot_and_the_next_start() -> None:
    index = BlockIndex(Room(10))
    assert not index.complete
    index.apply(BlockChanges(stored=chain_of(1), snapshot_complete=True))
    assert index.complete
    index.apply(BlockChanges(cleared=True))
    assert not index.complete
    assert len(index) == 0


def test_indexes_share_their_room_and_what_does_not_fit_is_counted_with_all_that_stands_behind_it() -> None:
    room = Room(3)
    first, second = BlockIndex(room), BlockIndex(room)
    first.apply(BlockChanges(stored=chain_of(2)))
    second.apply(BlockChanges(stored=chain_of(3, 100)))
    assert (len(first), len(second), room.blocks, room.left_out) == (2, 1, 3, 2)
    assert cached(second, tuple(range(100, 110))) == BLOCK
    first.clear()
    assert room.blocks == 1
    second.apply(BlockChanges(stored=chain_of(3, 100)))  # told again, as after a new start
    assert cached(second, tuple(range(100, 110))) == 3 * BLOCK


def test_names_that_stand_for_the_same_tokens_go_one_by_one() -> None:
    index = BlockIndex(Room(10))
    twins = [CachedBlock(name, b"", (1, 2), "", "") for name in (b"a", b"b")]
    index.apply(BlockChanges(stored=twins))
    index.apply(BlockChanges(removed=[b"a", b"a", b"never told"]))
    assert cached(index, (1, 2, 3)) == BLOCK
    index.apply(BlockChanges(removed=[b"b"]))
    assert cached(index, (1, 2, 3)) == 0


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="memory is measured as CPython uses it")
def test_a_block_takes_about_as_much_memory_as_the_metric_says() -> None:
    count = 20_000
    index = BlockIndex(Room(count))
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(count):
            stored = [CachedBlock(hashlib.sha256(b"%d" % number).digest(), b"", (number, 0), "", "")]
            index.apply(BlockChanges(stored=stored))
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.5 * BLOCK_BYTES < (after - before) / count < 1.5 * BLOCK_BYTES

"""Prefix-cache keys and eviction, with blocks that hold nothing."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from inference_worker.domain.prefix_cache import BLOCK_TOKENS, BlockKeys, PrefixCache


@dataclass(frozen=True)
class Block:
    nbytes: int = 10


KEYS = BlockKeys({"model": "m", "engram": "none"})


def keys_of(tokens: list[int], salt: str = "", keys: BlockKeys = KEYS) -> list[bytes]:
    made: list[bytes] = []
    keys.extend(made, salt, tokens)
    return made


def test_only_full_blocks_have_keys() -> None:
    assert len(keys_of(list(range(BLOCK_TOKENS - 1)))) == 0
    assert len(keys_of(list(range(2 * BLOCK_TOKENS)))) == 2


def test_keys_differ_by_salt_by_identity_and_by_any_earlier_token() -> None:
    tokens = list(range(2 * BLOCK_TOKENS))
    last = {
        keys_of(tokens)[-1],
        keys_of(tokens, salt="tenant")[-1],
        keys_of(tokens, keys=BlockKeys({"model": "m", "engram": "v2"}))[-1],
        keys_of([9, *tokens[1:]])[-1],
    }
    assert len(last) == 4


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 31), max_size=4 * BLOCK_TOKENS), st.integers(0, 4 * BLOCK_TOKENS))
def test_keys_made_bit_by_bit_equal_keys_made_at_once(tokens: list[int], cut: int) -> None:
    made: list[bytes] = []
    KEYS.extend(made, "s", tokens[:cut])
    KEYS.extend(made, "s", tokens)
    assert made == keys_of(tokens, "s")


def test_a_match_is_the_longest_cached_beginning() -> None:
    cache: PrefixCache[Block] = PrefixCache(1000)
    keys = keys_of(list(range(4 * BLOCK_TOKENS)))
    assert cache.put(keys[:1], Block())
    assert cache.put(keys[:2], Block())
    assert len(cache.match(keys)) == 2
    assert cache.match(keys[1:2]) != []
    assert cache.match(keys[2:]) == []


def test_a_block_without_the_one_before_it_is_not_kept() -> None:
    cache: PrefixCache[Block] = PrefixCache(1000)
    keys = keys_of(list(range(3 * BLOCK_TOKENS)))
    assert cache.put(keys[:1], Block())
    assert not cache.put(keys, Block())
    assert keys[2] not in cache


def test_a_sequence_longer_than_the_cache_keeps_its_beginning() -> None:
    cache: PrefixCache[Block] = PrefixCache(30)
    keys = keys_of(list(range(5 * BLOCK_TOKENS)))
    assert [cache.put(keys[: place + 1], Block()) for place in range(5)] == [True, True, True, False, False]
    assert len(cache.match(keys)) == 3


def test_bytes_are_bounded_and_a_chain_is_given_up_from_its_end() -> None:
    cache: PrefixCache[Block] = PrefixCache(40)
    first = keys_of(list(range(4 * BLOCK_TOKENS)))
    for place in range(len(first)):
        cache.put(first[: place + 1], Block())
    cache.touch(first)
    other = keys_of(list(range(9, 9 + BLOCK_TOKENS)))
    cache.put(other, Block())
    assert cache.byte_count == 40
    assert cache.evicted == 1
    assert len(cache.match(first)) == 3
    assert len(cache.match(other)) == 1


def test_a_block_larger_than_the_cache_is_not_kept() -> None:
    cache: PrefixCache[Block] = PrefixCache(0)
    assert not cache.put([b"key"], Block())
    assert len(cache) == 0
    assert b"key" not in cache

"""KV of running sequences, begun from the prefix cache and given back to it.

Owns the cache and what its keys say. A block holds keys, values and the fusion's history of its tokens, cloned: later
steps of the sequence it came from cannot change it.
"""

from __future__ import annotations

from dataclasses import dataclass

from inference_worker.domain.cached_blocks import BlockLog, CachedBlock
from inference_worker.domain.prefix_cache import BLOCK_TOKENS, BlockKeys, PrefixCache
from inference_worker.domain.sequence import Sequence
from treadle.contract.block_memory import block_memory
from treadle.nn.kv import KVBlock
from treadle.nn.model import CausalLM


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A block in the cache. lookups, lookups_outside: in the dictionary that it was made with, of its tokens."""

    block: KVBlock
    lookups: int
    lookups_outside: int

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps in memory."""
        return self.block.nbytes


class KVBlocks:
    """Makes each sequence's KV, sharing beginnings that were computed before. The engine's thread only."""

    def __init__(self, model: CausalLM, bytes_max: int, name: str) -> None:
        self._model = model
        self._enabled = bytes_max > 0
        self.block_tokens = BLOCK_TOKENS if self._enabled else 0
        self.log = BlockLog()
        self._cache: PrefixCache[_Kept] = PrefixCache(bytes_max, self.log.removed)
        self._identity = {"model": name, "dtype": str(model.dtype)}

    @property
    def byte_count(self) -> int:
        """Bytes kept in the cache."""
        return self._cache.byte_count

    def admit(self, sequence: Sequence) -> None:
        """Give a sequence its KV, filled with the longest cached beginning of its prompt.

        The last prompt token is always left to compute, for the first answer token is chosen from it; and so is a whole
        prompt whose log-probabilities are asked for.
        """
        memory = sequence.lease.memory
        widths = memory.history_widths if memory is not None else {}
        sequence.kv = self._model.new_kv(widths)
        sequence.kv.reserve(sequence.kv_tokens_max)  # backed by the system only as it is written, and never copied to grow
        if sequence.prefix is not None and sequence.prefix.is_exact and (exact := sequence.prefix.prefix.kv) is not None:
            for block in exact.blocks(self._model.dtype, widths):
                sequence.kv.extend_from(block)
        if not self._enabled or sequence.request.sampling.prompt_logprobs:
            return
        self._extend_keys(sequence, sequence.prompt_length - 1)
        use = sequence.prefix.use if sequence.prefix is not None else None
        for kept in self._cache.match(sequence.block_keys):
            sequence.kv.extend_from(kept.block)
            if use is not None:  # the guard judges a prompt the same, whoever ran its beginning
                use.add(kept.lookups, kept.lookups_outside)
        sequence.computed = sequence.cached = sequence.kv.length - sequence.kv_offset
        sequence.published = sequence.cached // BLOCK_TOKENS

    def publish(self, sequence: Sequence) -> None:
        """Keep the full blocks that a sequence has computed. Those of a degraded one are made with memory missing: never."""
        if not self._enabled or sequence.degraded or sequence.kv is None:
            return
        self._extend_keys(sequence, sequence.computed)
        full = sequence.computed // BLOCK_TOKENS
        for place in range(sequence.published, full):
            chain, first = sequence.block_keys[: place + 1], sequence.kv_offset + place * BLOCK_TOKENS
            if chain[-1] in self._cache:
                continue
            kept = _Kept(sequence.kv.block(first, first + BLOCK_TOKENS), *_lookups_of(sequence, place))
            if not self._cache.put(chain, kept):
                break  # those behind it could never be found
            self.log.stored(_told(sequence, place))
        sequence.published = full
        self._cache.touch(sequence.block_keys[:full])

    def _extend_keys(self, sequence: Sequence, tokens: int) -> None:
        # Its own memory: what one has changed must never be found by a request with another, or with none.
        memory, prefix = sequence.lease.memory, sequence.prefix
        made_with = memory.identity if memory is not None else {}
        keys = BlockKeys(self._identity | made_with | (prefix.identity if prefix is not None else {}))
        keys.extend(sequence.block_keys, sequence.request.cache_salt, sequence.tokens[:tokens])


def _lookups_of(sequence: Sequence, place: int) -> tuple[int, int]:
    """Lookups of the block at `place` of a sequence, which has run it, and those among them outside; none without a dictionary."""
    use = sequence.prefix.use if sequence.prefix is not None else None
    return use.of_tokens(place * BLOCK_TOKENS - sequence.cached, BLOCK_TOKENS) if use is not None else (0, 0)


def _told(sequence: Sequence, place: int) -> CachedBlock:
    """What others are told of the block at `place` of a sequence."""
    memory, prefix, keys = sequence.lease.memory, sequence.prefix, sequence.block_keys
    return CachedBlock(
        keys[place], keys[place - 1] if place else b"",
        tuple(sequence.tokens[place * BLOCK_TOKENS : (place + 1) * BLOCK_TOKENS]), sequence.request.cache_salt,
        block_memory(
            f"{memory.model.name}@{memory.version}" if memory is not None else "", prefix.prefix.ref if prefix is not None else "",
            exact=prefix is not None and prefix.is_exact,
        ),
    )  # fmt: skip

"""KV of running sequences, begun from the prefix cache and given back to it.

Owns the cache and what its keys say. A block holds keys, values and the fusion's history of its tokens, cloned: later
steps of the sequence it came from cannot change it.
"""

from __future__ import annotations

from inference_worker.domain.prefix_cache import BLOCK_TOKENS, BlockKeys, PrefixCache
from inference_worker.domain.sequence import Sequence
from treadle.nn.kv import KVBlock
from treadle.nn.model import CausalLM


class KVBlocks:
    """Makes each sequence's KV, sharing beginnings that were computed before. The engine's thread only."""

    def __init__(self, model: CausalLM, bytes_max: int, name: str) -> None:
        self._model = model
        self._enabled = bytes_max > 0
        self._cache: PrefixCache[KVBlock] = PrefixCache(bytes_max)
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
        sequence.kv = self._model.new_kv(memory.history_widths if memory is not None else None)
        sequence.kv.reserve(sequence.tokens_max)  # backed by the system only as it is written, and never copied to grow
        if not self._enabled or sequence.request.sampling.prompt_logprobs:
            return
        self._extend_keys(sequence, sequence.prompt_length - 1)
        for block in self._cache.match(sequence.block_keys):
            sequence.kv.extend_from(block)
        sequence.computed = sequence.cached = sequence.kv.length
        sequence.published = sequence.cached // BLOCK_TOKENS

    def publish(self, sequence: Sequence) -> None:
        """Keep the full blocks that a sequence has computed. Those of a degraded one are made with memory missing: never."""
        if not self._enabled or sequence.degraded or sequence.kv is None:
            return
        self._extend_keys(sequence, sequence.computed)
        full = sequence.computed // BLOCK_TOKENS
        for place in range(sequence.published, full):
            key = sequence.block_keys[place]
            if key not in self._cache:
                self._cache.put(key, sequence.kv.block(place * BLOCK_TOKENS, (place + 1) * BLOCK_TOKENS))
        sequence.published = full
        self._cache.touch(sequence.block_keys[:full])

    def _extend_keys(self, sequence: Sequence, tokens: int) -> None:
        # Its own memory: what one has changed must never be found by a request with another, or with none.
        memory = sequence.lease.memory
        keys = BlockKeys(self._identity | (memory.identity if memory is not None else {}))
        keys.extend(sequence.block_keys, sequence.request.cache_salt, sequence.tokens[:tokens])

"""Everything in the engine that grows, and how far it may."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.contract.errors import InvalidArgument

STOP_STRINGS_MAX = 16  # each new piece of text is searched for all of them
STOP_CHARACTERS_MAX = 256  # of one stop string: bounds the text held back
STOP_TOKENS_MAX = 256  # stop token ids of one request
TOP_LOGPROBS_MAX = 20  # OpenAI's own limit
LOGIT_BIAS_TOKENS_MAX = 1024  # tokens with a bias of their own in one request
EMBED_INPUTS_MAX = 64  # texts of one request for vectors
EMBED_TEXTS_WAITING_MAX = 256  # texts that wait for their vectors, of all requests together
SALT_CHARACTERS_MAX = 256  # of a cache salt
REQUEST_ID_CHARACTERS_MAX = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Named limits of one engine.

    sequences_max:          requests in the batch at once
    step_tokens_max:        tokens of one step, decoding and prefill chunks together
    requests_waiting_max:   requests waiting for a place in the batch
    context_tokens_max:     prompt and answer of one request together
    kv_tokens_max:          tokens of KV reserved by the batch; a request reserves its prompt and its longest answer
    prefix_cache_bytes_max: KV kept for later requests; 0 turns the prefix cache off
    """

    sequences_max: int = 16
    step_tokens_max: int = 256
    requests_waiting_max: int = 64
    context_tokens_max: int = 2048
    kv_tokens_max: int = 65536
    prefix_cache_bytes_max: int = 512 << 20

    def __post_init__(self) -> None:
        for name in ("sequences_max", "step_tokens_max", "requests_waiting_max"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name}: at least 1, got {getattr(self, name)}")
        if self.step_tokens_max < self.sequences_max:
            raise InvalidArgument(
                f"step_tokens_max: at least sequences_max ({self.sequences_max}), for each decoding request takes one token of a step; "
                f"got {self.step_tokens_max}"
            )
        if self.context_tokens_max < 2:
            raise InvalidArgument(f"context_tokens_max: at least 2 (one token in, one out), got {self.context_tokens_max}")
        if self.kv_tokens_max < self.context_tokens_max:
            raise InvalidArgument(
                f"kv_tokens_max: at least context_tokens_max ({self.context_tokens_max}), or the longest request never starts; "
                f"got {self.kv_tokens_max}"
            )
        if self.prefix_cache_bytes_max < 0:
            raise InvalidArgument(f"prefix_cache_bytes_max: 0 or more, got {self.prefix_cache_bytes_max}")

"""What a caller asks of the engine and what it gets back, piece by piece."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from inference_worker.domain.limits import (
    LOGIT_BIAS_TOKENS_MAX,
    REQUEST_ID_CHARACTERS_MAX,
    SALT_CHARACTERS_MAX,
    STOP_CHARACTERS_MAX,
    STOP_STRINGS_MAX,
    STOP_TOKENS_MAX,
    TOP_LOGPROBS_MAX,
)
from treadle.contract.deadline import Deadline
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import WaitPolicy

TEMPERATURE_MAX = 100.0  # beyond it every token is equally likely; far above any real use
BIAS_MAX, PENALTY_MAX = 100.0, 2.0  # OpenAI's own limits
PRIORITY_MAX = 100
PRIORITY_STEP_SECONDS = 0.1  # from the lowest to the highest 20 s: less than what a gateway waits for a first piece
REPETITION_PENALTY_MAX = 10.0  # far above any real use


class FinishReason(StrEnum):
    """Why a generation ended well."""

    STOP = "stop"  # a stop string, a stop token or end of sequence
    LENGTH = "length"  # max_tokens or the context limit


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to choose tokens and when to stop.

    max_tokens:      most tokens to generate; 0: as far as the context limit allows
    temperature:     0: greedy
    top_p:           nucleus, (0, 1]
    seed:            of this request's own generator; None: random
    stop:            strings that end the text; not part of it
    stop_token_ids:  tokens that end the text, besides the model's end-of-sequence tokens; their text is not part of it
    ignore_eos:      go on past end-of-sequence tokens
    top_logprobs:    None: no log-probabilities; n: of the chosen token and of the n most likely ones
    prompt_logprobs: also those of the prompt's tokens
    logit_bias:      added to the logits of these tokens, -100 to 100
    presence_penalty, frequency_penalty: subtracted from the logit of a token that the answer holds, once, and for each time; -2 to 2
    repetition_penalty: divides positive and multiplies negative logits of tokens that prompt or answer hold; 1: none
    top_k:           choose among so many most likely tokens; 0: all
    min_p:           choose among tokens at least so likely as this share of the most likely one's probability, [0, 1]
    """

    max_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        self._check_steering()
        _expect(self.max_tokens >= 0, f"max_tokens: 0 or more, got {self.max_tokens}")
        _expect(
            math.isfinite(self.temperature) and 0 <= self.temperature <= TEMPERATURE_MAX,
            f"temperature: 0 to {TEMPERATURE_MAX}, got {self.temperature}",
        )
        _expect(math.isfinite(self.top_p) and 0 < self.top_p <= 1, f"top_p: more than 0, at most 1, got {self.top_p}")
        _expect(self.seed is None or 0 <= self.seed < 1 << 64, f"seed: 0 to 2^64-1, got {self.seed}")
        _expect(len(self.stop) <= STOP_STRINGS_MAX, f"stop: at most {STOP_STRINGS_MAX} strings, got {len(self.stop)}")
        for text in self.stop:
            _expect(
                0 < len(text) <= STOP_CHARACTERS_MAX, f"stop: strings of 1 to {STOP_CHARACTERS_MAX} characters, got {len(text)}"
            )
        _expect(
            len(self.stop_token_ids) <= STOP_TOKENS_MAX,
            f"stop_token_ids: at most {STOP_TOKENS_MAX}, got {len(self.stop_token_ids)}",
        )
        _expect(
            self.top_logprobs is None or 0 <= self.top_logprobs <= TOP_LOGPROBS_MAX,
            f"top_logprobs: 0 to {TOP_LOGPROBS_MAX}, got {self.top_logprobs}",
        )

    def _check_steering(self) -> None:
        _expect(
            len(self.logit_bias) <= LOGIT_BIAS_TOKENS_MAX,
            f"logit_bias: at most {LOGIT_BIAS_TOKENS_MAX} tokens, got {len(self.logit_bias)}",
        )
        for bias in self.logit_bias.values():
            _expect(abs(bias) <= BIAS_MAX, f"logit_bias: {-BIAS_MAX:g} to {BIAS_MAX:g}, got {bias}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _expect(abs(value) <= PENALTY_MAX, f"{name}: {-PENALTY_MAX:g} to {PENALTY_MAX:g}, got {value}")
        _expect(
            0 < self.repetition_penalty <= REPETITION_PENALTY_MAX,
            f"repetition_penalty: above 0, at most {REPETITION_PENALTY_MAX:g}, got {self.repetition_penalty}",
        )
        _expect(self.top_k >= 0, f"top_k: 0 or more, got {self.top_k}")
        _expect(0 <= self.min_p <= 1, f"min_p: 0 to 1, got {self.min_p}")


@dataclass(frozen=True, slots=True)
class Request:
    """One generation to make.

    prompt:     token ids, template already applied; at least one
    request_id: the caller's name for it, for logs; never a secret
    cache_salt: keeps its prefix-cache blocks apart from those with another salt
    policy:     longest wait for memory at one layer, and what to do then
    deadline:   when nobody waits for the answer any more; None: never
    priority:   of requests that wait, each step counts as PRIORITY_STEP_SECONDS of waiting; -100 to 100
    missing:    reports of memories that could not be had and that it goes on without: its answer is degraded from the beginning
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    request_id: str = ""
    cache_salt: str = ""
    policy: WaitPolicy = field(default_factory=WaitPolicy)
    deadline: Deadline | None = None
    priority: int = 0
    missing: tuple[MemoryReport, ...] = ()

    def check(self, *, vocabulary: int, context_tokens_max: int) -> None:
        """Raise InvalidArgument, naming the field, unless a model with these limits can run it."""
        _expect(bool(self.prompt), "prompt_token_ids: at least one token")
        _expect(
            len(self.prompt) < context_tokens_max,
            f"prompt_token_ids: {len(self.prompt)} tokens leave no room for an answer, the limit is {context_tokens_max} for both together",
        )
        _expect(
            min(self.prompt) >= 0 and max(self.prompt) < vocabulary,
            f"prompt_token_ids: ids are 0 to {vocabulary - 1}, got {min(self.prompt)} to {max(self.prompt)}",
        )
        biased = max(self.sampling.logit_bias, default=0)
        _expect(biased < vocabulary, f"logit_bias: token ids are 0 to {vocabulary - 1}, got {biased}")
        _expect(abs(self.priority) <= PRIORITY_MAX, f"priority: {-PRIORITY_MAX} to {PRIORITY_MAX}, got {self.priority}")
        _expect(len(self.cache_salt) <= SALT_CHARACTERS_MAX, f"cache_salt: at most {SALT_CHARACTERS_MAX} characters")
        _expect(len(self.request_id) <= REQUEST_ID_CHARACTERS_MAX, f"request_id: at most {REQUEST_ID_CHARACTERS_MAX} characters")

    def turn_seconds(self, came_seconds: float) -> float:
        """When it came, sooner by its priority: of requests that wait, the smallest turn begins first, so nobody is overtaken for ever."""
        return came_seconds - PRIORITY_STEP_SECONDS * self.priority

    def tokens_max(self, context_tokens_max: int) -> int:
        """Most tokens that prompt and answer may have together."""
        room = context_tokens_max - len(self.prompt)
        return len(self.prompt) + min(self.sampling.max_tokens or room, room)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with the natural logarithm of its probability at temperature 1; `text` as bytes, for it may be half a character."""

    token_id: int
    text: bytes
    logprob: float
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What one memory did for a request; `tickets` are layers of steps that the request took part in.

    missing_because: of the first row that did not come: late, unavailable, damaged, gone, refused; of a prefix: off_task, unavailable;
                     empty: nothing is missing
    lookups, lookups_outside, fell_back, prefix_tokens: of a prefix alone, as the proto says
    """

    kind: str
    name: str
    version: str
    transport: str
    tickets: int
    tickets_in_time: int
    rows_missing: int
    shadowed: bool
    missing_because: str = ""
    lookups: int = 0
    lookups_outside: int = 0
    fell_back: bool = False
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens counted for a request; `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a generation."""

    reason: FinishReason
    usage: Usage
    memory: tuple[MemoryReport, ...] = ()


@dataclass(slots=True)
class Piece:
    """A part of an answer. Pieces add up: two that follow each other say the same as their sum.

    text: complete characters only, held back while a stop string may be beginning
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    degraded: bool = False
    finish: Finish | None = None

    def add(self, later: Piece) -> None:
        """Append the piece that came after this one."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.prompt_logprobs += later.prompt_logprobs
        self.degraded = self.degraded or later.degraded
        self.finish = later.finish


def total(pieces: Sequence[Piece]) -> Piece:
    """The sum of pieces, in order."""
    answer = Piece()
    for piece in pieces:
        answer.add(piece)
    return answer


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidArgument(message)

"""How much one key may ask for: requests and tokens a minute, and requests at once.

Owns the counting. A minute's worth may come at once, then what flows back: a bucket that fills evenly. The prompt is charged
whole before the generation begins, completion tokens as they come; these may take the bucket below zero, and the next request
waits until that is paid back. Which requests count is the caller's (metered_routes).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from inference_gateway.domain.errors import RateLimited

MINUTE_SECONDS = 60.0
CALLS_RETRY_SECONDS = 1.0  # a generation of the same key ends within about that
REQUESTS, TOKENS, CALLS = "requests", "tokens", "calls"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key may ask for; None: as much as there is."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    calls_max: int | None = None


UNLIMITED = Allowance()


@dataclass(frozen=True, slots=True)
class Standing:
    """How one limit stands. `remaining` is never below 0; `reset_seconds`: until it is as if nothing had been asked for."""

    name: str
    limit: int
    remaining: int
    reset_seconds: float


class Bucket:
    """Holds up to a minute's worth, flows in evenly. `clock`: seconds that only go forward."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute, self._clock = per_minute, clock
        self._level, self._at_seconds = float(per_minute), clock()

    def wait_seconds(self, amount: float) -> float:
        """How long until `amount` is there; 0: it is. What exceeds a minute's worth waits for a full bucket."""
        missing = min(amount, self._per_minute) - self._now()
        return 0.0 if missing <= 0 else missing / self._per_minute * MINUTE_SECONDS

    def take(self, amount: float) -> None:
        """Take it, there or not; a negative amount is given back."""
        self._level = min(float(self._per_minute), self._now() - amount)

    def standing(self, name: str) -> Standing:
        """What is left."""
        level = self._now()
        reset = (self._per_minute - level) / self._per_minute * MINUTE_SECONDS
        return Standing(name, self._per_minute, max(0, math.floor(level)), reset)

    def resized(self, per_minute: int) -> Bucket:
        """A bucket of another size from which as much was taken."""
        other = Bucket(per_minute, self._clock)
        other.take(self._per_minute - self._now())
        return other

    def _now(self) -> float:
        now = self._clock()
        self._level = min(float(self._per_minute), self._level + (now - self._at_seconds) / MINUTE_SECONDS * self._per_minute)
        self._at_seconds = now
        return self._level


class KeyUse:
    """What the holder of one key has asked for lately. Lives as long as its key is in the file."""

    def __init__(self, allowance: Allowance, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._calls_max: int | None = None
        self._calls = 0
        self.allow(allowance)

    def allow(self, allowance: Allowance) -> None:
        """From now on allow this much; what was used before still counts."""
        self._requests = self._bucket(self._requests, allowance.requests_per_minute)
        self._tokens = self._bucket(self._tokens, allowance.tokens_per_minute)
        self._calls_max = allowance.calls_max

    def begin(self) -> None:
        """Begin a request; call `end` when it is over. Raises RateLimited, and has then taken nothing."""
        if self._calls_max is not None and self._calls >= self._calls_max:
            raise RateLimited(f"this key may have {self._calls_max} requests at once, and has", CALLS, CALLS_RETRY_SECONDS)
        if self._requests is not None:
            self._check(self._requests, REQUESTS, 1)
            self._requests.take(1)
        self._calls += 1

    def end(self) -> None:
        """A request that began is over."""
        self._calls -= 1

    def charge_prompt(self, tokens: int) -> None:
        """Charge the prompts of a request before they are computed. Raises RateLimited, and has then taken nothing."""
        if self._tokens is not None:
            self._check(self._tokens, TOKENS, tokens)
            self._tokens.take(tokens)

    def charge(self, tokens: int) -> None:
        """Charge tokens that came; a negative number gives a prompt back that was not computed."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def standings(self) -> tuple[Standing, ...]:
        """How the limits by minute stand, of those there are."""
        both = ((REQUESTS, self._requests), (TOKENS, self._tokens))
        return tuple(bucket.standing(name) for name, bucket in both if bucket is not None)

    def _check(self, bucket: Bucket, name: str, amount: int) -> None:
        wait = bucket.wait_seconds(amount)
        if wait > 0:
            limit = bucket.standing(name).limit
            asked = f", and this prompt has {amount}" if name == TOKENS else ""
            raise RateLimited(f"this key may use {limit} {name} a minute{asked}; try again in {math.ceil(wait)} s", name, wait)

    def _bucket(self, before: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        return Bucket(per_minute, self._clock) if before is None else before.resized(per_minute)

"""The memories of one engine, in the process that runs its model: opened at first use, closed when out of use.

Owns openings, the bound on open versions and who uses them. Nothing is opened, and no channel made, before the first request asks:
vLLM has started its processes long before that. Does not choose versions (the scheduler) or run steps (`step`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from treadle.client.engram import EngramHandle, EngramPool
from treadle.contract import EngramModel
from treadle.contract.errors import DeadlineExceeded, InvalidArgument, ResourceExhausted, TreadleError, Unavailable
from treadle.nn.fusion import EngramFusion
from treadle.nn.memory_fit import check_fits, fusion_of, is_fused
from treadle.nn.token_map import compressed_token_map, token_map_digest
from treadle.vllm.config import KEY, Choice, MemoryConfig
from treadle.vllm.outcomes import MemoryFigures, UsedMemory

log = logging.getLogger("treadle.vllm")
OPENINGS_MAX = 2  # at once: one that hangs leaves room for another
SUPERSEDED_SECONDS = 10.0  # without a request, until a version whose name was opened again is closed
RETRY_SECONDS = 0.25  # that a step waits for an opening while the pool is known not to answer: the batch stands still meanwhile
FAILURE_LOG_SECONDS = 60.0  # lookups fail at every step of a pool that is gone: one line a minute says so


@dataclass(frozen=True, slots=True)
class LanguageModel:
    """What memories must fit. token_map_of: digest of its tokenizer's map, made when the first memory asks."""

    layers: int
    vocab: int
    hidden: int
    tokenizer_json: Callable[[], Path]


class Memory:
    """One open version. requests: that use it now; tokens: looked up since it was opened; holds: of those who had it opened ahead and
    have not let go of it, None where its first request opened it."""

    def __init__(self, handle: EngramHandle, fusion: EngramFusion, *, fused: bool) -> None:
        self.handle, self.fusion, self.fused = handle, fusion, fused
        self.model: EngramModel = handle.model
        self.used = UsedMemory(handle.model.name, handle.version, str(handle.transport), not fused)
        self.requests = self.tokens = 0
        self.holds: int | None = None
        self.idle_since = time.monotonic()
        self._failure_logged: float | None = None

    @property
    def figures(self) -> MemoryFigures:
        """For whoever asks."""
        used = self.used
        return MemoryFigures(used.name, used.version, used.transport, self.fused, self.requests, self.tokens)

    def rows_failed(self, cause: TreadleError) -> None:
        """A lookup ended with an error; the log hears of it at most once in FAILURE_LOG_SECONDS."""
        now = time.monotonic()
        if self._failure_logged is not None and now - self._failure_logged < FAILURE_LOG_SECONDS:
            return
        self._failure_logged = now
        log.warning("engram rows of %s cannot be had, answers are made without them: %s", self.used.name, cause)


@dataclass(slots=True, eq=False)
class _Opening:
    """One under way, or over and not asked for again yet. given_up: a step waited as long as it may; no later one waits too.
    over_since: when it was seen to be over."""

    future: Future[Memory]
    given_up: bool = False
    over_since: float | None = None


class Memories:
    """The open versions of one engine. One thread, that of the model; openings run beside it."""

    def __init__(self, config: MemoryConfig, language_model: LanguageModel, device: torch.device) -> None:
        self._config, self._language_model, self._device = config, language_model, device
        self._open: dict[Choice, Memory] = {}  # by name and version; the last opened last
        self._openings: dict[Choice, _Opening] = {}  # by what was asked for
        self._pool_is_silent = False  # as the last opening found it; its thread writes it
        self._openers: ThreadPoolExecutor | None = None
        self._token_map = ""

    @property
    def figures(self) -> tuple[MemoryFigures, ...]:
        """Of each open version."""
        return tuple(memory.figures for memory in self._open.values())

    def take(self, choice: Choice, until: float | None = None) -> Memory:
        """The memory that a request uses from now on; to be given back with `release`.

        until: of the monotonic clock, how long all requests of a step may wait together; None: for open_seconds_max from now on

        Waits while it is being opened. Raises DeadlineExceeded at `until`, earlier where the pool was silent when it was last asked, at
        once where a step has given this opening up; ResourceExhausted where memories_max are in use, and what the opening did: NotFound,
        FingerprintMismatch naming the field, DataLoss, Unavailable, InvalidArgument.
        """
        memory = self._open.get(choice)
        if memory is None:
            opening, now = self._openings.get(choice) or self._begin(choice), time.monotonic()
            left = (now + self._config.open_seconds_max if until is None else until) - now
            left = 0.0 if opening.given_up else max(0.0, min(left, RETRY_SECONDS) if self._pool_is_silent else left)
            try:
                opening.future.exception(left)
            except TimeoutError as error:
                opening.given_up = True
                raise DeadlineExceeded(
                    f"engram memory {choice}: still being opened, no step waits any longer; try again"
                ) from error
            memory = self._adopt(choice)
        memory.requests += 1
        return memory

    def release(self, memory: Memory) -> None:
        """A request is over."""
        memory.requests -= 1
        memory.idle_since = time.monotonic()

    def open_ahead(self, choice: Choice) -> str:
        """Begin to open a version that requests will choose: `open`, `opening`, or why it cannot be had. Returns at once.

        Each `open` is a hold: the version stays so, used or not, until as many `let_go`; only a lack of places closes it earlier.
        """
        memory = self._open.get(choice)
        try:
            if memory is None:
                opening = self._openings.get(choice) or self._begin(choice)
                if not opening.future.done():
                    return "opening"
                memory = self._adopt(choice)
        except TreadleError as error:
            return f"{type(error).__name__}: {error}"
        if choice.version:
            memory.holds = (memory.holds or 0) + 1
        return "open"

    def let_go(self, choice: Choice) -> None:
        """One who had a version opened ahead needs it no more: without holds it is closed when no request uses it."""
        memory = self._open.get(choice)
        if memory is not None and memory.holds:
            memory.holds -= 1

    def tidy(self) -> None:
        """Close versions that no request uses and that were let go, or, where nobody opened them ahead, while a newer one of their
        name is open. Between steps: no lookup may be running."""
        newest = {choice.name: choice for choice in self._open}
        long_ago = time.monotonic() - SUPERSEDED_SECONDS
        for choice, memory in list(self._open.items()):
            superseded = newest[choice.name] != choice and memory.idle_since < long_ago
            if not memory.requests and (superseded if memory.holds is None else memory.holds == 0):
                self._shut(choice)
        self._collect(long_ago)

    def close(self) -> None:
        """Close all. No lookup may be running; openings still under way close what they open."""
        openings, self._openings = self._openings, {}
        for opening in openings.values():
            opening.future.add_done_callback(_close_opened)
        for choice in list(self._open):
            self._shut(choice)
        if self._openers is not None:
            self._openers.shutdown(wait=False)
            self._openers = None

    def _begin(self, choice: Choice) -> _Opening:
        """Have a version opened; what is idle stays until this is there. Raises ResourceExhausted where every place is in use."""
        if not self._config.engram_pool:
            raise InvalidArgument(f"engram memory {choice}: this engine has no pool; give additional_config.{KEY}.engram_pool")
        if len(self._open) + len(self._openings) >= self._config.memories_max:
            self._collect()
        in_use = sum(1 for memory in self._open.values() if memory.requests)
        if in_use + len(self._openings) >= self._config.memories_max:
            raise self._exhausted()
        if self._openers is None:
            self._openers = ThreadPoolExecutor(OPENINGS_MAX, thread_name_prefix="treadle-memory-open")
        opening = self._openings[choice] = _Opening(self._openers.submit(self._opened, choice))
        return opening

    def _collect(self, before: float = math.inf) -> None:
        """Take in openings that are over, were seen so `before` then, and nobody asked for again: open and idle, or forgotten."""
        now = time.monotonic()
        for choice, opening in list(self._openings.items()):
            if not opening.future.done():
                continue
            opening.over_since = now if opening.over_since is None else opening.over_since
            if opening.over_since <= before:
                with suppress(TreadleError):  # the log has it
                    self._adopt(choice)

    def _adopt(self, asked: Choice) -> Memory:
        """The memory of an opening that is done, kept under its version; the longest idle makes room. Raises what the opening did,
        ResourceExhausted where every place has come into use meanwhile."""
        opened = self._openings.pop(asked).future.result()
        choice = Choice(opened.used.name, opened.used.version)
        known = self._open.get(choice)
        if known is not None:  # asked for without a version, and open already
            opened.handle.close()
            return known
        try:
            self._make_room()
        except ResourceExhausted:
            opened.handle.close()
            raise
        self._open[choice] = opened
        return opened

    def _make_room(self) -> None:
        """Close idle versions, held ones last, until there is a place. Raises ResourceExhausted where every one is in use."""
        while len(self._open) >= self._config.memories_max:
            idle = [(bool(one.holds), one.idle_since, known) for known, one in self._open.items() if not one.requests]
            if not idle:
                raise self._exhausted()
            self._shut(min(idle, key=lambda one: one[:2])[2])

    def _exhausted(self) -> ResourceExhausted:
        limit = self._config.memories_max
        return ResourceExhausted(f"{limit} memories are in use, the limit is {KEY}.memories_max; try again when a request is over")

    def _shut(self, choice: Choice) -> None:
        memory = self._open.pop(choice)
        memory.handle.close()
        log.info("engram memory %s closed", choice)

    def _opened(self, choice: Choice) -> Memory:
        """Open a version; on a thread beside the model. Raises a TreadleError, whatever happens."""
        began = time.monotonic()
        try:
            with EngramPool(self._config.endpoint) as pool:
                handle = pool.open(choice.name, choice.version or None, transport=self._config.transport)
                try:
                    memory = self._memory_of(pool, handle)
                except BaseException:
                    handle.close()
                    raise
        except TreadleError as error:
            waited = time.monotonic() - began > RETRY_SECONDS
            self._pool_is_silent = waited and isinstance(error, Unavailable | DeadlineExceeded)
            log.warning("engram memory %s not opened: %s", choice, error)
            raise
        except Exception as error:
            log.exception("engram memory %s could not be opened", choice)
            raise Unavailable(
                f"engram memory {choice} could not be opened ({type(error).__name__}); the engine's log has more"
            ) from error
        self._pool_is_silent = False
        used, seconds = memory.used, time.monotonic() - began
        log.info(
            "engram memory %s@%s opened in %.2f s, %s, fused: %s", used.name, used.version, seconds, used.transport, memory.fused
        )
        return memory

    def _memory_of(self, pool: EngramPool, handle: EngramHandle) -> Memory:
        model, language_model = handle.model, self._language_model
        check_fits(model, language_model.layers, language_model.vocab, self._own_token_map)
        file = self._config.fusion_weights.get(model.name)
        weights: Path | bytes | None = Path(file) if file else None
        if weights is None and model.fusion is not None and model.fusion.weights is not None:
            weights = pool.read_fusion(model.name, handle.version)
        fusion = fusion_of(model, language_model.hidden, weights)
        if self._device.type == "cpu":
            fusion.pack(keep=False)  # here, so that the first step with it does not wait
        else:
            fusion.to(self._device)
        return Memory(handle, fusion, fused=is_fused(model, self._config.mode))

    def _own_token_map(self) -> str:
        if not self._token_map:
            self._token_map = token_map_digest(compressed_token_map(self._language_model.tokenizer_json())[0])
        return self._token_map


def _close_opened(opening: Future[Memory]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().handle.close()

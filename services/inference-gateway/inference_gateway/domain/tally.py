"""Counts a generation while it passes by: when its tokens came, how many there were, whether memory was missing, whose they are."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager

from inference_gateway.domain.api_keys import Caller
from inference_gateway.domain.errors import RateLimited
from inference_gateway.domain.generation import MemoryReport, Piece, Usage
from inference_gateway.domain.ports import Figures
from treadle.contract.errors import InvalidArgument, NotFound, ResourceExhausted, Unavailable

NOT_COMPUTED = (InvalidArgument, NotFound, ResourceExhausted, Unavailable)  # refused, or the worker is gone with what it had
MISSING_UNKNOWN = MemoryReport("engram", "", "", "", 0, 0, 0, False)  # of a worker that says that it missed one, and not which


def missing_of(piece: Piece) -> list[MemoryReport]:
    """The memories that an answer missed, by its last piece."""
    return [report for report in piece.memory if report.rows_missing or report.missing_because]


async def tallied(
    pieces: AsyncGenerator[Piece, None], figures: Figures, *, prompt_tokens: int, begun_seconds: float
) -> AsyncGenerator[Piece, None]:
    """The same pieces, counted. `begun_seconds`: time.monotonic() when the request came.

    A generation that ends early is counted with the tokens that came.
    """
    usage: Usage | None = None
    last_seconds, tokens = begun_seconds, 0
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                now_seconds = time.monotonic()
                count = len(piece.token_ids)
                if count and not tokens:
                    figures.first_token(now_seconds - begun_seconds)
                elif count:
                    figures.tokens_came(count, now_seconds - last_seconds)
                if count:
                    last_seconds, tokens = now_seconds, tokens + count
                usage = piece.usage or usage
                if piece.finish_reason is not None and piece.degraded:
                    for report in missing_of(piece) or [MISSING_UNKNOWN]:
                        figures.answer_degraded(report.name, report.missing_because)
                yield piece
    finally:
        figures.tokens_used(usage or Usage(prompt_tokens, 0, tokens))


@contextmanager
def metered(caller: Caller, figures: Figures) -> Iterator[None]:
    """Runs the body as one request of the caller's key. Raises RateLimited before it."""
    if caller.use is None:
        yield
        return
    try:
        caller.use.begin()
    except RateLimited as error:
        figures.request_limited(error.limit, caller.tenant_name)
        raise
    try:
        yield
    finally:
        caller.use.end()


@contextmanager
def prompt_charged(caller: Caller, figures: Figures, tokens: int) -> Iterator[None]:
    """Charges the prompts of a request, `tokens` together, before the body, which computes them.

    Raises RateLimited before it. They are given back where the body's error says that nobody computed them, and only then: who
    leaves has had them computed.
    """
    use = caller.use
    try:
        if use is not None:
            use.charge_prompt(tokens)
    except RateLimited as error:
        figures.request_limited(error.limit, caller.tenant_name)
        raise
    computed = True
    try:
        yield
    except NOT_COMPUTED:
        computed = False
        raise
    finally:
        if computed:
            figures.tenant_tokens(caller.tenant_name, "prompt", tokens)
        elif use is not None:
            use.charge(-tokens)


async def charged(
    pieces: AsyncGenerator[Piece, None], caller: Caller, figures: Figures, *, prompt_tokens: int
) -> AsyncGenerator[Piece, None]:
    """The same pieces, charged to the caller's key: all prompts before the first is asked for, tokens as they come.

    Raises RateLimited before anything is asked for.
    """
    async with aclosing(pieces):
        with prompt_charged(caller, figures, prompt_tokens):
            piece = await anext(pieces, None)
        while piece is not None:
            if piece.token_ids:
                figures.tenant_tokens(caller.tenant_name, "completion", len(piece.token_ids))
                if caller.use is not None:
                    caller.use.charge(len(piece.token_ids))
            yield piece
            piece = await anext(pieces, None)

"""Counts a generation while it passes by: when its tokens came, how many there were, whether memory was missing."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from inference_gateway.domain.generation import Piece, Usage
from inference_gateway.domain.ports import Figures


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
                    figures.answer_degraded()
                yield piece
    finally:
        figures.tokens_used(usage or Usage(prompt_tokens, 0, tokens))

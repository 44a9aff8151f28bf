"""Several generations as one: their pieces as they come, each with the number of its choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from inference_gateway.domain.generation import FinishReason, MemoryReport, Piece, Usage

Pieces = AsyncGenerator[Piece, None]


async def interleaved(parts: Sequence[Pieces]) -> Pieces:
    """The pieces of all parts; part i's have the choice i. An error of one ends them all, and so does closing this.

    A reader that is slow holds every part back: one piece of each waits at most, whoever else is quicker.
    """
    came: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue()  # one item of each part at most
    free = [asyncio.Semaphore(1) for _ in parts]
    tasks = [asyncio.create_task(_run(came, free[choice], choice, pieces)) for choice, pieces in enumerate(parts)]
    open_parts = len(parts)
    try:
        while open_parts:
            choice, item = await came.get()
            free[choice].release()
            if isinstance(item, Exception):
                raise item
            if item is None:
                open_parts -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for pieces in parts:
            await pieces.aclose()  # of a part whose task had not begun


async def _run(
    came: asyncio.Queue[tuple[int, Piece | Exception | None]], free: asyncio.Semaphore, choice: int, pieces: Pieces
) -> None:
    end: Exception | None = None
    try:
        async with aclosing(pieces):
            async for piece in pieces:
                await free.acquire()
                came.put_nowait((choice, replace(piece, choice=choice)))
    except Exception as error:
        end = error
    await free.acquire()
    came.put_nowait((choice, end))


async def once(let_in: asyncio.Event, pieces: Pieces) -> Pieces:
    """The same pieces, asked for once `let_in` is set."""
    async with aclosing(pieces):
        await let_in.wait()
        async for piece in pieces:
            yield piece


async def without_prompt(pieces: Pieces) -> Pieces:
    """The same pieces, their usage without the prompt: another choice of the same prompt counts it."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece if piece.usage is None else replace(piece, usage=Usage(0, 0, piece.usage.completion_tokens))


class Ends:
    """What the choices of one request come to together."""

    def __init__(self, prompt_tokens: Sequence[int]) -> None:
        """prompt_tokens: for each choice, 0 where another one counts its prompt."""
        self.prompt_tokens = prompt_tokens
        self._tokens = [0] * len(prompt_tokens)
        self._last: dict[int, Piece] = {}
        self._memory: dict[tuple[str, str, str, str], MemoryReport] = {}
        self.degraded = False

    @property
    def choices(self) -> int:
        """How many there are."""
        return len(self._tokens)

    @property
    def complete(self) -> bool:
        """Whether every choice has ended."""
        return len(self._last) == len(self._tokens)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the choices that have ended did, in their order."""
        return tuple(piece.finish_reason.value for _, piece in sorted(self._last.items()) if piece.finish_reason is not None)

    @property
    def usage(self) -> Usage:
        """Tokens of all choices that have ended, each prompt once."""
        used = [piece.usage or Usage(0, 0, 0) for piece in self._last.values()]
        return Usage(
            sum(each.prompt_tokens for each in used),
            sum(each.cached_tokens for each in used),
            sum(each.completion_tokens for each in used),
        )

    @property
    def memory(self) -> tuple[MemoryReport, ...]:
        """What memory did for all choices, one report for each memory, version and transport."""
        return tuple(self._memory.values())

    def saw(self, piece: Piece) -> None:
        """Count a piece."""
        self._tokens[piece.choice] += len(piece.token_ids)
        if piece.degraded:
            self.degraded = True
        if piece.finish_reason is not None:
            self._last[piece.choice] = piece
            for report in piece.memory:
                key = (report.kind, report.name, report.version, report.transport)
                self._memory[key] = _sum(self._memory[key], report) if key in self._memory else report

    def cut(self) -> list[Piece]:
        """The last pieces of choices that were cut off, as far as they had come."""
        return [
            Piece(finish_reason=FinishReason.ABORT, usage=Usage(prompt, 0, count), choice=choice)
            for choice, (prompt, count) in enumerate(zip(self.prompt_tokens, self._tokens, strict=True))
            if choice not in self._last
        ]


def _sum(one: MemoryReport, other: MemoryReport) -> MemoryReport:
    return replace(
        one,
        tickets=one.tickets + other.tickets,
        tickets_in_time=one.tickets_in_time + other.tickets_in_time,
        rows_missing=one.rows_missing + other.rows_missing,
        missing_because=one.missing_because or other.missing_because,
        lookups=one.lookups + other.lookups,
        lookups_outside=one.lookups_outside + other.lookups_outside,
        fell_back=one.fell_back or other.fell_back,
    )

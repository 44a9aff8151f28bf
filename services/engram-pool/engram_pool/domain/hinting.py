"""Tokens told before their lookups: their rows are hashed and brought near, piece by piece, while nothing with a deadline waits.

Owns the backlog of hints and who is next in it. Does not read rows (Nearness), keep what was read (caches, pages) or promise
that it stays. What a hint costs is taken off nobody's quota: it hands nothing out and runs in time that is left over.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.compute import Compute
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters, Nearness
from treadle.contract import InvalidArgument, TreadleError, Windows
from treadle.kernels import row_ids
from treadle.kernels.held import which_held

log = logging.getLogger("engram_pool")
HINT_TOKENS_MAX = 1 << 16  # of one hint: the longest prompts
PIECE_TOKENS = 64  # hashed and brought near at a time: a thousand rows of each layer
PIECE_SECONDS_MAX = 1.0  # a piece that does not come to its turn by then ends its hint: there is no idle time
HINT_SECONDS_MAX = 10.0  # a hint is dropped after: its lookups have come by themselves


@dataclass(slots=True)
class _Hint:
    resident: Resident
    tokens: NDArray[np.int64]
    told_at_seconds: float
    done: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


@dataclass(slots=True)
class _Backlog:
    hints: deque[_Hint] = field(default_factory=deque)
    tokens: int = 0  # that are left of them


class Hinting:
    """Hints of a pool. Call it on the event loop; `run_forever` works on them.

    tokens_max: that wait, of all tenants together; each of `tenants` has its even part of them
    """

    def __init__(self, pool: Pool, compute: Compute, nearness: Nearness, meters: Meters, *, tokens_max: int, tenants: int) -> None:
        self._pool, self._compute, self._nearness, self._meters = pool, compute, nearness, meters
        self._tenant_tokens_max = tokens_max // max(1, tenants)
        self._backlogs: dict[int, _Backlog] = {}  # by tenant, the next first; none is empty
        self._told = asyncio.Event()

    def hint(self, model: str, version: str, tokens: NDArray[np.int64], tenant: int) -> int:
        """Take the tokens [T] of a sequence from its beginning; returns at once with how many of the first ones are taken.

        0 where rows are as near as they come, or as much as may waits already. Raises NotFound, DataLoss, InvalidArgument for
        ids that the model does not know, Unavailable once the pool stops.
        """
        self._pool.changes.refuse_if_draining()
        resident = self._pool.find_readable(model, version)
        if len(tokens) > HINT_TOKENS_MAX:
            raise InvalidArgument(f"token_ids: at most {HINT_TOKENS_MAX} in one hint, got {len(tokens)}")
        with resident.in_use():
            _check_known(resident, tokens)
        if not self._nearness.brings_nearer(resident.stored, resident.warm_state):
            self._meters.hinted("near", len(tokens))
            return 0
        waiting = self._backlogs[tenant].tokens if tenant in self._backlogs else 0
        taken = min(len(tokens), self._tenant_tokens_max - waiting)
        self._meters.hinted("full", len(tokens) - taken)
        if taken:
            backlog = self._backlogs.setdefault(tenant, _Backlog())
            backlog.hints.append(_Hint(resident, tokens[:taken], time.monotonic()))
            backlog.tokens += taken
            self._told.set()
        return taken

    async def run_forever(self) -> None:
        """Work on hints: a piece of each tenant's first hint, in turn."""
        while True:
            while not self._backlogs:
                self._told.clear()
                await self._told.wait()
            tenant, backlog = next(iter(self._backlogs.items()))
            backlog.tokens -= await self._work_on(backlog.hints[0])
            if not backlog.hints[0].left:
                backlog.hints.popleft()
            del self._backlogs[tenant]
            if backlog.hints:
                self._backlogs[tenant] = backlog  # behind the others

    async def _work_on(self, hint: _Hint) -> int:
        """Bring the next PIECE_TOKENS of a hint near, or drop what is left of it; how many tokens less are left."""
        count, outcome = min(PIECE_TOKENS, hint.left), "late"
        if time.monotonic() - hint.told_at_seconds < HINT_SECONDS_MAX:
            try:
                with self._pool.at_work(), hint.resident.in_use():
                    hint.resident.check_intact()
                    outcome = "brought" if await self._bring(hint, hint.done + count) else "late"
            except TreadleError as error:  # removed, damaged, draining: the lookup itself will say so
                log.debug("a hint ends", extra={"model": hint.resident.name, "reason": str(error)})
                outcome = "failed"
            except Exception:  # our bug must not end all hints
                log.exception("a hint failed", extra={"model": hint.resident.name})
                outcome = "failed"
        if outcome != "brought":
            count = hint.left
        self._meters.hinted(outcome, count)
        hint.done += count
        return count

    async def _bring(self, hint: _Hint, last: int) -> bool:
        resident, depth = hint.resident, hint.resident.model.order_max - 1
        before = min(depth, hint.done)
        windows = Windows.of_sequences([(hint.tokens[hint.done - before : last].tolist(), before)], depth)
        for layer in resident.model.layers:
            rows = await self._compute.run(_rows_here, resident, layer, windows)
            if not rows.size:
                continue
            nearing = self._nearness.bring_near(resident.stored, layer, rows)
            if nearing is None:
                return False
            try:
                if not await nearing.arrived(PIECE_SECONDS_MAX):
                    return False
            finally:
                await self._compute.run(nearing.end)
        return True


def _check_known(resident: Resident, tokens: NDArray[np.int64]) -> None:
    limit = resident.plan(resident.model.layers[0]).token_limit
    if tokens.size and int(tokens.max()) >= limit:
        raise InvalidArgument(f"token_ids: {int(tokens.max())} is not below {limit}, the number of ids that {resident.name} knows")


def _rows_here(resident: Resident, layer: int, windows: Windows) -> NDArray[np.int64]:
    """Ids [n] of the rows of these windows that are held here."""
    rows, held = row_ids(resident.plan(layer), windows).reshape(-1), resident.stored.segments[layer].held
    return rows if held is None else np.ascontiguousarray(rows[which_held(rows, held)])

"""Rows by id and rows by tokens, handed out in pieces: the compatible door of those who cannot map.

All ids are checked before any row is read; the deadline is checked before each piece; calls at once are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.held_rows import check_held
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters
from engram_pool.domain.storing import Rows
from engram_pool.domain.tenancy import Bandwidth, Tenants
from treadle.contract import (
    DataLoss,
    Deadline,
    DeadlineExceeded,
    EngramModel,
    InvalidArgument,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
    Windows,
)
from treadle.kernels import gather_rows, row_ids

PIECE_BYTES = (1 << 20) - 1024  # a message with its framing stays below 1 MiB
GATHER_ROWS_MAX = (1 << 20) // 8  # ids in one Gather: 1 MiB of them
LOOKUP_ROWS_MAX = 1 << 22  # rows of one layer in one Lookup: 32 MiB of ids
_RETRY_AFTER_SECONDS = 0.05  # a call takes milliseconds

_OUTCOMES: tuple[tuple[type[Exception], str], ...] = (  # label values of the metric; the first that fits
    (RowOutOfRange, "out_of_range"), (DeadlineExceeded, "late"), (ResourceExhausted, "refused"), (Unavailable, "refused"),
    (DataLoss, "corrupt"), (TreadleError, "invalid"),
)  # fmt: skip


class Gathering:
    """Gather and Lookup over the versions of a pool; at most `calls_max` at once."""

    def __init__(
        self, pool: Pool, compute: Compute, meters: Meters, *, calls_max: int, tenants: Tenants, bandwidth: Bandwidth
    ) -> None:
        self._pool, self._compute, self._meters = pool, compute, meters
        self._tenants, self._bandwidth = tenants, bandwidth
        self._calls = Turnstile("gather", "gathers", calls_max, _RETRY_AFTER_SECONDS)

    @property
    def busy(self) -> bool:
        """True while a call is in progress."""
        return self._calls.inside > 0

    async def gather(
        self, model: str, version: str, layer: int, ids: NDArray[np.int64], deadline: Deadline, tenant: int
    ) -> AsyncGenerator[bytes, None]:
        """Rows `ids` [n] of one layer, whole rows in order, at most PIECE_BYTES at a time. tenant: off whose quotas they are taken

        Raises RowOutOfRange before anything is read, NotFound, InvalidArgument, DeadlineExceeded, ResourceExhausted, DataLoss.
        """
        with self._call(deadline, tenant) as count:
            if ids.shape[0] > GATHER_ROWS_MAX:
                raise InvalidArgument(f"rows: at most {GATHER_ROWS_MAX} ids in one call, got {ids.shape[0]}")
            resident = self._pool.find_readable(model, version)
            with resident.in_use():
                table = _table(resident, layer)
                await self._compute.run(_check_ids, resident, layer, ids)
                count.admit(ids.shape[0], table.shape[1])
                async with aclosing(self._pieces(resident, table, ids, deadline)) as pieces:
                    async for piece in pieces:
                        yield piece
                count.rows += ids.shape[0]

    async def lookup(
        self, model: str, version: str, layers: Sequence[int], windows: Windows, deadline: Deadline, tenant: int
    ) -> AsyncGenerator[tuple[int, bytes], None]:
        """Rows of every token, hashed here: (layer, piece) layer after layer; no `layers` means all. Errors as in `gather`."""
        with self._call(deadline, tenant) as count:
            resident = self._pool.find_readable(model, version)
            with resident.in_use():
                wanted = tuple(layers) or resident.model.layers
                _check_lookup(resident.model, wanted, windows)
                count.admit(windows.token_count * resident.model.columns * len(wanted), resident.model.row.bytes)
                for layer in wanted:
                    table = _table(resident, layer)
                    deadline.check(before=f"hashing for layer {layer}")
                    ids = await self._compute.run(_hash, resident, layer, windows)
                    await self._compute.run(check_held, ids, resident.stored.segments[layer].held, layer)
                    async with aclosing(self._pieces(resident, table, ids, deadline)) as pieces:
                        async for piece in pieces:
                            yield layer, piece
                    count.rows += ids.shape[0]

    async def _pieces(
        self, resident: Resident, table: Rows, ids: NDArray[np.int64], deadline: Deadline
    ) -> AsyncGenerator[bytes, None]:
        step = max(1, PIECE_BYTES // table.shape[1])
        for first in range(0, ids.shape[0], step):
            resident.check_intact()
            deadline.check(before=f"row {first} of {ids.shape[0]}")
            wait_seconds = self._bandwidth.pace_seconds(min(step, ids.shape[0] - first) * table.shape[1])
            if wait_seconds > 0:  # a reserve stands
                await asyncio.sleep(min(wait_seconds, deadline.remaining_seconds()))
                deadline.check(before=f"row {first} of {ids.shape[0]}, paced to a bandwidth reserve")
            yield await self._compute.run(_rows, table, ids[first : first + step])

    @contextmanager
    def _call(self, deadline: Deadline, tenant: int) -> Iterator[_Count]:
        count, begun, outcome = _Count(self._tenants, tenant), time.monotonic(), "cancelled"
        try:
            with self._pool.at_work(), self._calls.turn():
                yield count
            outcome = "ok"
        except Exception as error:
            outcome = _outcome(error)
            raise
        finally:
            if outcome == "cancelled" and not deadline.remaining_seconds():  # its caller has stopped reading
                outcome = "late"
            self._meters.gather_ended(outcome, count.rows, time.monotonic() - begun)
            slack_seconds = deadline.slack_of(time.monotonic_ns()) if outcome in ("ok", "late") else None
            count.end(slack_seconds)


class _Count:
    """Rows handed out by one call, and off whose quotas."""

    def __init__(self, tenants: Tenants, tenant: int) -> None:
        self._tenants, self._tenant = tenants, tenant
        self._row_bytes = self.rows = 0

    def admit(self, rows: int, row_bytes: int) -> None:
        """Take the call off the quotas. Raises ResourceExhausted."""
        self._tenants.take(self._tenant, rows, row_bytes)
        self._row_bytes = row_bytes

    def end(self, slack_seconds: float | None) -> None:
        """Count what was handed out; nothing for a call that was not admitted."""
        if self._row_bytes:
            self._tenants.served(self._tenant, self.rows, self._row_bytes, slack_seconds)


def check_ids(ids: NDArray[np.int64], row_count: int) -> None:
    """Raise RowOutOfRange naming the first of `ids` outside 0..row_count-1."""
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= row_count):
        place = int(np.argmax((ids < 0) | (ids >= row_count)))
        raise RowOutOfRange(f"rows[{place}] is {int(ids[place])}; the table has rows 0 to {row_count - 1}")


def _check_ids(resident: Resident, layer: int, ids: NDArray[np.int64]) -> None:
    segment = resident.stored.segments[layer]
    check_ids(ids, segment.row_count)
    check_held(ids, segment.held, layer)


def _table(resident: Resident, layer: int) -> Rows:
    resident.model.layer_position(layer)  # raises InvalidArgument, naming the layers there are
    return resident.stored.segments[layer].rows


def _check_lookup(model: EngramModel, layers: Sequence[int], windows: Windows) -> None:
    if len(set(layers)) != len(layers):
        raise InvalidArgument(f"layers: each one once, got {list(layers)[:16]}")
    for layer in layers:
        model.layer_position(layer)
    if windows.token_count * model.columns > LOOKUP_ROWS_MAX:
        most = LOOKUP_ROWS_MAX // model.columns
        raise InvalidArgument(f"tokens: at most {most} in one call for {model.columns} rows a token, got {windows.token_count}")


def _hash(resident: Resident, layer: int, windows: Windows) -> NDArray[np.int64]:
    return row_ids(resident.plan(layer), windows).reshape(-1)


def _rows(table: Rows, ids: NDArray[np.int64]) -> bytes:
    out = np.empty((ids.shape[0], table.shape[1]), dtype=np.uint8)
    gather_rows(table, ids, out)
    return out.tobytes()


def _outcome(error: Exception) -> str:
    return next((name for kind, name in _OUTCOMES if isinstance(error, kind)), "failed")

"""A handle on one version of an Engram model: lookup, gather, prefetch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram.hints import TakesHints
from treadle.client.engram.sources import FakeSource, HasBuffers, RowSource, TableSource
from treadle.client.engram.spread import Replica, SpreadSource
from treadle.client.engram.ticket import LookupTicket, Rows
from treadle.contract import Deadline, EngramModel, InvalidArgument, Transport, Unavailable, Windows
from treadle.contract.warm_state import WarmState
from treadle.dataplane import DeadlineQueue
from treadle.kernels import HashPlan

_INT64, _UINT8 = np.dtype(np.int64), np.dtype(np.uint8)  # np.int64 itself would be turned into one at each comparison


class EngramHandle:
    """Pinned to one version for its whole life; a new version needs a new handle. Close it, or use as a context manager.

    Thread-safe but for `close`. Mapped and local handles go on working while the pool is down.
    """

    def __init__(self, model: EngramModel, version: str, source: RowSource, card: Mapping[str, Any] | None = None) -> None:
        """card: what a grown memory says of its origin and effect, JSON values; None where there is none"""
        self.model, self.version, self.card, self._source = model, version, card, source

    @property
    def transport(self) -> Transport:
        """How its rows come."""
        return self._source.transport

    @property
    def warm_state(self) -> WarmState:
        """Whether a row's first gather meets a page fault in this process; UNKNOWN where its tables are elsewhere."""
        return self._source.warm_state if isinstance(self._source, TableSource) else WarmState.UNKNOWN

    @property
    def replicas(self) -> list[Replica]:
        """The owners that are asked, where there are several: whether each is reachable and held, and its share of the rows."""
        return self._source.replicas if isinstance(self._source, SpreadSource) else []

    @property
    def layers(self) -> tuple[int, ...]:
        """0-based decoder layers that have a table."""
        return self.model.layers

    def tables(self) -> dict[int, tuple[HashPlan, Rows]]:
        """By layer, how its tokens become rows, and the rows, u8 [N, row_bytes]: for those who gather in this process by other means.

        The handle's memory, until it is closed. Raises Unavailable by transports whose rows lie elsewhere.
        """
        if not isinstance(self._source, TableSource):
            raise Unavailable(f"by {self.transport} no row lies in this process; open the model by mapped or local")
        return self._source.tables

    def rows_buffer(self, token_count: int) -> Rows:
        """A new `out` for one layer: u8 [token_count, C, row_bytes], the caller's."""
        return np.empty((token_count, self.model.columns, self.model.row.bytes), dtype=np.uint8)

    def buffer(self, shape: tuple[int, ...]) -> Rows:
        """An `out` that rows of this handle reach without a copy: u8, the caller's, given back with the last array over it.

        By ring it lies in memory that is shared with the pool, so let go of it soon; by other transports it is ordinary memory.
        Raises ResourceExhausted when the ring's memory is taken.
        """
        return self._source.buffer(shape) if isinstance(self._source, HasBuffers) else np.empty(shape, dtype=np.uint8)

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows | None = None) -> Rows:
        """Rows of `layer` by id, head offsets added.

        rows: [T, C] int64; out: u8 [T, C, row_bytes], the caller's, overwritten; made if None
        Raises RowOutOfRange naming the first bad id (`out` is then untouched), InvalidArgument for shapes and layers.
        """
        self.model.layer_position(layer)
        if rows.dtype != _INT64 or rows.ndim != 2:
            raise InvalidArgument(f"rows: int64 [T, C] expected, got {rows.dtype} {list(rows.shape)}")
        shape = (*rows.shape, self.model.row.bytes)
        target = np.empty(shape, dtype=_UINT8) if out is None else _check_out(out, shape)
        self._source.gather(layer, rows, target)
        return target

    def lookup(
        self, windows: Windows, out: Mapping[int, Rows] | None = None, layers: Sequence[int] | None = None
    ) -> dict[int, Rows]:
        """Rows by tokens, now, for `layers` (None: all). out: by layer, u8 [T, C, row_bytes], overwritten; made if None."""
        wanted = tuple(self.layers if layers is None else layers)
        outs = self._outs(wanted, windows, out)
        self._source.lookup(wanted, windows, outs)
        return outs

    @property
    def wants_hints(self) -> bool:
        """False where `hint` does nothing: rows are as near as they come, or the transport cannot bring them nearer."""
        return isinstance(self._source, TakesHints) and self._source.wants_hints

    def hint(self, windows: Windows, queue: DeadlineQueue | None = None) -> int:
        """Say which tokens will be looked up later, as soon as they are known; returns at once.

        queue: as in `prefetch`
        Rows are brought nearer while nothing with a deadline waits: from a disk, or into pages that are not entered yet. Returns how many
        of the first tokens are taken: 0 where no row can be brought nearer, fewer than all where as many hints as fit are queued.
        """
        self._outs((), windows, None)
        return self._source.hint(windows, queue) if isinstance(self._source, TakesHints) else 0

    def prefetch(
        self, windows: Windows, deadlines: Mapping[int, Deadline] | None = None, out: Mapping[int, Rows] | None = None,
        queue: DeadlineQueue | None = None,
    ) -> LookupTicket:  # fmt: skip
        """Start a lookup of the layers in `deadlines`, earliest first; returns at once.

        deadlines: None: all layers, without a deadline: in idle time, for a whole prompt as soon as it is tokenised
        queue: where mapped and local rows are gathered, for callers with many handles; None: by threads of this handle's own
        The arrays of `windows` and `out` belong to the ticket until each layer was waited for or the ticket was cancelled.
        Raises InvalidArgument before anything starts, ResourceExhausted when the queue is full.
        """
        deadlines = dict.fromkeys(self.layers, Deadline.never()) if deadlines is None else deadlines
        outs = self._outs(tuple(deadlines), windows, out)
        return LookupTicket(self._source.submit(windows, outs, deadlines, queue), outs)

    def page_bytes(self) -> int:
        """Page size in use for the tables, bytes; 0 where they are not in this process."""
        return self._source.page_bytes()

    def close(self) -> None:
        """Let go of the version. No lookup may be running."""
        self._source.close()

    def __enter__(self) -> EngramHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _outs(self, layers: Sequence[int], windows: Windows, out: Mapping[int, Rows] | None) -> dict[int, Rows]:
        shape = (windows.token_count, self.model.columns, self.model.row.bytes)
        if windows.lookback.shape[1] < self.model.order_max - 1:
            raise InvalidArgument(f"lookback: {self.model.order_max - 1} columns needed, got {windows.lookback.shape[1]}")
        for layer in layers:
            self.model.layer_position(layer)
            if out is not None and layer not in out:
                raise InvalidArgument(f"out: nothing for layer {layer}")
        return {layer: np.empty(shape, dtype=np.uint8) if out is None else _check_out(out[layer], shape) for layer in layers}


def fake_handle(
    model: EngramModel, token_map: NDArray[np.int32] | None, tables: Mapping[int, Rows], delay_seconds: float = 0.0
) -> EngramHandle:
    """A handle on arrays, for tests of engines: rows count as absent until `delay_seconds` after a prefetch began."""
    return EngramHandle(model, model.version, FakeSource(model, tables, token_map, delay_seconds))


def _check_out(out: Rows, shape: tuple[int, ...]) -> Rows:
    flags = out.flags
    if out.dtype != _UINT8 or out.shape != shape or not flags.c_contiguous or not flags.writeable:
        raise InvalidArgument(f"out: writable C-contiguous u8 {list(shape)} expected, got {out.dtype} {list(out.shape)}")
    return out

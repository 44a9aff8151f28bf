"""Makes a new version: rows from a checkpoint, a grown folder or a seed, streamed into segments, then published at once.

Everything is checked before anything is allocated. Two slices of memory, whatever the size: one is filled while the other is
appended. Does not decide which version is current (pool) or how segments are kept (store).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.checkpoint_rows import CheckpointRows
from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.grown_rows import GrownRows, check_table
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters, OpenCheckpoint, OpenGrown, Staging, TableWriter, VersionStore
from engram_pool.domain.progress import Pace, Progress
from engram_pool.domain.row_sources import BLOCK_ROWS, OpenStore, RandomRows, RowSource, RowsWithFiles, StoreOrder
from engram_pool.domain.tensor_match import match_tensors
from engram_pool.domain.token_maps import check_token_map, read_token_map
from engram_pool.domain.v41_config import v41_template
from treadle.contract import DataLoss, EngramModel, InvalidArgument, Table, TreadleError
from treadle.contract.version import check_name
from treadle.kernels.segment import segment_bytes
from treadle.kernels.segment_layout import header_bytes_for

SLICE_BYTES = 8 << 20  # two of them, their scratch and a random block stay far below the 256 MiB that a load may take
METADATA_BYTES = 16 << 10  # beside the template: the tables of up to 64 layers, digests of weights and card


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A safetensors file or folder on this host, and names by role where they do not match by suffix."""

    path: Path
    tensors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Rows made up from a seed."""

    seed: int


@dataclass(frozen=True, slots=True)
class GrownOrder:
    """A grown folder on this host, and the name to load it under; empty: its manifest's own."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What to load. An empty `manifest_json` is derived from the checkpoint's config.json; `token_map` int32 little-endian."""

    source: CheckpointOrder | RandomOrder | GrownOrder | StoreOrder
    manifest_json: bytes
    token_map: bytes
    keep_previous: bool


class Loader:
    """Loads one version at a time."""

    def __init__(
        self,
        pool: Pool,
        store: VersionStore,
        compute: Compute,
        meters: Meters,
        open_checkpoint: OpenCheckpoint,
        open_grown: OpenGrown,
        open_store: OpenStore,
    ) -> None:
        self._pool, self._store, self._compute, self._meters = pool, store, compute, meters
        self._open_checkpoint, self._open_grown_folder, self._open_store = open_checkpoint, open_grown, open_store
        self._loading = Turnstile("load", "loads", 1, retry_after_seconds=5.0)  # memory and disk are the limit, not cores

    async def load(self, order: LoadOrder) -> AsyncGenerator[Progress | Resident, None]:
        """Progress a few times a second, and the resident version at the end. Left early, nothing stays behind.

        Raises InvalidArgument, NotFound, FingerprintMismatch, DataLoss for what is asked for or found, ResourceExhausted for
        no room, Unavailable when the pool stops.
        """
        resident: Resident | None = None
        with self._pool.at_work(), self._loading.turn(), _counted(self._meters):
            source = await self._compute.run_or_leave(lambda: self._open(order), lambda late: late.close())
            try:
                async with aclosing(self._make(source, order.keep_previous)) as events:
                    async for event in events:
                        if isinstance(event, Resident):
                            resident = event
                        else:
                            yield event
            finally:
                await self._compute.run(source.close)
        assert resident is not None
        yield resident  # last, with everything put away: most callers leave with it, and the next load may come at once

    def _open(self, order: LoadOrder) -> RowSource:
        if isinstance(order.source, GrownOrder | StoreOrder):
            if order.manifest_json or order.token_map:
                what = "a grown folder" if isinstance(order.source, GrownOrder) else "a stored version"
                raise InvalidArgument(f"manifest_json, token_map: {what} has its own; leave them empty")
            return self._open_grown(order.source) if isinstance(order.source, GrownOrder) else self._open_store(order.source)
        token_map = read_token_map(order.token_map)
        model = _template(order.manifest_json) if order.manifest_json else None
        if isinstance(order.source, RandomOrder):
            if model is None:
                raise InvalidArgument("manifest_json: random rows need a manifest")
            check_token_map(model, token_map)
            return RandomRows(model, token_map, order.source.seed)
        checkpoint = self._open_checkpoint(order.source.path)
        try:
            if model is None:
                model = v41_template(checkpoint.config or {}, checkpoint.name, token_map)
            check_token_map(model, token_map)
            return CheckpointRows(checkpoint, model, token_map, match_tensors(checkpoint, model, order.source.tensors))
        except BaseException:
            checkpoint.close()
            raise

    def _open_grown(self, order: GrownOrder) -> GrownRows:
        if order.name:
            _check_given_name(order.name)
        folder = self._open_grown_folder(order.path)
        try:
            return GrownRows(folder, order.name)
        except BaseException:
            folder.close()
            raise

    async def _make(self, source: RowSource, keep_previous: bool) -> AsyncGenerator[Progress | Resident, None]:
        model, run = source.model, self._compute.run
        await self._pool.reap()  # what nobody reads any more makes room first
        await run(self._pool.room.check, model, _bytes_needed(source))
        staging = await run(self._store.stage)
        try:
            if isinstance(source, RowsWithFiles):
                if source.kept_bytes:
                    self._pool.refuse_without_weights(model)
                await run(source.keep_files, staging)
            copies = _Copies(source, staging, self._compute, self._meters)
            async with aclosing(copies.run()) as events:
                async for progress in events:
                    self._pool.refuse_if_draining()
                    yield progress
            yield await self._pool.publish(staging, model.with_tables(copies.tables), keep_previous=keep_previous)
        finally:
            await run(staging.discard)


class _Copies:
    """Streams every layer of a source into the writers of a staging."""

    def __init__(self, source: RowSource, staging: Staging, compute: Compute, meters: Meters) -> None:
        self.tables: dict[int, Table] = {}
        self._source, self._staging, self._compute, self._meters = source, staging, compute, meters
        row_bytes = source.model.row.bytes
        self._slice_rows = max(1, SLICE_BYTES // (row_bytes * BLOCK_ROWS)) * BLOCK_ROWS
        self._slices = [np.empty((self._slice_rows, row_bytes), dtype=np.uint8) for _ in range(2)]
        self._total = sum(source.row_count(layer) for layer in source.model.layers) * row_bytes
        self._done, self._pace = 0, Pace()

    async def run(self) -> AsyncGenerator[Progress, None]:
        """Progress a few times a second; `tables` is complete at the end."""
        for layer in self._source.model.layers:
            yield Progress(self._done, self._total, f"layer {layer}")
            rows, row_bytes = self._source.row_count(layer), self._source.model.row.bytes
            header_bytes = _header_bytes(self._source, layer)
            writer = await self._compute.run(self._staging.writer, layer, rows, row_bytes, self._source.token_map, header_bytes)
            async with aclosing(self._copy(layer, rows, writer)) as slices:
                async for _ in slices:
                    if self._pace.due():
                        yield Progress(self._done, self._total, f"layer {layer}")
            self.tables[layer] = await self._compute.run(writer.table)
            check_table(self._source.model, layer, self.tables[layer])
        yield Progress(self._total, self._total, "publishing")

    async def _copy(self, layer: int, rows: int, writer: TableWriter) -> AsyncGenerator[None, None]:
        """Fill one slice while the other is appended: a source may be as slow as the checksums."""
        here, there = self._slices
        filled = await self._compute.run(self._fill, here, layer, 0, rows)
        first = filled
        while filled:
            appending = self._compute.run(writer.append, here[:filled])
            filling = self._compute.run(self._fill, there, layer, first, rows)
            appended, ahead = await asyncio.gather(appending, filling, return_exceptions=True)  # both threads have ended
            for result in (appended, ahead):
                if isinstance(result, BaseException):
                    raise result
            byte_count = filled * here.shape[1]
            self._done += byte_count
            self._meters.rows_loaded(byte_count)
            assert isinstance(ahead, int)
            here, there, filled, first = there, here, ahead, first + ahead
            yield

    def _fill(self, buffer: np.ndarray[tuple[int, int], np.dtype[np.uint8]], layer: int, first: int, rows: int) -> int:
        count = min(self._slice_rows, rows - first)
        if count:
            self._source.read(layer, first, buffer[:count])
        return count


def _check_given_name(name: str) -> None:
    """Before the folder is opened, which is not to be blamed for it."""
    try:
        check_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(f"name: {error}") from error


def _bytes_needed(source: RowSource) -> int:
    words = 0 if source.token_map is None else source.token_map.shape[0]
    kept = source.kept_bytes if isinstance(source, RowsWithFiles) else 0
    return kept + sum(
        segment_bytes(source.row_count(layer), source.model.row.bytes, words, _header_bytes(source, layer))
        for layer in source.model.layers
    )


def _header_bytes(source: RowSource, layer: int) -> int:
    """Room for a manifest with its tables, and for digests beside it."""
    table_bytes = source.row_count(layer) * source.model.row.bytes
    return header_bytes_for(table_bytes, len(source.model.to_json()) + METADATA_BYTES)


def _template(manifest_json: bytes) -> EngramModel:
    model = EngramModel.from_json(manifest_json)
    if model.tables:
        raise InvalidArgument("manifest_json: tables are what a load makes; send the manifest without them")
    return model


@contextmanager
def _counted(meters: Meters) -> Iterator[None]:
    """Count how a load ended."""
    outcome = "cancelled"
    try:
        yield
        outcome = "ok"
    except Exception as error:
        refused = isinstance(error, TreadleError) and not isinstance(error, DataLoss)
        outcome = "refused" if refused else "failed"
        raise
    finally:
        meters.load_ended(outcome)

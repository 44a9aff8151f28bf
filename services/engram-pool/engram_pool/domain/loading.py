"""Makes a new version: rows from a checkpoint, a grown folder, a seed or other pools, streamed into segments, then published at once.

Everything is checked before anything is allocated. Does not copy rows (copying), decide which version is current (pool) or how
segments are kept (store).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from engram_pool.domain.catalogue import Resident
from engram_pool.domain.checkpoint_rows import CheckpointRows
from engram_pool.domain.compute import Compute, Turnstile
from engram_pool.domain.copying import Copies, bytes_needed
from engram_pool.domain.derivation import derived_template
from engram_pool.domain.grown_rows import GrownRows
from engram_pool.domain.hash_numbers import check_hash_numbers
from engram_pool.domain.held_rows import Share
from engram_pool.domain.origins import GrownOrder, PeerOrder, RandomOrder, Source, StoreOrder, origin_text
from engram_pool.domain.peer_rows import PeerRows
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Meters
from engram_pool.domain.progress import Progress
from engram_pool.domain.row_sources import OpenStore, RandomRows, RowSource, RowsWithFiles
from engram_pool.domain.sources import OpenCheckpoint, OpenGrown, OpenPeers
from engram_pool.domain.storing import VersionStore
from engram_pool.domain.tensor_match import match_tensors
from engram_pool.domain.token_maps import check_token_map, read_token_map
from treadle.contract import DataLoss, EngramModel, InvalidArgument, TreadleError
from treadle.contract.version import check_name


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """What to load. An empty `manifest_json` is derived from the checkpoint's config.json; `token_map` int32 little-endian.

    share: the rows to keep, where the tables are spread over owners; None: all
    """

    source: Source
    manifest_json: bytes
    token_map: bytes
    keep_previous: bool
    share: Share | None = None


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
        open_peers: OpenPeers,
        open_store: OpenStore,
    ) -> None:
        self._pool, self._store, self._compute, self._meters = pool, store, compute, meters
        self._open_checkpoint, self._open_grown_folder, self._open_peers = open_checkpoint, open_grown, open_peers
        self._open_store = open_store
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
                async with aclosing(self._make(source, order)) as events:
                    async for event in events:
                        if isinstance(event, Resident):
                            resident = event
                        else:
                            yield event
            finally:
                await self._compute.run(source.close)
        assert resident is not None
        yield resident  # last, with everything put away: most callers leave with it, and the next load may come at once

    def _open(self, order: LoadOrder) -> RowSource | PeerRows:
        if isinstance(order.source, PeerOrder):
            if order.manifest_json or order.token_map:
                raise InvalidArgument("manifest_json, token_map: peers have their own; leave them empty")
            return self._peer_rows(order.source)
        return self.open_source(order)

    def open_source(self, order: LoadOrder) -> RowSource:
        """The rows of an order, but for those of peers. Raises InvalidArgument, NotFound, FingerprintMismatch, DataLoss."""
        if isinstance(order.source, PeerOrder):
            raise InvalidArgument("source: peers are asked chunk by chunk")
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
        _check_given_name(order.source.name)
        checkpoint = self._open_checkpoint(order.source.path)
        try:
            source = order.source
            if model is None:
                model = derived_template(checkpoint, token_map, source.tensors, name=source.name, row_dtype=source.row_dtype)
            elif source.name or source.row_dtype:
                raise InvalidArgument("name, row_dtype: the manifest says both; leave them out, or leave it out")
            check_token_map(model, token_map)
            check_hash_numbers(checkpoint, model)
            return CheckpointRows(checkpoint, model, token_map, match_tensors(checkpoint, model, source.tensors))
        except BaseException:
            checkpoint.close()
            raise

    def _open_grown(self, order: GrownOrder) -> GrownRows:
        _check_given_name(order.name)
        folder = self._open_grown_folder(order.path)
        try:
            return GrownRows(folder, order.name)
        except BaseException:
            folder.close()
            raise

    def _peer_rows(self, order: PeerOrder) -> PeerRows:
        if not order.endpoints or not order.model:
            raise InvalidArgument("peers: name at least one endpoint, and the model")
        peers = self._open_peers(order.endpoints, order.model, order.version)
        try:
            return PeerRows(peers)
        except BaseException:
            peers.close()
            raise

    async def _make(self, source: RowSource | PeerRows, order: LoadOrder) -> AsyncGenerator[Progress | Resident, None]:
        model, run = source.model, self._compute.run
        await self._pool.reap()  # what nobody reads any more makes room first
        row_counts = {layer: source.row_count(layer) for layer in model.layers}
        held = dict.fromkeys(model.layers) if order.share is None else order.share.held(model, row_counts)
        await run(self._pool.room.check, model, bytes_needed(source, held))
        staging = await run(self._store.stage)
        try:
            if isinstance(source, RowsWithFiles):
                if model.fusion is not None and model.fusion.weights is not None:
                    self._pool.refuse_without_weights(model)
                await run(source.keep_files, staging)
            await run(staging.keep_origin, origin_text(order.source))
            copies = Copies(source, held, staging, self._compute, self._meters)
            async with aclosing(copies.run()) as events:
                async for progress in events:
                    self._pool.changes.refuse_if_draining()
                    yield progress
            yield await self._pool.publish(staging, model.with_tables(copies.tables), keep_previous=order.keep_previous, held=held)
        finally:
            await run(staging.discard)


def _check_given_name(name: str) -> None:
    """Before the folder is opened, which is not to be blamed for it. An empty one was not given."""
    if not name:
        return
    try:
        check_name(name)
    except InvalidArgument as error:
        raise InvalidArgument(f"name: {error}") from error


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

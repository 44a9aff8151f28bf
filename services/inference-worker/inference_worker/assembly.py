"""What both engines' workers are put together from: the model's card, the memories of a pool, and the server.

Torch has to find its thread settings made, so nothing here is imported before `__main__` has made them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from inference_worker.adapters.asm_store import StoreConnection, StoreOfPrefixes
from inference_worker.adapters.engram_pool import PoolOfMemories, open_engram, read_key
from inference_worker.adapters.prefix_kv_file import map_prefix_kv
from inference_worker.adapters.prefix_metrics import PrefixMetrics
from inference_worker.adapters.prometheus import WorkerMetrics
from inference_worker.adapters.source_watch import SourceWatch
from inference_worker.adapters.tokenizer_file import digest_of
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine_port import RunningEngine
from inference_worker.domain.memory_opening import FusionFile, Opener
from inference_worker.domain.memory_status import NoCatalogue
from inference_worker.domain.ports import PrefixHost, RowHandle
from inference_worker.domain.prefix_catalogue import NoPrefixes, PrefixCatalogue
from inference_worker.domain.prefix_opening import PrefixOpener
from inference_worker.domain.resident_versions import Choice
from inference_worker.server import STATUS, ModelCard, WorkerServer
from inference_worker.settings import EngramTransport, Settings
from treadle.chassis.server import run_service
from treadle.chassis.settings import WrongSetting, split_address
from treadle.client.asm import DictionaryCache, ReadManifests
from treadle.client.asm.cache import CACHE_FOLDER
from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract.errors import InvalidArgument, NotFound, Unavailable
from treadle.contract.lookup_settings import LookupIndex
from treadle.inference.v1 import worker_pb2, worker_pb2_grpc
from treadle.nn.config import ModelConfig
from treadle.nn.entry_search import check_hnswlib
from treadle.nn.model_fetch import treadle_home
from treadle.nn.model_folder import find_model_folder
from treadle.nn.model_identity import dictionary_model

if TYPE_CHECKING:
    from inference_worker.adapters.registration import Registration

ANY_HOST = ("0.0.0.0", "[::]", "::")
REDIS_URL_VARIABLE = "TREADLE_REDIS_URL"
FIRST_ANSWER_SECONDS_MAX = 10.0  # a worker that is ready should know what there is to choose, if the pool is there
# To hold a version for another process: as it opens it, where that costs nothing, else by an open call.
HELD_BY = {EngramTransport.AUTO: "auto", EngramTransport.MAPPED: "mapped"}
log = logging.getLogger("treadle.worker")


def model_card(settings: Settings) -> ModelCard:
    """The model of the settings, fetched first if it is known by name and not here."""
    folder, name = find_model_folder(settings.model, _log_progress)
    return ModelCard(settings.served_model_name or name, folder, digest_of(folder / "tokenizer.json"), _build_version())


async def serve(
    settings: Settings, engine: RunningEngine, card: ModelCard, memories: Catalogue | NoCatalogue, registry: CollectorRegistry,
    close_door: Callable[[], None], failed: asyncio.Event | None = None, prefixes: PrefixCatalogue | NoPrefixes | None = None,
) -> int:  # fmt: skip
    """Answer until told to stop, or until `failed` is set; the exit code."""

    servicer = WorkerServer(
        engine, card, settings.policy, memories, open_seconds_max=settings.engram_open_seconds_max, prefixes=prefixes
    )

    def register(server: object) -> Sequence[str]:
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(servicer, server)  # type: ignore[arg-type]
        return [worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name]

    registration = _registration(settings)

    async def on_ready(listen: str) -> None:
        if registration is not None:
            address = settings.advertise or listen
            await registration.begin(settings.name or address, address, card.name)

    async def on_leave() -> None:
        servicer.leave()
        if registration is not None:
            registration.leave()

    async def on_drain() -> None:
        close_door()

    try:
        return await run_service(
            "inference-worker", settings, register, area="worker", status=STATUS, registry=registry, build_version=card.build_version,
            on_ready=on_ready, on_leave=on_leave, on_drain=on_drain, failed=failed,
        )  # fmt: skip
    finally:
        if registration is not None:
            await registration.end()


def _registration(settings: Settings) -> Registration | None:
    """This worker's place in the directory, where there is one."""
    url = settings.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")
    if not url:
        return None
    if not settings.advertise and split_address(settings.listen)[0] in ANY_HOST:
        raise WrongSetting(f"advertise: others cannot reach {settings.listen}; say at which host:port they reach this worker")
    try:
        from inference_worker.adapters.registration import Registration
    except ImportError as error:
        raise Unavailable(
            "a Redis is named, and its client is not installed: pip install 'treadle-inference-worker[redis]'"
        ) from error
    try:
        return Registration(url)
    except InvalidArgument as error:
        raise WrongSetting(str(error)) from error


@contextmanager
def memories_of(
    settings: Settings, config: ModelConfig, folder: Path, metrics: WorkerMetrics,
    open_elsewhere: Callable[[RowHandle], str] | None = None, close_elsewhere: Callable[[RowHandle], None] | None = None,
) -> Iterator[Catalogue | NoCatalogue]:  # fmt: skip
    """The memories of the settings' pool, its list watched, the default one open.

    open_elsewhere, close_elsewhere: see Opener; versions are then held here as cheaply as can be
    """
    if not settings.watches_pool:
        yield NoCatalogue()
        return
    endpoint = pool_endpoint(settings)
    weights = settings.engram_fusion_weights
    opener = Opener(
        config, folder / "tokenizer.json", settings.engram_fusion,
        FusionFile(settings.engram_model, weights) if weights is not None else None, open_elsewhere,
        close_elsewhere,
    )  # fmt: skip
    default = Choice(settings.engram_model, settings.engram_version) if settings.has_default_memory else None
    transport = settings.engram_transport.value if open_elsewhere is None else HELD_BY.get(settings.engram_transport, "rpc")
    pool = PoolOfMemories(endpoint, transport)
    catalogue = Catalogue(pool, opener, open_max=settings.engram_memories_max, default=default, observer=metrics)
    metrics.watch_memories(catalogue)
    with closing(catalogue):
        if default is not None:
            _open_default(settings, catalogue, opener, pool)
        with SourceWatch(lambda: EngramPool(endpoint), catalogue, name="engram pool", address=endpoint.address) as watch:
            watch.wait_answered(FIRST_ANSWER_SECONDS_MAX)
            yield catalogue


@contextmanager
def prefixes_of(
    settings: Settings, config: ModelConfig, folder: Path, registry: CollectorRegistry, host: PrefixHost | None = None
) -> Iterator[PrefixCatalogue | NoPrefixes]:
    """The long prefixes of the settings' store, its pointers watched. host: the process that runs the model; None: this one

    Raises WrongSetting for an index that cannot be had, and as `dictionary_cache`.
    """
    if not settings.asm_store:
        yield NoPrefixes()
        return
    if settings.lookup.index == LookupIndex.HNSW:
        try:
            check_hnswlib()
        except NotFound as error:
            raise WrongSetting(f"prefix_{error}") from error
    endpoint = Endpoint(
        settings.asm_store, read_key(settings.asm_key_file, "asm_key_file"), settings.asm_tls_root_file,
        tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file,
    )  # fmt: skip
    opener, metrics = (
        PrefixOpener(lambda: dictionary_model(folder, config), config.positions_max, map_prefix_kv, host, settings.lookup),
        PrefixMetrics(registry),
    )
    cache = dictionary_cache(settings, metrics)
    manifests = ReadManifests()
    store = StoreOfPrefixes(endpoint, cache, manifests)
    catalogue = PrefixCatalogue(store, opener, open_max=settings.prefixes_max, observer=metrics)
    metrics.watch(catalogue)
    with (
        closing(store),
        closing(catalogue),
        SourceWatch(
            lambda: StoreConnection(endpoint, cache, manifests), catalogue, name="asm store", address=endpoint.address
        ) as watch,
    ):
        watch.wait_answered(FIRST_ANSWER_SECONDS_MAX)
        yield catalogue


def dictionary_cache(settings: Settings, metrics: PrefixMetrics) -> DictionaryCache | None:
    """Where versions of a store elsewhere go; None: nowhere. Raises WrongSetting for a folder that was named and cannot be used."""
    if not settings.asm_cache_bytes_max:
        return None
    cache = DictionaryCache(settings.asm_cache or treadle_home() / CACHE_FOLDER, settings.asm_cache_bytes_max, metrics)
    if settings.asm_cache is not None:
        try:
            cache.prepare()
        except InvalidArgument as error:
            raise WrongSetting(str(error)) from error
    metrics.watch_cache(cache)
    return cache


def pool_endpoint(settings: Settings) -> Endpoint:
    """Where the settings' pool is, and what is shown to it."""
    return Endpoint(
        settings.engram_pool, read_key(settings.engram_key_file), settings.engram_tls_root_file,
        tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file,
    )  # fmt: skip


def _open_default(settings: Settings, catalogue: Catalogue, opener: Opener, pool: PoolOfMemories) -> None:
    """Open the memory of requests that choose none; the start waits for it, and fails without it."""
    handle = open_engram(
        pool.endpoint, settings.engram_model, settings.engram_version, pool.transport, settings.engram_open_seconds_max
    )
    try:
        memory = opener.memory_of(pool, handle)
    except BaseException:
        handle.close()
        raise
    catalogue.adopt_default(memory)
    log.info(
        "engram opened",
        extra={"model": handle.model.name, "version": handle.version, "transport": memory.transport, "fused": memory.fused},
    )


def _log_progress(step: str, fraction: float) -> None:
    if fraction < 1:
        log.info("fetching the model", extra={"step": step, "done": f"{fraction:.0%}"})


def _build_version() -> str:
    try:
        return metadata.version("treadle-inference-worker")
    except metadata.PackageNotFoundError:  # run from the tree
        return "0.0.0"

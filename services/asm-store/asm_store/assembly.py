"""The parts of one asm-store process, made and joined as its settings say. Part of the entry point, as __main__ is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from asm_store.adapters.dictionary_folder import DictionaryFolder
from asm_store.adapters.metrics import PrometheusMeters
from asm_store.adapters.replica_calls import ReplicaCalls
from asm_store.domain.bringing import Bringing
from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.compute import Compute
from asm_store.domain.deleting import Deleting
from asm_store.domain.extending import Extending
from asm_store.domain.lookup import Lookups
from asm_store.domain.pointers import Pointers
from asm_store.domain.ports import Alone
from asm_store.domain.promoting import Promoting
from asm_store.domain.publishing import Publishing
from asm_store.domain.reading import FileReading
from asm_store.domain.replicating import Replicating
from asm_store.domain.room import Room
from asm_store.domain.store import Store
from asm_store.domain.tenancy import Tenants
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.verifying import Verifying
from asm_store.server import AsmStoreServer
from asm_store.settings import Settings
from treadle.chassis.background import keep_going
from treadle.chassis.server import read_shown_key
from treadle.client import Endpoint
from treadle.contract.errors import Unavailable

if TYPE_CHECKING:
    from asm_store.adapters.redis_sharing import RedisSharing

PROGRAM = "treadle-asm-store"
log = logging.getLogger("asm_store")


@dataclass(frozen=True)
class Parts:
    """What one process is made of. Its tasks run from `begin` to `end`."""

    settings: Settings
    folder: DictionaryFolder
    store: Store
    server: AsmStoreServer
    bringing: Bringing
    verifying: Verifying
    calls: ReplicaCalls
    changes: Changes
    replicating: Replicating
    redis: RedisSharing | None
    tasks: list[asyncio.Task[None]]

    async def begin(self, listen: str) -> None:
        """Verify what was found; tell other replicas of this one. listen: host:port that it listens on."""
        self._start("verifying", self.verifying.run)
        if self.redis is not None:
            self.redis.join(self.replicating, self.settings.advertise or listen)
            self._start("sharing", self.redis.run)
            self._start("copying ahead", self.bringing.follow)

    async def drain(self) -> None:
        """Leave the other replicas, and end watches and holds."""
        if self.redis is not None:
            await self.redis.leave()
        await self.changes.drain()

    async def end(self) -> None:
        """Stop all tasks and let go of the folder."""
        self.verifying.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.bringing.close()
        await self.calls.close()
        if self.redis is not None:
            await self.redis.leave()
            await self.redis.close()
        self.store.remember_uses()
        self.folder.close()

    def _start(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        self.tasks.append(asyncio.create_task(keep_going(log, what, work)))


def put_together(settings: Settings, registry: CollectorRegistry, compute: Compute, tenants: Tenants) -> Parts:
    """Everything but what listens. Raises InvalidArgument and Unavailable for what a setting names and is not there."""
    folder = DictionaryFolder(settings.folder)
    name = settings.replica or folder.replica_name()
    redis = _redis(settings.redis, name, compute) if settings.redis else None
    sharing, changes, changing, meters = redis or Alone(name), Changes(), asyncio.Lock(), PrometheusMeters(registry)
    key = read_shown_key(settings.peer_key_file, "peer_key_file") if settings.peer_key_file is not None else None
    calls = ReplicaCalls(partial(_endpoint, settings, key), get_seconds=settings.publish_seconds_max)
    pointers = Pointers(folder, sharing, compute, changes, watchers_max=settings.watchers_max)
    catalogue, tombstones = Catalogue(pointers, sharing), Tombstones(folder, compute)
    room = Room(
        catalogue, folder, compute, meters, file_bytes_max=settings.file_bytes_max, versions_max=settings.versions_max,
        tenant_bytes_max=tenants.bytes_max,
    )  # fmt: skip
    promoting = Promoting(catalogue, pointers, tombstones)
    publishing = Publishing(
        catalogue, promoting, room, tombstones, folder, sharing, compute, changes, meters, changing, publishes_max=settings.publishes_max,
        seconds_max=settings.publish_seconds_max, silence_seconds=settings.publish_silence_seconds,
    )  # fmt: skip
    bringing = Bringing(catalogue, pointers, publishing, sharing, calls, compute, changes, meters)
    deleting = Deleting(
        catalogue, pointers, tombstones, folder, sharing, calls, compute, changes, meters, changing, copying=bringing.copying
    )
    store = Store(
        catalogue, pointers, promoting, tombstones, bringing, deleting, folder, sharing, compute, changes, meters,
        holds_max=settings.holds_max, pin_seconds_max=settings.pin_seconds_max,
    )  # fmt: skip
    verifying = Verifying(catalogue, folder, sharing, changes, meters, changing, bytes_per_second=settings.verify_bytes_per_second)
    lookups = Lookups(catalogue, bringing, compute, meters, lookups_max=settings.lookups_max, lists_probed=settings.lists_probed)
    meters.observe(store, room, sharing)
    server = AsmStoreServer(
        store, publishing, Extending(bringing, publishing, pointers, catalogue, meters), lookups, FileReading(compute), room, meters,
        tenants, build_version=build_version(),
    )  # fmt: skip
    replicating = Replicating(store, tombstones, deleting, changes)
    return Parts(settings, folder, store, server, bringing, verifying, calls, changes, replicating, redis, [])


def build_version() -> str:
    """Version of the installed package; 0+source where it runs from its source."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "0+source"


def _endpoint(settings: Settings, key: str | None, address: str) -> Endpoint:
    """Another replica, called as every one is."""
    return Endpoint(
        address, key, settings.peer_tls_root_file, tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file
    )


def _redis(url: str, name: str, compute: Compute) -> RedisSharing:
    try:
        from asm_store.adapters.redis_sharing import RedisSharing
    except ImportError as error:
        raise Unavailable("a Redis is named, and its client is not installed: pip install 'treadle-asm-store[redis]'") from error
    return RedisSharing(url, name, compute)

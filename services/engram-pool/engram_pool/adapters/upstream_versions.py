"""Versions that other pools hold, served at this host's doors: fetched row by row when asked for, hot rows kept.

Owns the watches on the upstream pools, what each of them has and where its door is, and a connection for each version. Does not
answer calls (agent_server).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engram_pool.adapters.native_doors import NativeDoors
from treadle.client import Endpoint
from treadle.client.engram import AsyncEngramPool, EngramPool
from treadle.client.engram.pool_types import ResidentModel
from treadle.client.engram.socket_source import PATIENCE_SECONDS, hash_plans, remote_layers
from treadle.contract import EngramModel, InvalidArgument, TreadleError, Unavailable
from treadle.dataplane import RemoteRows, ServedLayer
from treadle.kernels import HashPlan

log = logging.getLogger("engram_pool")
RETRY_SECONDS = 0.5  # between two tries to reach an upstream pool, and the first two to serve a version
RETRY_SECONDS_MAX = 10.0  # between later ones
LOOK_SECONDS = 2.0  # between two looks where the doors of an upstream pool are
FETCH_SECONDS_MAX = 2.0  # a gather that the owners have not answered by then ends as a fault
LEAVE_SECONDS = 2.0  # how long requests in flight may keep a version that its owners have given up


@dataclass(slots=True, eq=False)
class Upstream:
    """An upstream pool as it was last seen; one that goes away keeps what it had.

    parts: versions, by when they became resident, of which it holds some rows only
    whole: those of which it holds all
    """

    endpoint: Endpoint
    door: str | None = None
    listing: Mapping[str, ResidentModel] = field(default_factory=dict)
    parts: set[tuple[str, float]] = field(default_factory=set)
    whole: set[tuple[str, float]] = field(default_factory=set)
    looking: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class Served:
    """A version at this host's doors. owners: index of the connection's owner, by door; damages: of each pool's, as known here."""

    model: EngramModel
    rows: RemoteRows
    plans: Mapping[int, HashPlan]
    damages: Mapping[str, int]
    owners: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Refused:
    """Why a version is not served, and when that is tried again (monotonic seconds)."""

    error: TreadleError
    again_at: float
    pause_seconds: float


class UpstreamVersions:
    """Follows what each of `endpoints` lists, and publishes each version over all pools that hold all of it."""

    def __init__(self, endpoints: Sequence[Endpoint], doors: NativeDoors) -> None:
        self._upstreams = [Upstream(endpoint) for endpoint in endpoints]
        self._doors, self._lock = doors, threading.Lock()
        self._served: dict[str, Served] = {}
        self._refused: dict[str, Refused] = {}

    async def follow_forever(self) -> None:
        """Until cancelled; an upstream pool that goes away leaves its versions in place, and is asked again."""
        async with asyncio.TaskGroup() as group:
            for upstream in self._upstreams:
                group.create_task(self._watch_forever(upstream))
                group.create_task(self._look_forever(upstream))

    def close(self) -> None:
        """Let go of every version; close the doors first."""
        for served in self._served.values():
            served.rows.close()

    def check_served(self, version: str) -> None:
        """Raise InvalidArgument, naming them, where the upstream pools hold only parts of a version."""
        refused = self._refused.get(version)
        if refused is not None and isinstance(refused.error, InvalidArgument):
            raise refused.error

    async def _watch_forever(self, upstream: Upstream) -> None:
        while True:
            try:
                await self._watch(upstream)
            except TreadleError as error:
                log.warning("upstream pool does not answer", extra={"pool": upstream.endpoint.address, "reason": str(error)})
            except Exception:  # whatever it is, rows of other pools and versions are still to be served
                log.exception("upstream pool cannot be followed", extra={"pool": upstream.endpoint.address})
            await asyncio.sleep(RETRY_SECONDS)

    async def _watch(self, upstream: Upstream) -> None:
        pool = AsyncEngramPool(upstream.endpoint)
        try:
            async for listing in pool.watch():
                await asyncio.to_thread(self._heard, upstream, listing)
        finally:
            await pool.close()

    async def _look_forever(self, upstream: Upstream) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await asyncio.to_thread(self._look, upstream)
            except Exception:
                log.exception("upstream versions cannot be brought up to date", extra={"pool": upstream.endpoint.address})

    def _heard(self, upstream: Upstream, listing: Sequence[ResidentModel]) -> None:
        with self._lock:
            upstream.listing = {resident.version: resident for resident in listing}
            self._drop_damaged()
        self._look(upstream)

    def _look(self, upstream: Upstream) -> None:
        """Ask where a pool's door is and which of its versions are whole; then bring this host's doors up to date."""
        with upstream.looking:
            try:
                upstream.door = _socket_door(upstream.endpoint)
                _look_for_parts(upstream)
            except TreadleError as error:  # it may be back at the same place
                log.warning("upstream pool does not answer", extra={"pool": upstream.endpoint.address, "reason": str(error)})
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        listed = {version: resident for upstream in self._upstreams for version, resident in upstream.listing.items()}
        for version in self._served.keys() - listed.keys():
            self._leave(version)
        for version in self._refused.keys() - listed.keys():
            del self._refused[version]
        for version, served in self._served.items():
            self._know_owners(served, self._doors_with(version))
        looked_at = {version for upstream in self._upstreams for version, _ in upstream.whole | upstream.parts}
        for version in (listed.keys() & looked_at) - self._served.keys():
            refused = self._refused.get(version)
            if refused is None or time.monotonic() >= refused.again_at:
                self._try_to_publish(listed[version])

    def _try_to_publish(self, resident: ResidentModel) -> None:
        before = self._refused.get(resident.version)
        try:
            self._publish(resident)
            self._refused.pop(resident.version, None)
        except TreadleError as error:
            pause = RETRY_SECONDS if before is None else min(RETRY_SECONDS_MAX, 2 * before.pause_seconds)
            self._refused[resident.version] = Refused(error, time.monotonic() + pause, pause)
            log.error("version not served", extra={"version": resident.version, "reason": str(error)})

    def _publish(self, resident: ResidentModel) -> None:
        version, model = resident.version, resident.model
        doors = self._doors_with(version)
        if not doors:
            raise self._no_door(version)
        plans = self._plans(model, doors)
        rows = RemoteRows(version, model.fingerprint.digest, remote_layers(model, plans), token=self._upstreams[0].endpoint.key)
        served = Served(model, rows, plans, self._damages(version))
        try:
            self._know_owners(served, doors)
            if not served.owners:
                raise Unavailable(f"no address is known of {', '.join(doors)}")
            self._serve(version, served)
        except BaseException:
            rows.close()
            raise
        self._served[version] = served
        log.info("upstream version served", extra={"model": model.name, "version": version, "owners": len(doors)})

    def _serve(self, version: str, served: Served) -> None:
        layers = []
        for layer, plan in served.plans.items():
            store = served.rows.store(layer, FETCH_SECONDS_MAX, patience_seconds=PATIENCE_SECONDS)
            layers.append(ServedLayer(layer, plan, self._doors.stores.of_others(version, layer, store)))
        self._doors.versions.publish(version, served.model.fingerprint.digest, layers)
        self._doors.share_hot_rows()

    def _drop_damaged(self) -> None:
        """Hot rows that came from a table in which damage was found since: a repair does not change its version."""
        for version, served in self._served.items():
            damages = self._damages(version)
            if damages == served.damages:
                continue
            self._doors.stores.retire(version, served.model.layers)
            self._serve(version, served)  # under tags of their own: what is in flight now is not found later
            served.damages = damages
            log.warning("hot rows dropped: damage was found in an upstream pool", extra={"version": version})

    def _damages(self, version: str) -> dict[str, int]:
        return {
            upstream.endpoint.address: upstream.listing[version].damaged_at_ns
            for upstream in self._upstreams
            if version in upstream.listing and upstream.listing[version].damaged_at_ns
        }

    def _doors_with(self, version: str) -> list[str]:
        return list(
            dict.fromkeys(
                upstream.door
                for upstream in self._upstreams
                if upstream.door is not None and _key(upstream, version) in upstream.whole
            )
        )

    def _no_door(self, version: str) -> TreadleError:
        parts = [upstream.endpoint.address for upstream in self._upstreams if _key(upstream, version) in upstream.parts]
        if parts:
            return InvalidArgument(
                f"a host agent serves tables that a pool holds whole; {', '.join(parts)} holds a part of {version}"
            )
        return Unavailable("no upstream pool has a socket door that can be reached; see its setting socket_listen")

    def _plans(self, model: EngramModel, doors: Sequence[str]) -> dict[int, HashPlan]:
        endpoint = self._upstreams[0].endpoint
        for place, door in enumerate(doors):
            try:
                return hash_plans(model, door, token=endpoint.key, timeout_seconds=endpoint.timeout_seconds)
            except Unavailable:
                if place == len(doors) - 1:
                    raise
        raise AssertionError("called with at least one door")

    def _know_owners(self, served: Served, doors: Sequence[str]) -> None:
        for door in doors:
            if door in served.owners:
                continue
            try:
                served.owners[door] = served.rows.add_owner(door)
            except TreadleError as error:  # tried again at the next look
                log.warning("upstream door cannot be used", extra={"door": door, "reason": str(error)})
        for door in served.owners.keys() - set(doors):
            served.rows.remove_owner(served.owners.pop(door))

    def _leave(self, version: str) -> None:
        served = self._served.pop(version)
        self._doors.versions.withdraw(version)
        self._doors.stores.retire(version, served.model.layers)
        self._doors.versions.wait_unread(version, LEAVE_SECONDS)
        served.rows.close()  # what is still in flight ends as a fault
        log.info("upstream version left", extra={"version": version})


def _key(upstream: Upstream, version: str) -> tuple[str, float] | None:
    resident = upstream.listing.get(version)
    return None if resident is None else (version, resident.loaded_at_seconds)


def _look_for_parts(upstream: Upstream) -> None:
    """Of each version that is new here, whether the pool holds all rows. Raises TreadleError."""
    listing = upstream.listing
    keys = {(version, resident.loaded_at_seconds) for version, resident in listing.items()}
    upstream.whole &= keys
    upstream.parts &= keys
    with EngramPool(upstream.endpoint) as pool:
        for key in keys - upstream.whole - upstream.parts:
            try:
                opened = pool.describe(listing[key[0]].model.name, key[0])
            except TreadleError as error:  # looked at again the next time
                log.warning("version not looked at", extra={"version": key[0], "reason": str(error)})
                continue
            (upstream.parts if any(segment.held for segment in opened.segments) else upstream.whole).add(key)


def _socket_door(endpoint: Endpoint) -> str | None:
    """The pool's first socket door over TCP; a Unix socket only where there is no other. Raises TreadleError if it does not answer."""
    with EngramPool(endpoint) as pool:
        addresses = [door.address for door in pool.status().doors if door.transport == "socket"]
    host = endpoint.address.rpartition(":")[0]
    tcp = [f"{host}:{address.rpartition(':')[2]}" if address.startswith(("0.0.0.0:", "[::]:")) else address
           for address in addresses if not address.startswith("unix:")]  # fmt: skip
    return next(iter(tcp or addresses), None)

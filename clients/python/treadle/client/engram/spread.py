"""A version that many owners hold: who is asked for what, kept true while owners come and go.

Owns routes, and the holds that keep the version from being freed at its owners. Does not move rows (the native client), nor know
where its news come from: any owner tells of all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from treadle.client.endpoint import Endpoint
from treadle.client.engram.hold import Hold
from treadle.client.engram.owners import OwnerList, OwnerWatch
from treadle.client.engram.socket_source import SocketSource, hash_plans, remote_layers
from treadle.contract import EngramModel, NotFound, ProtocolMismatch, ResourceExhausted, TreadleError, Unavailable
from treadle.contract.owners import Owner
from treadle.contract.routes import NOBODY, Routes, gaps_text, routes_to
from treadle.dataplane.remote import RemoteRows, Route
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc
from treadle.kernels import HashPlan

log = logging.getLogger("treadle.client")
WATCH_SECONDS_MAX = 24 * 3600.0  # a watch is renewed daily
HOLD_LOOK_SECONDS = 0.25  # how often a hold is looked at: an owner that has restarted gives it time (`reap_grace_seconds`)
RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.05, 1.0  # between two tries to hold or to watch
MISSED_SECONDS = 10.0  # how long an owner that is told of no more is asked, after all others
LEFT_SECONDS = 0.5  # how long an owner that is asked no more is held on to, for what it was asked before


@dataclass(frozen=True, slots=True)
class Replica:
    """One owner as a handle sees it.

    rows:      it holds so many of the version
    asked_for: of these, the rows that it is the first to be asked for
    """

    name: str
    address: str
    rows: int
    asked_for: int
    reachable: bool
    leaving: bool
    held: bool


class Spread:
    """Keeps the owners and routes of `rows` true to what the fabric tells, from a thread of its own, until `close`.

    endpoint: the pool that was asked first; its key and TLS roots are shown to the others too
    first:    the owners as it tells of them
    Raises Unavailable naming rows that nobody holds, or owners that have no door here.
    """

    def __init__(self, endpoint: Endpoint, model: EngramModel, rows: RemoteRows, first: OwnerList) -> None:
        self._endpoint, self._model, self._rows = endpoint, model, rows
        self._indices: dict[str, int] = {}  # of addresses, in `rows`
        self._holds: dict[str, _KeptHold] = {}  # by endpoint
        self._owners: tuple[Owner, ...] = ()
        self._routes: dict[int, Routes] = {}
        self._missed: dict[str, float] = {}  # since when the lists do not tell of an owner that is asked
        self._over, self._lock = threading.Event(), threading.Lock()
        self._watch: OwnerWatch | None = None
        try:
            self._route(first)
            self._await_holds()
        except TreadleError:
            self.close()
            raise
        self._thread = threading.Thread(target=self._follow, name="treadle-owners", daemon=True)
        self._thread.start()

    @property
    def replicas(self) -> list[Replica]:
        """The owners that are asked, as they are now."""
        with self._lock:
            owners, routes = self._owners, dict(self._routes)
            held = {address for address, hold in self._holds.items() if hold.stands}
        asked = np.zeros(len(owners) + 1, dtype=np.int64)
        for each in routes.values():
            np.add.at(asked, each.owners[:, 0], np.diff(each.bounds))  # NOBODY counts in the last place
        return [
            Replica(
                owner.name, door_of(owner) or "", sum(held_rows.rows for held_rows in owner.holdings), int(asked[place]),
                owner.reachable, owner.leaving, owner.endpoint in held,
            )
            for place, owner in enumerate(owners)
        ]  # fmt: skip

    def close(self) -> None:
        """Follow no longer, and hold nothing. `rows` are their owner's to close."""
        self._over.set()
        with self._lock:
            watch, holds, self._holds = self._watch, list(self._holds.values()), {}
        if watch is not None:
            watch.cancel()
        for hold in holds:
            hold.close()

    # -- routes ---------------------------------------------------------------------------------------------------------

    def _route(self, listed: OwnerList) -> None:
        """Ask as `listed` says from now on. Raises Unavailable where it is the first list and leaves rows to nobody."""
        model = self._model
        owners = _without_those_who_leave(model, self._known(listed))
        routes = {layer: routes_to(model, layer, owners) for layer in model.layers}
        if not self._routes and (gaps := gaps_text(routes)):
            raise Unavailable(f"{model.name} {model.version}: nobody holds {gaps}; {_told(listed, model)}")
        places = np.array([self._index(owner) for owner in owners] + [NOBODY], dtype=np.int32)  # NOBODY is the last place
        self._rows.set_routes({layer: Route(each.bounds, places[each.owners]) for layer, each in routes.items()})
        with self._lock:
            if self._over.is_set():
                return
            self._owners, self._routes = tuple(owners), routes
        self._hold(owners)
        self._forget({door_of(owner) or "" for owner in owners})

    def _known(self, listed: OwnerList) -> list[Owner]:
        """Those who hold the version and can be asked: as `listed` tells, and for a while those whom it does not tell of any more.

        A pool that has just started has not heard of the others yet.
        """
        model, now = self._model, time.monotonic()
        told = {owner.name for owner in listed.owners if owner.reachable or owner.epoch}
        holders = [owner for owner in self._alone(listed.holding(model.name, model.version)) if door_of(owner)]
        missed = [owner for owner in self._owners if owner.name not in told and not owner.leaving]
        self._missed = {owner.name: self._missed.get(owner.name, now) for owner in missed}
        if not gaps_text({layer: routes_to(model, layer, holders) for layer in model.layers}):
            missed = [owner for owner in missed if now - self._missed[owner.name] < MISSED_SECONDS]
        return [*holders, *(owner.unreachable() for owner in missed)]

    def _alone(self, owners: Sequence[Owner]) -> Sequence[Owner]:
        """A pool that stands alone is reached as the caller reached it, whatever it thinks of its own address."""
        return [replace(owner, endpoint=self._endpoint.address) for owner in owners] if len(owners) == 1 else owners

    def _index(self, owner: Owner) -> int:
        address = door_of(owner) or ""
        if address not in self._indices:
            self._indices[address] = self._rows.add_owner(address)
        return self._indices[address]

    def _forget(self, addresses: set[str]) -> None:
        for address in set(self._indices) - addresses:
            self._rows.remove_owner(self._indices.pop(address))

    # -- holds ----------------------------------------------------------------------------------------------------------

    def _hold(self, owners: Sequence[Owner]) -> None:
        wanted = {owner.endpoint for owner in owners}
        with self._lock:
            if self._over.is_set():
                return
            for address in wanted - self._holds.keys():
                self._holds[address] = _KeptHold(replace(self._endpoint, address=address), self._model)
            gone = [self._holds.pop(address) for address in set(self._holds) - wanted]
        for hold in gone:
            hold.close(after_seconds=LEFT_SECONDS)

    def _await_holds(self) -> None:
        """All owners that can be reached hold the version for us, or have refused it. Raises what they all said."""
        until = time.monotonic() + self._endpoint.timeout_seconds
        reachable = {owner.endpoint for owner in self._owners if owner.reachable} or {owner.endpoint for owner in self._owners}
        holds = [hold for address, hold in self._holds.items() if address in reachable]
        for hold in holds:
            hold.answered.wait(max(0.0, until - time.monotonic()))
        if not any(hold.stands for hold in holds):
            failures = [hold.failure for hold in holds if hold.failure is not None]
            raise failures[0] if failures else Unavailable(f"{self._endpoint.address}: no owner answers")

    # -- news -----------------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        pause = RETRY_SECONDS_MIN
        addresses: list[str] = []
        while not self._over.is_set():
            addresses = addresses or [self._endpoint.address, *dict.fromkeys(o.endpoint for o in self._owners if o.reachable)]
            try:
                for listed in self._lists(replace(self._endpoint, address=addresses.pop(0))):
                    pause = RETRY_SECONDS_MIN
                    self._route(listed)
            except Unavailable as error:
                log.debug("a watch of the owners ended", extra={"reason": str(error)})
            except TreadleError as error:
                log.error("the owners cannot be followed; the routes stay", extra={"reason": str(error)})
            self._over.wait(pause)
            pause = min(2 * pause, RETRY_SECONDS_MAX)

    def _lists(self, endpoint: Endpoint) -> Any:
        with closing(endpoint.channel()) as channel:
            request = pb.WatchOwnersRequest(ref=_ref(self._model))
            call = pb_grpc.EngramPoolServiceStub(channel).WatchOwners(
                request, timeout=WATCH_SECONDS_MAX, metadata=endpoint.metadata
            )
            watch = OwnerWatch(endpoint, call)
            with self._lock:
                self._watch = watch
                if self._over.is_set():
                    watch.cancel()
            yield from watch


class _KeptHold:
    """A hold at one owner, taken again whenever the owner is back. A thread of its own waits for it."""

    def __init__(self, endpoint: Endpoint, model: EngramModel) -> None:
        self._hold = Hold(endpoint, model.name, model.version)
        self.failure: TreadleError | None = None
        self.answered, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._keep, name="treadle-hold", daemon=True)
        self._thread.start()

    @property
    def stands(self) -> bool:
        """True while the owner keeps the version for us."""
        return self._hold.stands

    def close(self, after_seconds: float = 0.0) -> None:
        """Let go, for an owner that is asked no more a little later."""
        self._over.set()
        if after_seconds:
            timer = threading.Timer(after_seconds, self._hold.close)
            timer.daemon = True
            timer.start()
        else:
            self._hold.close()

    def _keep(self) -> None:
        pause = RETRY_SECONDS_MIN
        while not self._over.is_set():
            try:
                self._hold.ensure()
                pause = HOLD_LOOK_SECONDS
            except TreadleError as error:
                self.failure, pause = error, min(2 * pause, RETRY_SECONDS_MAX)
            except ValueError:  # the channel was closed meanwhile
                return
            self.answered.set()
            self._over.wait(pause)


class SpreadSource(SocketSource):
    """Rows of one version that is spread over owners, or held by several of them."""

    def __init__(self, rows: RemoteRows, spread: Spread, *, timeout_seconds: float) -> None:
        super().__init__(rows, timeout_seconds=timeout_seconds)
        self._spread = spread

    @property
    def replicas(self) -> list[Replica]:
        """The owners that are asked, as they are now."""
        return self._spread.replicas

    def close(self) -> None:
        """See RowSource."""
        super().close()
        self._spread.close()


def spread_source(endpoint: Endpoint, model: EngramModel, listed: OwnerList) -> SpreadSource:
    """Open all owners of a version, told of by the pool at `endpoint`, and follow them.

    Raises Unavailable naming what nobody holds, or where no owner answers; DataLoss for an owner with another token map.
    """
    rows = RemoteRows(
        model.version, model.fingerprint.digest, remote_layers(model, _plans(endpoint, model, listed)), token=endpoint.key
    )
    try:
        spread = Spread(endpoint, model, rows, listed)
    except TreadleError:
        rows.close()
        raise
    return SpreadSource(rows, spread, timeout_seconds=endpoint.timeout_seconds)


def owners_told_by(endpoint: Endpoint, model: EngramModel) -> OwnerList:
    """The owners of a version as the pool at `endpoint` tells now; none where it is too old to know."""
    with closing(endpoint.channel()) as channel:
        call = pb_grpc.EngramPoolServiceStub(channel).WatchOwners(
            pb.WatchOwnersRequest(ref=_ref(model)), timeout=endpoint.timeout_seconds, metadata=endpoint.metadata
        )
        try:
            with closing(iter(OwnerWatch(endpoint, call))) as lists:
                return next(lists)
        except ProtocolMismatch:
            return OwnerList(())


def _plans(endpoint: Endpoint, model: EngramModel, listed: OwnerList) -> dict[int, HashPlan]:
    """How tokens become rows, with the token map of the first owner that answers."""
    owners = sorted(listed.holding(model.name, model.version), key=lambda owner: (not owner.reachable, owner.leaving))
    failure: TreadleError = Unavailable(f"{model.name} {model.version}: {_told(listed, model)}")
    for address in filter(None, map(door_of, owners)):
        try:
            return hash_plans(model, address, token=endpoint.key, timeout_seconds=endpoint.timeout_seconds)
        except (Unavailable, NotFound, ResourceExhausted) as error:
            failure = error
    raise failure


def door_of(owner: Owner) -> str | None:
    """The address of a socket door that can be opened from here: a Unix socket on the same host, else TCP; None where there is none."""
    here = is_here(owner.endpoint)
    for address in owner.door("socket"):
        if not address.startswith("unix:") or (here and Path(address.removeprefix("unix:")).parent.is_dir()):
            return address
    return None


def is_here(address: str) -> bool:
    """True for an address of this host that is surely so."""
    host = address.removeprefix("ipv4:").rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("localhost", "::1") or host.startswith("127.")


def _without_those_who_leave(model: EngramModel, owners: Sequence[Owner]) -> list[Owner]:
    """The owners to ask: those who leave only where the others do not hold everything."""
    staying = [owner for owner in owners if not owner.leaving]
    enough = not gaps_text({layer: routes_to(model, layer, staying) for layer in model.layers})
    return staying if enough and any(owner.reachable for owner in staying) else list(owners)


def _told(listed: OwnerList, model: EngramModel) -> str:
    names = [owner.name for owner in listed.holding(model.name, model.version)]
    without = [owner.name for owner in listed.owners if owner.name in names and not door_of(owner)]
    words = f"its owners are {', '.join(names) or 'none'}"
    return f"{words}; without a socket door for this host: {', '.join(without)}" if without else words


def _ref(model: EngramModel) -> pb.ModelRef:
    return pb.ModelRef(model=model.name, version=model.version)

"""Keeps the fleet true to the list of workers that a directory tells.

Owns what a change of that list means: who joins, who gets no new requests, who is let go of and when. A directory that is
down, or has forgotten everything, changes nothing: workers that answer stay.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.member import Member
from treadle.contract.errors import TreadleError

log = logging.getLogger("treadle.gateway.directory")
STALE_SECONDS = 5.0  # after which a directory that does not answer is called stale
GONE_SECONDS = 15.0  # a worker that answers and is not listed is let go of after that: Redis may just have lost its list


@dataclass(frozen=True, slots=True)
class Listed:
    """A worker as the directory lists it. epoch: of two entries for one name the higher is the newer process."""

    name: str
    address: str
    epoch: int
    draining: bool = False


@dataclass(slots=True)
class _Known:
    listed: Listed
    member: Member
    missing_since: float | None = None


class Directory:
    """All on the event loop.

    make:   opens a worker as a member, InvalidArgument for an address that is none
    retire: closes one once no request is there any more
    clock:  monotonic seconds
    """

    def __init__(
        self, fleet: Fleet, make: Callable[[str, str], Member], retire: Callable[[Member], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._fleet, self._make, self._retire, self._clock = fleet, make, retire, clock
        self._known: dict[str, _Known] = {}
        self._refused: dict[str, Listed] = {}
        self._heard_at, self._was_stale = clock(), False

    @property
    def age_seconds(self) -> float:
        """Since the directory answered."""
        return max(0.0, self._clock() - self._heard_at)

    @property
    def stale(self) -> bool:
        """Whether it has not answered for STALE_SECONDS: the last list known is used."""
        return self.age_seconds > STALE_SECONDS

    def heard(self, listed: Mapping[str, Listed]) -> None:
        """The directory lists these now, by name."""
        self._heard_at, self._was_stale = self._clock(), False
        self._refused = {name: entry for name, entry in self._refused.items() if listed.get(name) == entry}
        for entry in listed.values():
            self._learn(entry)
        for name in self._known.keys() - listed.keys():
            self._miss(name)

    def silent(self) -> None:
        """It did not answer."""
        if self.stale and not self._was_stale:
            self._was_stale = True
            log.warning("the directory does not answer; the last list known is used", extra={"seconds": STALE_SECONDS})

    def _learn(self, entry: Listed) -> None:
        known = self._known.get(entry.name)
        if known is not None and entry.epoch < known.listed.epoch:
            return  # an older process of that name, which is about to notice
        if known is not None and entry.address != known.listed.address:
            self._let_go(entry.name)
            known = None
        if known is None:
            self._join(entry)
            return
        known.listed, known.missing_since = entry, None
        self._set_leaving(known.member, leaving=entry.draining)

    def _join(self, entry: Listed) -> None:
        if self._refused.get(entry.name) == entry:
            return  # said once
        try:
            member = self._make(entry.name, entry.address)
        except TreadleError as error:
            self._refused[entry.name] = entry
            log.error("an entry of the directory is left out", extra={"worker": entry.name, "reason": str(error)})
            return
        member.leaving = entry.draining
        try:
            self._fleet.add(member)
        except TreadleError as error:
            self._refused[entry.name] = entry
            self._retire(member)
            log.error("a worker is left out", extra={"worker": entry.name, "reason": str(error)})
            return
        self._known[entry.name] = _Known(entry, member)
        log.info("worker joined", extra={"worker": entry.name, "address": entry.address})

    def _miss(self, name: str) -> None:
        """A worker is not listed. One that said it leaves has left, one that does not answer is dead; of others Redis may be wrong."""
        known, now = self._known[name], self._clock()
        known.missing_since = now if known.missing_since is None else known.missing_since
        dead = known.member.watch.not_ready_because() is not None
        if known.member.leaving or dead or now - known.missing_since > GONE_SECONDS:
            self._let_go(name)

    def _let_go(self, name: str) -> None:
        member = self._known.pop(name).member
        self._fleet.remove(name)
        self._retire(member)
        log.info("worker left", extra={"worker": name, "in_flight": member.in_flight})

    def _set_leaving(self, member: Member, *, leaving: bool) -> None:
        if member.leaving != leaving:
            member.leaving = leaving
            log.info("worker drains" if leaving else "worker takes requests again", extra={"worker": member.name})

"""Who owns what: the owners of the fabric as this pool knows them, itself among them.

Owns the entries and whether they are fresh. Does not know how news of other owners comes here (the sources in adapters), and
asks nobody: a directory that is down leaves the last list that was known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from engram_pool.domain.compute import Turnstile
from treadle.contract import Unavailable
from treadle.contract.owners import Door, Holding, Owner
from treadle.contract.placement import OWNERS_MAX

log = logging.getLogger("engram_pool")
KEPT_SECONDS = 60.0  # an owner that is not heard of stays on the list this long: its rows come back with it
STALE_SECONDS = 5.0  # after which a directory that does not answer is called stale
HEARTBEAT_SECONDS = 1.0  # as often a watch says something, be it nothing


@dataclass(frozen=True, slots=True)
class Listing:
    """The owners, rising by name. stale: the source of news has not answered for STALE_SECONDS."""

    owners: tuple[Owner, ...]
    stale: bool


@dataclass(slots=True)
class _Known:
    owner: Owner
    lost_at: float | None = None


@dataclass(slots=True)
class _News:
    """Of the source that news comes from; none: this pool stands alone, and is never stale."""

    expected: bool = False
    last_at: float = field(default_factory=time.monotonic)


class Directory:
    """All on the event loop.

    name:     of this pool as an owner
    lasting:  names that stay on the list when they are not heard of: those that settings name
    clock:    monotonic seconds
    """

    def __init__(
        self, name: str, *, lasting: Sequence[str] = (), watchers_max: int = 64, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name, self._lasting, self._clock = name, frozenset(lasting), clock
        self._itself: Owner | None = None
        self._others: dict[str, _Known] = {}
        self._changed, self._generation = asyncio.Condition(), 0
        self._news = _News(last_at=clock())
        self._was_stale, self._closed = False, False
        self._watching = Turnstile("owner watch", "owner watches", watchers_max, retry_after_seconds=1.0)

    # -- this pool ------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Of this pool as an owner."""
        return self._name

    @property
    def itself(self) -> Owner | None:
        """This pool's own entry; None before it serves."""
        return self._itself

    async def tell(self, endpoint: str, doors: Sequence[Door], holdings: Sequence[Holding]) -> None:
        """What this pool tells of itself from now on; nothing changes where it says the same again."""
        before = self._itself
        told = Owner(self._name, endpoint, tuple(doors), tuple(holdings), leaving=before is not None and before.leaving)
        if before is None or replace(told, epoch=before.epoch) != before:
            await self._say(told)

    async def leave(self) -> None:
        """Ask everybody to go elsewhere; this pool answers on."""
        if self._itself is not None:
            await self._say(replace(self._itself, leaving=True))

    async def _say(self, told: Owner) -> None:
        before = 0 if self._itself is None else self._itself.epoch
        self._itself = replace(told, epoch=max(time.time_ns(), before + 1))  # above what an earlier process of ours said
        await self._announce()

    # -- the others -----------------------------------------------------------------------------------------------------

    async def learn(self, owner: Owner) -> None:
        """An owner tells of itself. An older entry than the one that is known is not believed, nor one of this pool's own name."""
        known = self._others.get(owner.name)
        if owner.name == self._name:
            if self._itself is not None and owner.endpoint != self._itself.endpoint and owner.epoch > self._itself.epoch:
                log.error("another pool calls itself as this one does", extra={"owner": owner.name, "endpoint": owner.endpoint})
            return
        if known is None and len(self._others) >= OWNERS_MAX - 1:
            log.error("an owner beyond the limit is left out", extra={"owner": owner.name, "limit": OWNERS_MAX})
            return
        if known is not None and owner.epoch < known.owner.epoch:
            return
        self._others[owner.name] = _Known(owner, None if owner.reachable else self._clock())
        if known is None or known.owner != owner:
            await self._announce()

    async def lose(self, name: str) -> None:
        """An owner is not heard of. One that said it leaves has left."""
        known = self._others.get(name)
        if known is None:
            return
        if known.owner.leaving and name not in self._lasting:
            del self._others[name]
            await self._announce()
        elif known.owner.reachable:
            self._others[name] = _Known(known.owner.unreachable(), self._clock())
            log.warning("an owner is not heard of", extra={"owner": name, "endpoint": known.owner.endpoint})
            await self._announce()

    async def heard(self) -> None:
        """The source of news answered; without news for long the directory counts as stale."""
        self._news.expected, self._news.last_at = True, self._clock()
        await self.look()

    def expect_news(self) -> None:
        """From now on news should come."""
        self._news = _News(True, self._clock())

    async def look(self) -> None:
        """Forget those who were lost long ago, and notice when the directory becomes stale or fresh."""
        now, before = self._clock(), len(self._others)
        self._others = {
            name: known
            for name, known in self._others.items()
            if known.lost_at is None or name in self._lasting or now - known.lost_at < KEPT_SECONDS or self.stale
        }
        if len(self._others) != before or self.stale != self._was_stale:
            if self.stale and not self._was_stale:
                log.warning("the directory does not answer; the last list known is used", extra={"seconds": STALE_SECONDS})
            self._was_stale = self.stale
            await self._announce()

    # -- reading --------------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """No news for STALE_SECONDS from where it should come."""
        return self._news.expected and self.age_seconds > STALE_SECONDS

    @property
    def age_seconds(self) -> float:
        """Since news came; 0 where none is expected."""
        return max(0.0, self._clock() - self._news.last_at) if self._news.expected else 0.0

    def listing(self) -> Listing:
        """All owners known."""
        owners = [known.owner for known in self._others.values()]
        if self._itself is not None:
            owners.append(self._itself)
        return Listing(tuple(sorted(owners, key=lambda owner: owner.name)), self.stale)

    async def watch(self) -> AsyncGenerator[Listing | None, None]:
        """The list at once and after each change; None every HEARTBEAT_SECONDS in between.

        Raises ResourceExhausted beyond `watchers_max`, Unavailable when the pool stops.
        """
        with self._watching.turn():
            seen = -1
            while True:
                await self.wait_changed(seen, HEARTBEAT_SECONDS)
                await self.look()
                if self._closed:
                    raise Unavailable("the pool stops and tells of owners no more")
                if self._generation == seen:
                    yield None
                    continue
                seen = self._generation
                yield self.listing()

    async def close(self) -> None:
        """End all watches."""
        self._closed = True
        await self._announce()

    async def wait_changed(self, seen: int, seconds: float) -> bool:
        """True once something is other than at the generation `seen`; False after `seconds`."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self._generation != seen)
        except TimeoutError:
            return False
        return True

    @property
    def generation(self) -> int:
        """Rises with every change."""
        return self._generation

    async def _announce(self) -> None:
        async with self._changed:
            self._generation += 1
            self._changed.notify_all()

"""The versions that are here and those that other replicas keep: found by name and the beginning of a version.

Owns who uses what, when it was used last, and the bytes of each tenant. Does not touch files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from asm_store.domain.pointers import Pointers, listed
from asm_store.domain.ports import Remote, Replica, Sharing
from asm_store.domain.versions import Kept, Key
from treadle.contract.checks import expect
from treadle.contract.errors import NotFound
from treadle.contract.version import VERSION_PREFIX_FORM, check_name, is_version_prefix


class Catalogue:
    """For one event loop; read by metrics from other threads."""

    def __init__(self, pointers: Pointers, sharing: Sharing, clock: Callable[[], float] = time.time) -> None:
        self._pointers, self._sharing, self._clock = pointers, sharing, clock
        self._kept: dict[Key, Kept] = {}
        self._tell_gone: list[Callable[[Kept], None]] = []

    def all(self) -> list[Kept]:
        """What is here, in no order."""
        return list(self._kept.values())

    def get(self, key: Key) -> Kept | None:
        """The version, if it is here."""
        return self._kept.get(key)

    def add(self, kept: Kept) -> None:
        """It is here now, or again."""
        kept.gone = False
        self._kept[kept.key] = kept

    def drop(self, kept: Kept) -> None:
        """It is here no more."""
        kept.gone = True
        self._kept.pop(kept.key, None)
        for tell in self._tell_gone:
            tell(kept)

    def on_gone(self, tell: Callable[[Kept], None]) -> None:
        """`tell` is called of each version that goes, whatever for."""
        self._tell_gone.append(tell)

    def resolve(self, name: str, version: str) -> Key:
        """The version that a reference means, here or at another replica; version: its beginning; empty: what the pointer names.

        Raises InvalidArgument for what is no name or version, or means several; NotFound listing what there is.
        """
        check_name(name)
        expect(not version or is_version_prefix(version), f"version: {VERSION_PREFIX_FORM}, got {version!r}")
        if not version:
            version = self._pointers.of(name).version
            if not version:
                raise NotFound(f"{name} means no version; {self._there_is(name)}")
        found = sorted(v for v in self.versions_of(name) if v.startswith(version))
        if not found:
            raise NotFound(f"{name} {version} is not kept; {self._there_is(name)}")
        expect(len(found) == 1, f"version: {version} is the beginning of {len(found)} versions of {name}; say more digits")
        return name, found[0]

    def versions_of(self, name: str) -> set[str]:
        """Here and at other replicas."""
        here = {version for kept_name, version in self._kept if kept_name == name}
        return here | {version for replica in self._sharing.others for there, version in replica.versions if there == name}

    def published_at(self, key: Key) -> float:
        """When the last published of its copies was, here or at other replicas, seconds since the epoch; 0: there is none."""
        here = [self._kept[key].stored.record] if key in self._kept else []
        there = [replica.versions[key].record for replica in self._sharing.others if key in replica.versions]
        return max((record.published_at_seconds for record in here + there), default=0.0)

    def owners_of(self, name: str) -> set[str]:
        """Tenants that have versions of a name, here or at any other replica, also one that is away; and whose it is while it means one.

        What it means may be nowhere any more: found torn, it was set aside.
        """
        here = {kept.stored.record.tenant for kept in self.all() if kept.key[0] == name}
        there = (remote for replica in self._sharing.others for key, remote in replica.versions.items() if key[0] == name)
        pointed = self._pointers.of(name).owner
        return here | {remote.record.tenant for remote in there} | ({pointed} if pointed else set())

    async def refresh(self) -> None:
        """Read again what other replicas keep, where that can be read."""
        await self._sharing.refresh()

    async def claim(self, name: str, tenant: str) -> bool:
        """See Sharing."""
        return await self._sharing.claim(name, tenant)

    def remotes(self) -> dict[Key, Remote]:
        """What other replicas keep and this one does not; those that are away, too: their copies are not gone, and come back with them."""
        found: dict[Key, Remote] = {}
        for replica in self._sharing.others:
            found |= {key: remote for key, remote in replica.versions.items() if key not in self._kept}
        return found

    def holders(self, key: Key) -> list[Replica]:
        """Other replicas that keep it, those that are alive first."""
        return sorted(
            (replica for replica in self._sharing.others if key in replica.versions), key=lambda replica: not replica.alive
        )

    def used(self, kept: Kept) -> None:
        """It is used now."""
        kept.used_at_seconds = max(kept.used_at_seconds, self._clock())

    def is_referenced(self, kept: Kept) -> bool:
        """Whether somebody needs it: a pointer, a pin, a Hold or a call of ours; processes that map it are not known here."""
        pinned = kept.pin.until_seconds > self._clock()
        return pinned or kept.holds > 0 or kept.uses > 0 or self._pointers.names(*kept.key)

    def file_bytes(self, tenant: str | None = None) -> int:
        """Bytes of all versions here, or of a tenant's."""
        return sum(kept.stored.file_bytes for kept in self.all() if tenant in (None, kept.stored.record.tenant))

    def tenants(self) -> dict[str, int]:
        """Bytes here of each tenant that has any."""
        return {tenant: self.file_bytes(tenant) for tenant in sorted({kept.stored.record.tenant for kept in self.all()})}

    def _there_is(self, name: str) -> str:
        versions = self.versions_of(name)
        if versions:
            return f"of this name there is {listed(version[:12] for version in versions)}"
        return f"there is {listed({*(key[0] for key in self._kept), *(key[0] for key in self.remotes())})}"


def oldest_first(kept: Iterable[Kept]) -> list[Kept]:
    """In the order of their last use."""
    return sorted(kept, key=lambda one: (one.used_at_seconds, one.key))

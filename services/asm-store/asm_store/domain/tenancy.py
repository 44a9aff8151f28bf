"""Who calls: whose quota counts, and whose versions may be changed. Reading is everybody's who may call at all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asm_store.domain.catalogue import Catalogue
from treadle.contract.errors import AccessDenied


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever calls. admin: may change every tenant's versions."""

    tenant: str
    admin: bool


class Tenants:
    """The tenants of a store, by the sha256 of what they show.

    callers:   by digest; without any, every caller is `nobody`
    nobody:    whoever shows a key of the store itself, or none where none is asked for
    quotas:    most bytes by tenant; others have `bytes_max`
    """

    def __init__(self, nobody: Caller, callers: Mapping[bytes, Caller], quotas: Mapping[str, int], bytes_max: int) -> None:
        self.nobody, self.callers = nobody, dict(callers)
        self._quotas, self._bytes_max = dict(quotas), bytes_max

    def find(self, digest: bytes) -> Caller:
        """Who shows the key of this digest. Only keys that the server has let in come here."""
        return self.callers.get(digest, self.nobody)

    def bytes_max(self, tenant: str) -> int:
        """Most bytes that its versions may take."""
        return self._quotas.get(tenant, self._bytes_max)


async def ask_may_change(catalogue: Catalogue, caller: Caller, name: str) -> None:
    """The same as `check_may_change`, once it is read again what other replicas keep."""
    if not caller.admin:
        await catalogue.refresh()
    check_may_change(catalogue, caller, name)


async def ask_may_publish(catalogue: Catalogue, caller: Caller, name: str) -> None:
    """The same as `ask_may_change`; a free name becomes the caller's: of two tenants that take it at once, one is refused.

    Raises Unavailable for such a name where the other replicas cannot be asked.
    """
    await ask_may_change(catalogue, caller, name)
    if caller.admin or catalogue.owners_of(name):
        return
    if not await catalogue.claim(name, caller.tenant):
        raise AccessDenied(
            f"tenant {caller.tenant} may not publish {name}, which another tenant is publishing at this moment; choose another name"
        )
    await ask_may_change(catalogue, caller, name)  # what was published just before


def check_may_change(catalogue: Catalogue, caller: Caller, name: str) -> None:
    """Raise AccessDenied where `name` is other tenants'. One that means nothing, and of which there is no version, is free for everybody."""
    if caller.admin:
        return
    owners = catalogue.owners_of(name)
    if owners and caller.tenant not in owners:
        raise AccessDenied(
            f"tenant {caller.tenant} may not change {name}, which is another's; choose another name, or show a key of the store's "
            "api_key_file, or set `admin: true` for it in tenants_file"
        )

"""A pointer is flipped to a version that is here, stays here meanwhile, and is its caller's to promote."""

from __future__ import annotations

from asm_store.domain.catalogue import Catalogue
from asm_store.domain.pointers import Pointers
from asm_store.domain.tenancy import Caller, check_may_change
from asm_store.domain.tombstones import Tombstones
from asm_store.domain.versions import Kept, Pointer
from treadle.contract.errors import NotFound


class Promoting:
    """Of one event loop."""

    def __init__(self, catalogue: Catalogue, pointers: Pointers, tombstones: Tombstones) -> None:
        self._catalogue, self._pointers, self._tombstones = catalogue, pointers, tombstones

    async def promote(self, kept: Kept, expected: str | None, caller: Caller) -> Pointer:
        """Let its name mean it. Raises as `Pointers.promote`, AccessDenied, InvalidArgument for a further chunk alone, and NotFound for what was deleted meanwhile.

        A deletion writes its tombstone before it clears the pointer: of the two that happen at once, one sees the other. What is refused
        at the flip leaves the pointer as it is.
        """
        kept.stored.dictionary.require_whole()

        def check() -> None:
            check_may_change(self._catalogue, caller, kept.key[0])
            self._refuse_deleted(kept)

        with kept.in_use():  # it is not evicted
            pointer = await self._pointers.promote(*kept.key, expected, check, kept.stored.record.tenant)
        try:
            self._refuse_deleted(kept)
        except NotFound:
            await self._pointers.clear(kept.key[0], {kept.key[1]})
            raise
        return pointer

    def _refuse_deleted(self, kept: Kept) -> None:
        if kept.gone or self._tombstones.covers(kept.key, kept.stored.record.published_at_seconds):
            raise NotFound(
                f"{kept.key[0]} {kept.key[1]} was deleted meanwhile; while it is listed its files could not be taken away: delete it again"
            )

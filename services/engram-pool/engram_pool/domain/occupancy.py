"""What the versions of a pool take: figures for status and metrics. Nothing is changed here."""

from __future__ import annotations

from engram_pool.domain.catalogue import Catalogue
from engram_pool.domain.storing import VersionStore
from treadle.contract.warm_state import WarmState


class Occupancy:
    """Of the versions in `catalogue`, and of what `store` keeps beside them."""

    def __init__(self, store: VersionStore, catalogue: Catalogue) -> None:
        self._store, self._catalogue = store, catalogue

    @property
    def table_bytes(self) -> int:
        """Bytes of all segments in memory, retired ones included."""
        return self._catalogue.table_bytes

    @property
    def set_aside_bytes(self) -> int:
        """Bytes of corrupt versions that were set aside."""
        return sum(version.bytes for version in self._store.list_set_aside())

    @property
    def in_memory(self) -> bool:
        """True where segments lie in memory, not on a disk."""
        return self._store.in_memory

    @property
    def models_resident(self) -> int:
        """Versions on the list."""
        return len(self._catalogue.listed())

    @property
    def page_bytes(self) -> int:
        """Smallest page size in use for a table; 0 without tables."""
        return min((resident.page_bytes for resident in self._catalogue.all()), default=0)

    @property
    def warm_bytes(self) -> int:
        """Bytes of tables whose pages were entered in this process."""
        return sum(resident.warmth.bytes_entered for resident in self._catalogue.all() if resident.warmth is not None)

    def versions_in(self, state: WarmState) -> int:
        """Versions that stand so."""
        return sum(resident.warm_state is state for resident in self._catalogue.all())

    def node_bytes(self, node: int) -> int:
        """Bytes of segments in memory on a node, by a sample of their pages."""
        total = 0
        for resident in self._catalogue.all():
            if sampled := sum(resident.nodes.values()):
                total += resident.stored.segment_bytes * resident.nodes.get(node, 0) // sampled
        return total

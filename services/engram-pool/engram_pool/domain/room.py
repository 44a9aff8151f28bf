"""Whether a load has room: asked before anything is allocated."""

from __future__ import annotations

import logging

from engram_pool.domain.catalogue import Catalogue
from engram_pool.domain.storing import VersionStore
from treadle.contract import EngramModel, ResourceExhausted

log = logging.getLogger("engram_pool")
LIST_BYTES_MAX = 900 << 10  # manifests of all listed versions: the list is one message, and stays below 1 MiB
SMALL_FILES_BYTES = 2 << 20  # manifest, locks and the like beside the segments of a version


class Room:
    """Limits of a pool over what is resident. `table_bytes_max` 0: as much as the file system holds."""

    def __init__(self, store: VersionStore, catalogue: Catalogue, *, table_bytes_max: int, list_bytes_max: int) -> None:
        self.table_bytes_max, self._list_bytes_max = table_bytes_max, list_bytes_max
        self._store, self._catalogue = store, catalogue

    def check(self, model: EngramModel, needed_bytes: int) -> None:
        """Raise ResourceExhausted, naming what is needed and what there is, unless segments of that size have room.

        Corrupt versions that were set aside make room first, the oldest first.
        """
        self._make_room(needed_bytes)
        left = self._left_bytes()
        if self.table_bytes_max and needed_bytes > left:
            raise ResourceExhausted(
                f"{model.name} needs {needed_bytes} bytes of segments; table_bytes_max {self.table_bytes_max} leaves {max(left, 0)}: "
                "remove a version or raise the setting"
            )
        free = self._store.free_bytes()
        if needed_bytes + SMALL_FILES_BYTES > free:
            raise ResourceExhausted(
                f"{model.name} needs {needed_bytes} bytes of segments; {self._store.folder} has {free} available"
            )
        listed = [len(resident.model.to_json()) for resident in self._catalogue.listed()]
        if sum(listed) + len(model.to_json()) > self._list_bytes_max:
            raise ResourceExhausted(
                f"the manifests of {len(listed)} versions and this one exceed {self._list_bytes_max} bytes: remove a version"
            )

    def _left_bytes(self) -> int:
        """Of `table_bytes_max`, what nothing occupies: served, set aside or left as it was found."""
        aside = sum(version.bytes for version in self._store.list_set_aside())
        return self.table_bytes_max - self._catalogue.table_bytes - aside - self._store.left_bytes()

    def _lacks(self, needed_bytes: int) -> bool:
        full = bool(self.table_bytes_max) and needed_bytes > self._left_bytes()
        return full or needed_bytes + SMALL_FILES_BYTES > self._store.free_bytes()

    def _make_room(self, needed_bytes: int) -> None:
        for version in self._store.list_set_aside():
            if not self._lacks(needed_bytes):
                return
            if self._store.delete_set_aside(version):
                log.warning(
                    "corrupt version deleted to make room",
                    extra={"model": version.name, "version": version.version, "bytes": version.bytes},
                )

"""Pointers as `.pointers/<name>.json`, each replaced at once; what was deleted, in `.deleted.json`. A deletion is written on a full disk, too."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from asm_store.adapters.reserve import RESERVE, Reserve
from asm_store.domain.versions import Key, Pointer, is_seconds
from treadle.chassis.small_files import FOLDER_MODE, PARTIAL, read_small, write_small
from treadle.contract.errors import DataLoss, InvalidArgument, ResourceExhausted
from treadle.contract.version import check_name, check_version

log = logging.getLogger("asm_store")
POINTERS, DELETED_FILE = ".pointers", ".deleted.json"
POINTER_BYTES_MAX, DELETED_BYTES_MAX = 1024, 4 << 20


class PointerFiles:
    """Below one data folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._deleted = folder / POINTERS, folder / DELETED_FILE
        self._folder.mkdir(FOLDER_MODE, exist_ok=True)
        self._reserve = Reserve(self._folder)

    def read(self) -> list[Pointer]:
        """All that can be read; a damaged one is logged, and the name means nothing."""
        found = []
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(PARTIAL):
                path.unlink()
                continue
            if path.name.startswith(RESERVE):
                continue
            try:
                pointer = Pointer.from_json(read_small(path, POINTER_BYTES_MAX))
                if path.name != _file_name(pointer.name):
                    raise InvalidArgument(f"it is the pointer of {pointer.name}")
                found.append(pointer)
            except (DataLoss, InvalidArgument) as error:
                log.error("pointer is damaged; promote a version again", extra={"path": str(path), "reason": str(error)})
        return found

    def write(self, pointer: Pointer) -> None:
        """Replace one."""
        path, data = self._folder / _file_name(pointer.name), pointer.to_json()
        if pointer.version:
            write_small(path, data)
            self.keep_room()
        else:
            self._write_deletion(path, data)

    def forget(self, name: str) -> None:
        """Delete one."""
        (self._folder / _file_name(name)).unlink(missing_ok=True)

    def read_tombstones(self) -> dict[Key, float]:
        """What was deleted, and when, seconds since the epoch."""
        if not self._deleted.exists():
            return {}
        try:
            entries = json.loads(read_small(self._deleted, DELETED_BYTES_MAX))
            return {(check_name(name), check_version(version)): at for name, version, at in entries if is_seconds(at)}
        except (DataLoss, InvalidArgument, ValueError, TypeError) as error:
            log.error("the list of deleted versions is damaged", extra={"path": str(self._deleted), "reason": str(error)})
            return {}

    def write_tombstones(self, tombstones: Mapping[Key, float]) -> None:
        """Replace all."""
        self._write_deletion(self._deleted, json.dumps([[*key, at] for key, at in tombstones.items()]).encode())

    def keep_room(self) -> None:
        """For the deletions that come, where there is some."""
        self._reserve.make(self._deleted.stat().st_size if self._deleted.exists() else 0)

    def _write_deletion(self, path: Path, data: bytes) -> None:
        try:
            write_small(path, data)
        except ResourceExhausted:
            self._reserve.give_up()  # made again once files have gone
            write_small(path, data)
        else:
            self.keep_room()


def _file_name(name: str) -> str:
    return f"{name}.json"

"""Room on the disk that is kept for deletions: what frees a full disk must not be refused for want of room."""

from __future__ import annotations

import logging
from pathlib import Path

from treadle.chassis.small_files import write_small
from treadle.contract.errors import ResourceExhausted

log = logging.getLogger("asm_store")
RESERVE = ".reserve-"  # no name of a dictionary begins with a dot
LIST_ROOM_BYTES = 64 << 10  # beside the list itself: some 400 deletions, all versions of a name
POINTER_ROOM_BYTES, STEP_BYTES = 4 << 10, 4 << 10


class Reserve:
    """Two files in `folder`, for the two that a deletion writes: also where files, not bytes, are used up. Any thread."""

    def __init__(self, folder: Path) -> None:
        self._of_list, self._of_pointer = folder / f"{RESERVE}deleted", folder / f"{RESERVE}pointer"

    def make(self, list_bytes: int) -> None:
        """Keep room for a list of deletions of that size and those that come; without room, as much as there is."""
        wanted = -(-list_bytes // STEP_BYTES) * STEP_BYTES + LIST_ROOM_BYTES
        for path, nbytes in ((self._of_list, wanted), (self._of_pointer, POINTER_ROOM_BYTES)):
            try:
                if not path.exists() or path.stat().st_size < nbytes:
                    write_small(path, bytes(nbytes))
            except (ResourceExhausted, OSError) as error:
                log.warning("no room is kept for deletions", extra={"path": str(path), "reason": str(error)})

    def give_up(self) -> None:
        """Free it."""
        for path in (self._of_list, self._of_pointer):
            path.unlink(missing_ok=True)

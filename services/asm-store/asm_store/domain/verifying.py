"""Digests of what was found at a start, compared while it is served: what does not fit is set aside and served no more."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from asm_store.domain.catalogue import Catalogue
from asm_store.domain.changes import Changes
from asm_store.domain.checking import check_tensor_digests
from asm_store.domain.ports import Folder, Meters, Sharing
from asm_store.domain.versions import Kept
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, map_tensors
from treadle.contract.errors import DataLoss, NotFound, Unavailable

log = logging.getLogger("asm_store")
READ_BYTES = 4 << 20


class Verifying:
    """One pass, at `bytes_per_second` at most; 0: none. `close` ends it."""

    def __init__(
        self, catalogue: Catalogue, folder: Folder, sharing: Sharing, changes: Changes, meters: Meters, changing: asyncio.Lock, *,
        bytes_per_second: int,
    ) -> None:  # fmt: skip
        self._catalogue, self._folder, self._sharing, self._changes = catalogue, folder, sharing, changes
        self._meters, self._changing, self._bytes_per_second = meters, changing, bytes_per_second
        self._stopping = threading.Event()

    async def run(self) -> None:
        """Compare all that is here now. In a thread of its own: it is paced, and lookups need theirs."""
        for kept in self._catalogue.all() if self._bytes_per_second else ():
            if kept.gone:
                continue
            try:
                with kept.in_use():
                    await asyncio.to_thread(self._compare, kept)
            except DataLoss as error:
                await self._set_aside(kept, str(error))
            except (OSError, NotFound, Unavailable) as error:
                if kept.gone or self._stopping.is_set():
                    continue
                log.error("version cannot be verified", extra={"path": str(kept.stored.folder), "reason": str(error)})

    def close(self) -> None:
        """End the pass, within a block."""
        self._stopping.set()

    def _compare(self, kept: Kept) -> None:
        check_version_digests(kept.stored.folder, kept.stored.dictionary, self._pace)

    def _pace(self, nbytes: int) -> None:
        if self._stopping.wait(nbytes / self._bytes_per_second):
            raise Unavailable("the store stops")

    async def _set_aside(self, kept: Kept, reason: str) -> None:
        async with self._changing:
            if kept.gone:
                return
            self._catalogue.drop(kept)
            told = {"path": str(kept.stored.folder), "reason": reason}
            try:
                await asyncio.to_thread(self._folder.set_aside, kept.stored)
                log.error("torn version set aside", extra=told)
            except OSError as error:
                log.error("torn version cannot be set aside; left as it is and not served", extra=told | {"error": str(error)})
        self._meters.torn(1)
        await self._changes.announce()
        self._sharing.told()


def check_version_digests(folder: Path, dictionary: Dictionary, pace: Callable[[int], None] | None = None) -> None:
    """Compare the tensors, and the prefix KV where there is one, with the digests of the manifest. Raises DataLoss."""
    check_tensor_digests(map_tensors(folder / TENSORS_FILE, dictionary), dictionary, pace=pace)
    if dictionary.prefix_kv is not None:
        digest = hashlib.sha256()
        with (folder / PREFIX_KV_FILE).open("rb") as file:
            while block := file.read(READ_BYTES):
                digest.update(block)
                if pace is not None:
                    pace(len(block))
        if digest.hexdigest() != dictionary.prefix_kv:
            raise DataLoss(f"{PREFIX_KV_FILE}: its sha256 is not the manifest's")

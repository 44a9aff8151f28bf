"""Versions of a store whose files cannot be mapped where they lie: brought into a folder of this host, and mapped there.

Owns what is brought, and what goes so that it fits. Several processes of one user may share a folder. Does not know how a version comes,
or whether there still is one: the store is asked at every opening (`store`). How the folder is laid out is `cache_files`.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Set
from pathlib import Path
from typing import Protocol

from treadle.client.asm.cache_files import CacheFiles
from treadle.client.asm.mapped import MappedDictionary
from treadle.client.asm.records import StoredDictionary
from treadle.contract.deadline import Deadline
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable

FETCH_SECONDS_MAX = 3600.0  # of one version, whoever brings it
MOMENT_SECONDS_MAX = 10.0  # for others to make room
OPEN_ATTEMPTS = 8  # of a version that others remove before it is mapped here
VERSIONS_MAX = 1024
CACHE_FOLDER = "asm-cache"  # in $TREADLE_HOME, where nothing else is said
log = logging.getLogger("treadle.client")
Bring = Callable[[Path], object]


class CacheObserver(Protocol):
    """Counts what a cache does. Any thread."""

    def cache_hit(self) -> None:
        """A version was here."""

    def cache_fetched(self, outcome: str, nbytes: int) -> None:
        """A version was asked for: ok or failed; nbytes: that it takes here now."""

    def cache_evicted(self) -> None:
        """A version went: for another one, or because its store keeps it no more."""


class DictionaryCache:
    """A folder of at most `bytes_max` bytes. Any thread."""

    def __init__(self, folder: Path, bytes_max: int, observer: CacheObserver | None = None) -> None:
        """folder: made at the first use, or by `prepare`. Raises InvalidArgument for bytes_max below 1."""
        if bytes_max < 1:
            raise InvalidArgument(f"asm_cache_bytes_max: at least 1, got {bytes_max}")
        self.bytes_max, self._files, self._observer = bytes_max, CacheFiles(folder), observer

    def prepare(self) -> None:
        """Make the folder. Raises InvalidArgument for one that is not ours alone, or that cannot be made."""
        self._files.prepare()

    @property
    def nbytes(self) -> int:
        """Bytes that lie here, and those on their way in."""
        return sum(entry.nbytes for entry in self._files.entries())

    def close(self) -> None:
        """Wait for other processes no more: who does, here, gets Unavailable. What is mapped stays."""
        self._files.closed.set()

    def open(self, stored: StoredDictionary, store: str, bring: Bring) -> MappedDictionary:
        """Map a version, brought first where it is not here; every digest is compared.

        stored: as the store has just told of it; store: its address
        bring:  puts the files, compared with their digests, into a folder that is not there yet: whole, or not at all
        Raises ResourceExhausted where there is no room, Unavailable where the folder cannot be used or another process takes too long,
        DataLoss, and what `bring` raises.
        """
        try:
            self.prepare()
            return self._open(stored, store, bring)
        except InvalidArgument as error:
            raise Unavailable(str(error)) from error
        except OSError as error:
            raise Unavailable(f"asm_cache: {self._files.folder}: {error.strerror or error}") from error

    def keep_listed(self, store: str, versions: Set[str]) -> bool:
        """Remove what came from a store that lists it no more: what is deleted there goes here, too. False: somebody still uses some of it."""
        gone = [entry.version for entry in self._files.entries() if entry.store == store and entry.version not in versions]
        return sum(map(self._remove, gone)) == len(gone)

    def _open(self, stored: StoredDictionary, store: str, bring: Bring) -> MappedDictionary:
        deadline, brought = Deadline.after(FETCH_SECONDS_MAX), False
        for _ in range(OPEN_ATTEMPTS):
            lock = self._files.locked(stored.version, fcntl.LOCK_SH, deadline)  # waits for who brings it
            if not self._files.path(stored.version).is_dir():
                os.close(lock)
                brought = self._bring(stored, store, bring, deadline)
                continue
            try:
                mapped = self._mapped(stored, lock, verify=not brought)
            except (DataLoss, NotFound) as error:
                if brought:
                    raise
                log.warning("a cached dictionary is damaged", extra={"version": stored.version, "reason": str(error)})
                if not self._remove(stored.version):  # nothing against the store's own: it may be opened once they are gone
                    raise Unavailable(
                        f"{stored.ref} is damaged in {self._files.folder}, and another process has it open"
                    ) from error
                continue
            if not brought and self._observer is not None:
                self._observer.cache_hit()
            return mapped
        raise Unavailable(f"asm_cache: {stored.ref} goes from {self._files.folder} as often as it comes; raise asm_cache_bytes_max")

    def _mapped(self, stored: StoredDictionary, lock: int, *, verify: bool) -> MappedDictionary:
        """Owns `lock`. What a crash of the host may have torn is not believed: all of it is read, but for what has just come."""
        folder = self._files.path(stored.version)
        prefix_kv = folder / PREFIX_KV_FILE if stored.dictionary.prefix_kv is not None else None
        mapped = MappedDictionary(stored.dictionary, stored.version, folder / TENSORS_FILE, prefix_kv, lock=lock)
        try:
            os.utime(lock)
            if verify:
                mapped.verify()
        except BaseException:
            mapped.close()
            raise
        return mapped

    def _bring(self, stored: StoredDictionary, store: str, bring: Bring, deadline: Deadline) -> bool:
        """True: it has come; False: another process was quicker."""
        lock = self._files.locked(stored.version, fcntl.LOCK_EX, deadline)
        try:
            path = self._files.path(stored.version)
            if path.is_dir():
                return False
            try:
                self._files.sweep(stored.version)
                self._make_room(stored, store, lock)
                bring(path)
            except BaseException:
                self._files.forget(stored.version)
                self._tell_fetched("failed", 0)
                raise
            self._tell_fetched("ok", stored.file_bytes)
            return True
        finally:
            os.close(lock)

    def _make_room(self, stored: StoredDictionary, store: str, lock: int) -> None:
        """Reserve what a version takes; what is in its way goes, the least recently used first. Raises ResourceExhausted."""
        room = self._files.locked_room(Deadline.after(MOMENT_SECONDS_MAX))
        try:
            others = [entry for entry in self._files.entries() if entry.version != stored.version]
            taken, count = sum(entry.nbytes for entry in others), len(others)
            for entry in sorted(others, key=lambda entry: (entry.whole, entry.used_at)):
                fits = taken + stored.file_bytes <= self.bytes_max and count < VERSIONS_MAX
                if not (fits and entry.whole) and self._remove(entry.version, counted=entry.whole):
                    taken, count = taken - entry.nbytes, count - 1
            if taken + stored.file_bytes > self.bytes_max or count >= VERSIONS_MAX:
                raise ResourceExhausted(
                    f"{stored.ref} has {stored.file_bytes} bytes; of {self.bytes_max} in {self._files.folder} {taken} are in use; "
                    "raise asm_cache_bytes_max, or use fewer prefixes at once"
                )
            self._files.note(lock, stored.file_bytes, store)
        finally:
            os.close(room)

    def _remove(self, version: str, *, counted: bool = True) -> bool:
        removed = self._files.remove(version)
        if removed and counted and self._observer is not None:
            self._observer.cache_evicted()
        return removed

    def _tell_fetched(self, outcome: str, nbytes: int) -> None:
        if self._observer is not None:
            self._observer.cache_fetched(outcome, nbytes)

"""An unfinished build: a folder `.building` in the folder that it will fill, with what is done and what it belongs to.

Owns its lock, its state and the layers that are made. A build that goes on must be the same build: what differs is refused by name.
Does not decide when to save.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.building.rows import Stored
from treadle.contract.dictionary_file import DTYPES, MANIFEST_FILE, TENSORS_FILE, check_digests, map_tensors, read_manifest
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound, Unavailable
from treadle.contract.lasting_files import sync_folder, write_through

FOLDER, STATE, TRACES, LOCK = ".building", "state.json", "traces.json", "lock"
SCHEMA = "treadle.dictionary-build/2"
VERSION = "version"  # in a state: of the dictionary that the build is about to write


class WorkFolder:
    """The state of a build into `out`, held for one process at a time until `close` or the process ends.

    finished: the dictionary of this build is whole, and only this folder is left to remove; known from `resume` on
    Raises InvalidArgument (a finished dictionary is there), Unavailable (another process builds there).
    """

    def __init__(self, out: Path, *, restart: bool = False) -> None:
        self.path, self.finished, self._out = out / FOLDER, False, out
        if (out / MANIFEST_FILE).exists() and not self.path.exists():
            raise self._taken()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o640)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._lock)
            raise Unavailable(f"{out}: another process is building there") from error
        if restart:
            self._empty(LOCK)

    def resume(self, identity: Mapping[str, str]) -> dict[str, Any]:
        """The saved state of this build, {} where there is none yet.

        identity: what must be the same. Raises FingerprintMismatch naming the field that differs, DataLoss (a damaged state),
        InvalidArgument (a finished dictionary of another build is there; of what that build left nothing stays).
        """
        path, version = self.path / STATE, _version_of(self._out)
        if not path.exists():
            if version:
                self.remove()
                raise self._taken()
            self.save(identity, {})
            return {}
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            before, state = dict(found["identity"]), dict(found["state"])
            if found["schema"] != SCHEMA:
                raise ValueError(found["schema"])
        except (ValueError, KeyError, TypeError) as error:
            raise DataLoss(f"{path}: damaged; begin again with --restart") from error
        differs = [field for field in sorted(before.keys() | identity.keys()) if before.get(field) != identity.get(field)]
        self.finished = bool(version) and version == state.get(VERSION)
        if version and (differs or not self.finished):
            if self.finished:
                self.remove()
            raise self._taken()
        if differs:
            field = differs[0]
            raise FingerprintMismatch(
                f"unfinished build {self.path}, which --restart forgets: {field}", identity.get(field), before.get(field)
            )
        return state

    def save(self, identity: Mapping[str, str], state: Mapping[str, Any]) -> None:
        """Keep `state` from here on, whole or not at all."""
        self._replace(STATE, {"schema": SCHEMA, "identity": dict(identity), "state": dict(state)})

    def keep_traces(self, traces: Sequence[Sequence[int]]) -> None:
        """Keep traces that the model wrote: a build that goes on does not write them again."""
        self._replace(TRACES, [list(trace) for trace in traces])

    def traces(self) -> tuple[tuple[int, ...], ...]:
        """The traces that were kept; () where none were. Raises DataLoss where they are damaged."""
        path = self.path / TRACES
        if not path.exists():
            return ()
        try:
            return tuple(tuple(map(int, trace)) for trace in json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise DataLoss(f"{path}: damaged; begin again with --restart") from error

    def keep_layer(self, layer: int, parts: Mapping[str, Stored]) -> None:
        """Keep a layer's tensors; it is done from here on, also after a power cut."""
        partial = self.path / f"layer{layer}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        for part, (dtype, array) in parts.items():
            with (partial / f"{part}.{dtype}.npy").open("wb") as file:
                np.save(file, np.ascontiguousarray(array, DTYPES[dtype]), allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
        sync_folder(partial)
        if self._layer(layer).exists():  # a torn one, which is made again
            shutil.rmtree(self._layer(layer))
        partial.rename(self._layer(layer))
        sync_folder(self.path)

    def has_layer(self, layer: int) -> bool:
        """Whether a layer is done; one that is torn is not: it is made again."""
        try:
            return self._layer(layer).is_dir() and bool(self.layer(layer))
        except DataLoss:
            return False

    def layer(self, layer: int) -> dict[str, Stored]:
        """A done layer's tensors by part, mapped read-only. Raises DataLoss where a file is torn."""
        parts: dict[str, Stored] = {}
        for path in sorted(self._layer(layer).iterdir()):
            try:
                part, dtype, _ = path.name.split(".")
                array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError) as error:
                raise DataLoss(f"{path}: damaged; begin again with --restart") from error
            parts[part] = dtype, array
        return parts

    def remove(self) -> None:
        """Forget it all: the build is finished. The state goes last, so that a build killed on the way knows what is left for its own."""
        self._empty(LOCK, STATE)
        self._empty(LOCK)
        (self.path / LOCK).unlink()
        self.path.rmdir()

    def close(self) -> None:
        """Let another process go on."""
        os.close(self._lock)

    def _replace(self, name: str, content: Any) -> None:
        """Write a file as JSON, whole or not at all, also after a power cut."""
        partial = self.path / f"{name}.partial"
        write_through(partial, json.dumps(content).encode())
        partial.rename(self.path / name)
        sync_folder(self.path)

    def _taken(self) -> InvalidArgument:
        return InvalidArgument(f"{self._out}: holds a dictionary already; choose another place with --out, or remove it")

    def _empty(self, *kept: str) -> None:
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name not in kept:
                path.unlink()

    def _layer(self, layer: int) -> Path:
        return self.path / f"layer{layer}"


def _version_of(out: Path) -> str:
    """Of the dictionary in a folder; "" where none is, or one that was torn when the machine stopped: that is made again."""
    try:
        dictionary = read_manifest(out)
        check_digests(map_tensors(out / TENSORS_FILE, dictionary), dictionary)
    except (NotFound, InvalidArgument, DataLoss):
        return ""
    return dictionary.version

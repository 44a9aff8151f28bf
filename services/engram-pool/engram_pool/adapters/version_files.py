"""The files of one version: written into a staging folder, read back and checked against each other.

Does not know where versions lie beside each other (segment_folder).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from engram_pool.adapters.version_locks import FILE_MODE
from engram_pool.domain.ports import Standing, StoredVersion, TokenMap
from engram_pool.domain.token_maps import token_map_digest
from treadle.contract import DataLoss, EngramModel, InvalidArgument
from treadle.contract.engram_model import MANIFEST_BYTES_MAX, SCHEMA
from treadle.kernels.segment import Segment, SegmentWriter

FOLDER_MODE = 0o750
COMMIT_MARKER, LOCK_NAME, RETIRED_NAME = "model.json", "lock", "retired"
SEGMENT_SCHEMA = "treadle.segment/1"


class StagedVersion:
    """A version being written in the folder `path`; `put_in_place` renames it to where readers find it."""

    def __init__(self, path: Path, put_in_place: Callable[[Path, EngramModel], StoredVersion]) -> None:
        self._path, self._put_in_place = path, put_in_place
        self._writers: dict[int, SegmentWriter] = {}
        self._open = ExitStack()

    def writer(self, layer: int, rows: int, row_bytes: int, token_map: TokenMap | None) -> SegmentWriter:
        """Begin the table of `layer`; its whole file is allocated. Raises ResourceExhausted."""
        writer = SegmentWriter(self._path / segment_name(layer), rows=rows, row_bytes=row_bytes, token_map=token_map)
        self._writers[layer] = self._open.enter_context(writer)
        return writer

    def commit(self, model: EngramModel) -> StoredVersion:
        """Publish every segment, write the manifest last, and show the version."""
        manifest = model.to_json()
        for layer, writer in self._writers.items():
            writer.publish({"schema": SEGMENT_SCHEMA, "model": manifest.decode(), "layer": str(layer)})
        self._open.close()
        write_small(self._path / LOCK_NAME, b"")
        write_small(self._path / COMMIT_MARKER, manifest)
        return self._put_in_place(self._path, model)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        self._open.close()
        shutil.rmtree(self._path, ignore_errors=True)


def map_version(path: Path) -> StoredVersion:
    """Map the version in the folder `path/..<model>/<version>`, headers and sizes checked.

    Raises DataLoss if something is torn, missing or belongs to another version; InvalidArgument for a manifest of another
    release; OSError if the system fails: then nothing is known about the version.
    """
    marker = path / COMMIT_MARKER
    manifest = read_small(marker, MANIFEST_BYTES_MAX)
    model = _read_manifest(manifest, path)
    if model.name != path.parent.name or model.version != path.name or model.to_json() != manifest:
        raise DataLoss(f"{marker} is the manifest of {model.name} {model.version}")
    with ExitStack() as opened:
        segments = {}
        for layer in model.layers:
            segments[layer] = segment = opened.enter_context(_map_segment(path / segment_name(layer)))
            _check_segment(segment, model, layer)
        standing = _read_standing(path / RETIRED_NAME)
        lock_path = path / LOCK_NAME
        if not lock_path.exists():
            write_small(lock_path, b"")
        opened.pop_all()  # the caller's from here on
    return StoredVersion(model, model.version, segments, lock_path, marker.stat().st_mtime, standing)


def segment_name(layer: int) -> str:
    """File name of a layer's table."""
    return f"layer-{layer}.safetensors"


def write_small(path: Path, data: bytes) -> None:
    """Write or replace a file at once: others see the old or the new content, also after a crash."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(descriptor, FILE_MODE)  # whatever the umask
        os.fsync(descriptor)
    partial.replace(path)
    sync_folder(path.parent)


def read_small(path: Path, bytes_max: int) -> bytes:
    """Read a file, not through a link. Raises DataLoss if it is missing, a link or larger than `bytes_max`, OSError as it comes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):  # too many open files, say: no word about this one
            raise
        raise DataLoss(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise DataLoss(f"{path} is larger than {bytes_max} bytes")
    return data


def sync_folder(path: Path) -> None:
    """Make renames in a folder last."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_real_folder(path: Path) -> bool:
    """True for a folder that is no link."""
    return stat.S_ISDIR(path.lstat().st_mode)


def _read_manifest(text: bytes, path: Path) -> EngramModel:
    """The manifest of the version in `path`. What we cannot read is DataLoss only if it is not what was written."""
    try:
        return EngramModel.from_json(text)
    except InvalidArgument as error:
        if _schema(text) not in (None, SCHEMA):
            raise InvalidArgument(f"{path} was written by another release: {error}") from error
        if hashlib.sha256(text).hexdigest() != path.name:
            raise DataLoss(f"{path / COMMIT_MARKER} is damaged: {error}") from error
        raise


def _schema(text: bytes) -> str | None:
    """The schema that a manifest names; None if it names none of ours."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError):
        return None
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    return schema if isinstance(schema, str) and schema.startswith(SCHEMA.partition("/")[0] + "/") else None


def _map_segment(path: Path) -> Segment:
    if path.is_symlink() or not path.is_file():
        raise DataLoss(f"{path} is missing, or no plain file")
    return Segment(path)


def _check_segment(segment: Segment, model: EngramModel, layer: int) -> None:
    """Raise DataLoss unless the file holds this layer of this version."""
    table, found = model.table(layer), segment.metadata
    if found.get("model", "").encode() != model.to_json() or found.get("layer") != str(layer):
        raise DataLoss(f"{segment.path} holds another version or layer")
    if segment.row_count != table.rows or segment.row_bytes != model.row.bytes:
        raise DataLoss(
            f"{segment.path} holds {segment.row_count} rows of {segment.row_bytes} bytes, the manifest says {table.rows}"
        )
    digest = None if segment.token_map is None else token_map_digest(segment.token_map)
    if digest != model.token_map:
        raise DataLoss(f"{segment.path} holds another token map")


def _read_standing(path: Path) -> Standing:
    if not path.exists():
        return Standing.SERVED
    text = read_small(path, 64).decode(errors="replace")
    return Standing(text) if text in set(Standing) else Standing.REPLACED

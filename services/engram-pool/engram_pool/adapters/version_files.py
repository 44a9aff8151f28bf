"""The files of one version: written into a staging folder, read back and checked against each other.

Does not know where versions lie beside each other (segment_folder).
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

from engram_pool.adapters.kept_files import CARD_NAME, FUSION_NAME, KEPT_KEY, read_kept, write_kept
from engram_pool.adapters.segment_places import SegmentPlaces, Writer
from engram_pool.domain.origins import ORIGIN_BYTES_MAX
from engram_pool.domain.storing import Ranges, Standing, StoredVersion, TokenMap
from engram_pool.domain.token_maps import token_map_digest
from treadle.chassis.small_files import read_small, write_small
from treadle.contract import DataLoss, EngramModel, InvalidArgument, canonical_json
from treadle.contract.engram_model import MANIFEST_BYTES_MAX, SCHEMA
from treadle.kernels.segment import Segment

COMMIT_MARKER, LOCK_NAME, RETIRED_NAME, ORIGIN_NAME = "model.json", "lock", "retired", "origin.json"
SEGMENT_SCHEMA = "treadle.segment/1"


class StagedVersion:
    """A version being written in the folder `path`, its segments in `places`; `put_in_place` renames it to where readers find it."""

    def __init__(self, path: Path, places: SegmentPlaces, put_in_place: Callable[[Path, EngramModel], StoredVersion]) -> None:
        self._path, self._places, self._put_in_place = path, places, put_in_place
        self._writers: dict[int, Writer] = {}
        self._kept: dict[str, str] = {}  # name of a file beside the segments -> its sha256
        self._open = ExitStack()

    def writer(
        self, layer: int, rows: int, row_bytes: int, token_map: TokenMap | None, header_bytes: int, held: Ranges | None
    ) -> Writer:
        """Begin the table of `layer`; all that will be written of its file is allocated. Raises ResourceExhausted."""
        writer = self._places.writer(self._path, layer, rows, row_bytes, token_map, header_bytes, held)
        self._writers[layer] = self._open.enter_context(writer)
        return writer

    def keep_fusion(self, pieces: Iterable[bytes]) -> str:
        """Write fusion weights; their sha256. Raises ResourceExhausted if there is no room."""
        self._kept[FUSION_NAME] = write_kept(self._path / FUSION_NAME, pieces)
        return self._kept[FUSION_NAME]

    def keep_card(self, card_json: bytes) -> None:
        """Write the card."""
        self._kept[CARD_NAME] = write_kept(self._path / CARD_NAME, [card_json])

    def keep_origin(self, origin: bytes) -> None:
        """Write down where the rows come from."""
        write_small(self._path / ORIGIN_NAME, origin)

    def commit(self, model: EngramModel) -> StoredVersion:
        """Publish every segment, write the manifest last, and show the version."""
        manifest = model.to_json()
        common = {"schema": SEGMENT_SCHEMA, "model": manifest.decode()}
        if self._kept:
            common[KEPT_KEY] = canonical_json(self._kept).decode()
        for layer, writer in self._writers.items():
            writer.publish(common | {"layer": str(layer)})
        self._open.close()
        self._places.seal(self._path, model)
        write_small(self._path / LOCK_NAME, b"")
        write_small(self._path / COMMIT_MARKER, manifest)
        return self._put_in_place(self._path, model)

    def discard(self) -> None:
        """Remove what was written, unless it was committed."""
        self._open.close()
        if self._path.exists():
            self._places.free(self._path)
            shutil.rmtree(self._path, ignore_errors=True)


def map_version(path: Path, places: SegmentPlaces) -> StoredVersion:
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
            segments[layer] = segment = opened.enter_context(places.map(path, layer))
            _check_segment(segment, model, layer)
        fusion, card_json = read_kept(path, model, [segment.metadata for segment in segments.values()])
        standing = _read_standing(path / RETIRED_NAME)
        origin = read_small(path / ORIGIN_NAME, ORIGIN_BYTES_MAX) if (path / ORIGIN_NAME).exists() else b""
        lock_path = path / LOCK_NAME
        if not lock_path.exists():
            write_small(lock_path, b"")
        opened.pop_all()  # the caller's from here on
    loaded_at = marker.stat().st_mtime
    return StoredVersion(model, model.version, segments, lock_path, loaded_at, standing, fusion, card_json, origin)


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

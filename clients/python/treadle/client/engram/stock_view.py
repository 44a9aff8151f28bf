"""A resident table as checkpoint files of stock vLLM: Qwen PLE rows as the shard tensors that its loaders, and its `host_file_gather`, read.

Owns the header of those files and how the rows get behind it: as the same blocks where the file system shares blocks between files,
else as a copy that is asked for. Other families are refused with the reason. Does not start vLLM.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from treadle.client.engram.pool_types import OpenedModel, SegmentPlace
from treadle.client.engram.sources import map_segments
from treadle.contract import DataLoss, EngramModel, InvalidArgument, Unavailable

SHARDS, SHARDS_MAX = 512, 1 << 16  # `split_ngram_parts` of the model's config, and vLLM's own default
LAYERS_PREFIX = "model.language_model.layers"
INDEX = "model.safetensors.index.json"
HEADER_ALIGN_BYTES = 64 << 10  # whole blocks of every file system that shares them
COPY_BYTES = 8 << 20
_CLONE_RANGE = 0x4020940D  # FICLONERANGE
_CANNOT_SHARE = {errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM}
_SHARD = re.compile(r"(?P<layers>.*layers)\.(?P<layer>\d+)\.ple\.ple_embedding\.ngram_embedding\.shard_(?P<shard>\d+)\.weight")
_DTYPES = {"bf16": ("BF16", 2), "fp8_e4m3": ("F8_E4M3", 1)}


@dataclass(frozen=True, slots=True)
class View:
    """What was written. shared: the rows are the segments' own blocks; else they are a copy."""

    files: tuple[Path, ...]
    row_bytes_total: int
    shared: bool


def export_view(
    opened: OpenedModel, folder: Path, *, copy: bool = False, shards: int = SHARDS, layers_prefix: str = LAYERS_PREFIX,
    checkpoint: Path | None = None,
) -> View:  # fmt: skip
    """Write a version's tables into `folder`, new or empty, one safetensors file for each layer, and the index that names them.

    copy:          allow a copy where the file system cannot share blocks with the pool's segments
    shards:        tensors that a table is split into, `split_ngram_parts` of the model
    layers_prefix: of the tensors' names, up to the layer's number
    checkpoint:    a model folder that the view completes: its other files are linked, its own tables left out, and shards and names are
                   taken from it
    Raises InvalidArgument for a family or rows that stock vLLM does not read so, Unavailable where blocks cannot be shared and no copy
    is allowed, DataLoss, NotFound. Nothing is left behind by a failure.
    """
    model = opened.resident.model
    dtype, columns = _stock_rows(model)
    if checkpoint is not None:
        layers_prefix, shards = _names_in(checkpoint, model)
    elif dtype != "BF16":
        raise InvalidArgument(f"{model.name}: its scale stands in the checkpoint, beside the tables: give the checkpoint's folder")
    if not 1 <= shards <= SHARDS_MAX:
        raise InvalidArgument(f"shards: 1 to {SHARDS_MAX}, got {shards}")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise InvalidArgument(f"{folder}: a new or empty folder is needed")
    written: list[Path] = []
    try:
        index, shared = _write_tables(opened, folder, written, _Naming(layers_prefix, shards, dtype, columns), copy=copy)
        if checkpoint is not None:
            index = _link_rest(checkpoint, folder, written) | index
        written.append(folder / INDEX)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}, indent=1))
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    total = sum(place.rows * place.row_bytes for place in opened.segments)
    return View(tuple(written), total, shared)


@dataclass(frozen=True, slots=True)
class _Naming:
    layers_prefix: str
    shards: int
    dtype: str
    columns: int

    def tensors(self, place: SegmentPlace) -> dict[str, dict[str, object]]:
        """The entries of a file's header: the shards of one table, one behind the other."""
        each = -(-place.rows // self.shards)
        entries: dict[str, dict[str, object]] = {}
        for shard in range(-(-place.rows // each)):
            first, last = shard * each, min((shard + 1) * each, place.rows)
            name = f"{self.layers_prefix}.{place.layer}.ple.ple_embedding.ngram_embedding.shard_{shard}.weight"
            offsets = [first * place.row_bytes, last * place.row_bytes]
            entries[name] = {"dtype": self.dtype, "shape": [last - first, self.columns], "data_offsets": offsets}
        return entries


def _stock_rows(model: EngramModel) -> tuple[str, int]:
    """Dtype and columns of a row as stock vLLM reads it. Raises InvalidArgument with the reason where it cannot."""
    if model.family != "qwen-ple":
        raise InvalidArgument(
            f"{model.name} is of the family {model.family}: stock vLLM 0.32.0 reads its tables into pinned memory of its own, rows and "
            "scales apart, and takes no files in their place; docs/vllm.md says where"
        )
    dtype, item_bytes = _DTYPES.get(model.row.dtype, ("", 0))
    if not dtype or model.row.bytes != model.row.dim * item_bytes:
        raise InvalidArgument(
            f"{model.name}: rows of {model.row.bytes} bytes, {model.row.dtype}, carry their scales; stock vLLM reads bf16, or fp8 with one "
            "scale of all rows"
        )
    return dtype, model.row.dim


def _write_tables(
    opened: OpenedModel, folder: Path, written: list[Path], naming: _Naming, *, copy: bool
) -> tuple[dict[str, str], bool]:
    index: dict[str, str] = {}
    shared = True
    with ExitStack() as held:
        map_segments(opened, held)  # under the version's lock; headers are compared
        for place in opened.segments:
            path = folder / f"treadle-ple-{place.layer}.safetensors"
            tensors = naming.tensors(place)
            written.append(path)
            shared &= _write_table(path, place, tensors, copy=copy)
            index |= dict.fromkeys(tensors, path.name)
    return index, shared


def _write_table(path: Path, place: SegmentPlace, tensors: Mapping[str, object], *, copy: bool) -> bool:
    """True: the rows are the segment's blocks."""
    text = json.dumps({"__metadata__": {"format": "pt"}} | dict(tensors), separators=(",", ":")).encode()
    begin = -(-(8 + len(text)) // HEADER_ALIGN_BYTES) * HEADER_ALIGN_BYTES
    rows_at, size = place.segment_offset_bytes + place.rows_offset_bytes, place.rows * place.row_bytes
    with place.path.open("rb") as segment, path.open("xb") as file:
        file.write((begin - 8).to_bytes(8, "little") + text.ljust(begin - 8))
        file.truncate(begin + size)
        file.flush()
        cloned = _clone(segment.fileno(), rows_at, file.fileno(), begin, size)
        if not cloned and not copy:
            raise Unavailable(
                f"{path}: this file system shares no blocks with {place.path}: tmpfs never does, XFS and btrfs do where both files lie on "
                "the same one; give --copy for a second copy of the rows"
            )
        _copy(segment.fileno(), rows_at + cloned, file.fileno(), begin + cloned, size - cloned)
    return cloned > 0


def _clone(source: int, source_at: int, target: int, target_at: int, size: int) -> int:
    """How many bytes the files share from now on: whole blocks; 0: the file system cannot."""
    block = os.fstatvfs(target).f_bsize
    whole = size // block * block
    if not whole:
        return 0
    try:
        fcntl.ioctl(target, _CLONE_RANGE, struct.pack("qQQQ", source, source_at, whole, target_at))
    except OSError as error:
        if error.errno in _CANNOT_SHARE:
            return 0
        raise Unavailable(f"the blocks cannot be shared: {error}") from error
    return whole


def _copy(source: int, source_at: int, target: int, target_at: int, size: int) -> None:
    done = 0
    while done < size:
        data = os.pread(source, min(COPY_BYTES, size - done), source_at + done)
        if not data:
            raise DataLoss("the segment became shorter while it was copied")
        done += os.pwrite(target, data, target_at + done)


def _names_in(checkpoint: Path, model: EngramModel) -> tuple[str, int]:
    """Prefix and number of shards as a checkpoint names its tables. Raises InvalidArgument if its layers are not the model's."""
    found = [match for name in _weight_map(checkpoint) if (match := _SHARD.fullmatch(name))]
    prefixes, layers = {match["layers"] for match in found}, {int(match["layer"]) for match in found}
    if len(prefixes) != 1 or layers != set(model.layers):
        raise InvalidArgument(f"{checkpoint}: its tables are of layers {sorted(layers)}, {model.name} has {list(model.layers)}")
    return prefixes.pop(), max(int(match["shard"]) for match in found) + 1


def _link_rest(checkpoint: Path, folder: Path, written: list[Path]) -> dict[str, str]:
    """Link all but the tables' files; the index of what is linked. Raises InvalidArgument for a file that holds tables and more."""
    weights = _weight_map(checkpoint)
    tables = {file for name, file in weights.items() if _SHARD.fullmatch(name)}
    rest = {name: file for name, file in weights.items() if not _SHARD.fullmatch(name)}
    if mixed := sorted(tables & set(rest.values())):
        raise InvalidArgument(
            f"{checkpoint}: {mixed[0]} holds tables and other weights; vLLM would read the tables twice: split it first"
        )
    for path in _files_of(checkpoint):
        if path.name not in tables and path.name != INDEX:
            written.append(folder / path.name)
            (folder / path.name).symlink_to(path.resolve())
    return rest


def _files_of(checkpoint: Path) -> Iterator[Path]:
    return (path for path in sorted(checkpoint.iterdir()) if path.is_file())


def _weight_map(checkpoint: Path) -> dict[str, str]:
    try:
        weights = json.loads((checkpoint / INDEX).read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgument(f"{checkpoint}: no {INDEX} that says which file holds which tensor ({error})") from error
    return {str(name): str(file) for name, file in weights.items()}

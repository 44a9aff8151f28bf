"""What a segment file looks like: a safetensors file whose rows begin at a 2 MiB boundary, or at a 64 KiB one if they are few.

    0         u64 length of the JSON header; the header: metadata, tensors, spaces up to `header_bytes`
    header_bytes
              rows       U8  [N, row_bytes]
              crc32c     U32 [chunks]          of each CHUNK_BYTES of the rows
              sha256     U8  [chunks, 32]      of the same: the table's version is made of them; older files have none
              token_map  I32 [V]               where the family has one
              pad        U8  [...]             zeros up to a multiple of 2 MiB, behind a smaller header of 64 KiB

hugetlbfs has whole huge pages only, and a large table gains by them; to a memory of 3 MB a layer the same boundaries would add as
much again. The format allows neither holes nor trailing bytes, so the tensors follow each other and `pad` is one of them. The first metadata
entry is the *seal*: the CRC32C of the header (with eight zeros in the seal's place), the digests and the token map. Seal and
chunk checksums together cover every byte; `pad` is all zeros. Where an owner keeps some rows only (metadata `held`), the file has
the same size and offsets, and chunks without such rows are holes: never written, checked or read. Owns names, offsets and the
header's text; reads and writes no file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.contract import DataLoss, InvalidArgument
from treadle.contract.engram_model import ROWS_MAX
from treadle.contract.row_layout import ROW_BYTES_MAX, ROW_BYTES_MIN
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels import crc32c
from treadle.kernels.pages import HUGE_PAGE_BYTES

SCHEMA = "treadle.segment/1"
HEADER_BYTES = HUGE_PAGE_BYTES  # the most, and what large tables have: a manifest of 1 MiB fits
SMALL_ALIGN_BYTES = 64 << 10  # whole pages on every machine
SMALL_TABLE_BYTES = 32 << 20  # a table below this has few TLB misses to lose
SEAL_KEY = "treadle.crc32c"
TOKEN_MAP_MAX = 1 << 24  # raw token ids; the largest vocabularies have some 260,000
DIGEST_BYTES = 32  # sha256
_LENGTH_BYTES = 8
_BEFORE_SEAL = f'{{"__metadata__":{{"{SEAL_KEY}":"'.encode()
_SEAL_AT = _LENGTH_BYTES + len(_BEFORE_SEAL)
_NO_SEAL = b"00000000"


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of a segment's parts in bytes from the start of the file. Raises InvalidArgument for sizes beyond the limits."""

    rows: int
    row_bytes: int
    token_map_size: int = 0
    header_bytes: int = HEADER_BYTES
    digests: bool = True

    def __post_init__(self) -> None:
        if self.header_bytes % SMALL_ALIGN_BYTES or not 0 < self.header_bytes <= HEADER_BYTES:
            raise InvalidArgument(
                f"header: a multiple of {SMALL_ALIGN_BYTES} bytes up to {HEADER_BYTES}, got {self.header_bytes!r}"
            )
        for name, value, low, high in (
            ("rows", self.rows, 1, ROWS_MAX),
            ("row_bytes", self.row_bytes, ROW_BYTES_MIN, ROW_BYTES_MAX),
            ("token_map", self.token_map_size, 0, TOKEN_MAP_MAX),
        ):
            if type(value) is not int or not low <= value <= high:
                raise InvalidArgument(f"{name}: {low} to {high}, got {value!r}")

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows * self.row_bytes

    @property
    def chunks(self) -> int:
        """Chunks of CHUNK_BYTES; the last one may be shorter."""
        return -(-self.table_bytes // CHUNK_BYTES)

    @property
    def tail_at(self) -> int:
        """Where the crc32c tensor begins; sha256 and token map follow it at once."""
        return self.header_bytes + self.table_bytes

    @property
    def token_map_at(self) -> int:
        """Where the token map begins, if there is one, behind the crc32c and sha256 tensors."""
        return self.tail_at + self.chunks * (4 + DIGEST_BYTES * self.digests)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the crc32c and sha256 tensors and the token map."""
        return self.token_map_at - self.tail_at + 4 * self.token_map_size

    @property
    def pad_at(self) -> int:
        """Where the pad begins."""
        return self.tail_at + self.tail_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file, a multiple of 2 MiB, or of 64 KiB behind a header smaller than that."""
        return _up(self.pad_at, HUGE_PAGE_BYTES if self.header_bytes == HEADER_BYTES else SMALL_ALIGN_BYTES)

    def stored_bytes(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes that the file takes if it holds these runs of chunks only."""
        return self.file_bytes - self.table_bytes + sum(self.span(*run)[1] - self.span(*run)[0] for run in runs)

    def span(self, first_chunk: int, last_chunk: int) -> tuple[int, int]:
        """Bytes [begin, end) of the rows that the chunks [first, last) cover, counted from the first row."""
        return first_chunk * CHUNK_BYTES, min(last_chunk * CHUNK_BYTES, self.table_bytes)

    def tensors(self) -> dict[str, dict[str, Any]]:
        """The entries of the safetensors header; offsets there count from the end of the header."""
        parts: list[tuple[str, str, list[int], int]] = [
            ("rows", "U8", [self.rows, self.row_bytes], self.table_bytes),
            ("crc32c", "U32", [self.chunks], 4 * self.chunks),
        ]
        if self.digests:
            parts.append(("sha256", "U8", [self.chunks, DIGEST_BYTES], DIGEST_BYTES * self.chunks))
        if self.token_map_size:
            parts.append(("token_map", "I32", [self.token_map_size], 4 * self.token_map_size))
        pad_bytes = self.file_bytes - self.pad_at
        parts.append(("pad", "U8", [pad_bytes], pad_bytes))
        entries, at = {}, 0
        for name, dtype, shape, size in parts:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        return entries


def header_bytes_for(table_bytes: int, metadata_bytes: int) -> int:
    """Size of the header of a table of `table_bytes` whose metadata has about `metadata_bytes` of text."""
    if table_bytes >= SMALL_TABLE_BYTES:
        return HEADER_BYTES
    return min(_up(2 * metadata_bytes, SMALL_ALIGN_BYTES), HEADER_BYTES)  # twice: quotes in a manifest are escaped


def header(layout: Layout, metadata: Mapping[str, str]) -> bytes:
    """The first `layout.header_bytes` of the file, not sealed yet. Raises InvalidArgument for metadata that does not fit or is no text."""
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise InvalidArgument(f"metadata: text to text, got {key!r}: {type(value).__name__}")
    if SEAL_KEY in metadata or metadata.get("schema", SCHEMA) != SCHEMA:
        raise InvalidArgument(f"metadata: {SEAL_KEY} is not yours to set, and schema is {SCHEMA}")
    entries = {SEAL_KEY: _NO_SEAL.decode(), "schema": SCHEMA} | dict(metadata)
    text = json.dumps({"__metadata__": entries} | layout.tensors(), separators=(",", ":")).encode()
    room = layout.header_bytes - _LENGTH_BYTES
    if len(text) > room:
        raise InvalidArgument(f"metadata: the header takes {len(text)} bytes with it, the limit is {room}")
    return room.to_bytes(_LENGTH_BYTES, "little") + text.ljust(room)


def seal_of(unsealed_header: bytes, tail: bytes) -> bytes:
    """The seal: 8 hexadecimal digits over the header and the tail (crc32c, sha256, token map)."""
    return f"{crc32c(tail, crc32c(unsealed_header)):08x}".encode()


def sealed(unsealed_header: bytes, seal: bytes) -> bytes:
    """The header with `seal` in its place."""
    return unsealed_header[:_SEAL_AT] + seal + unsealed_header[_SEAL_AT + len(_NO_SEAL) :]


def header_bytes_of(begin: bytes) -> int:
    """Size of the header of a file that begins so. Raises DataLoss if this is no segment."""
    size = int.from_bytes(begin[:_LENGTH_BYTES], "little") + _LENGTH_BYTES
    if size % SMALL_ALIGN_BYTES or not _LENGTH_BYTES < size <= HEADER_BYTES:
        raise DataLoss("not a segment, or one that was never published: its header is missing")
    return size


def unsealed(sealed_header: bytes) -> tuple[bytes, bytes]:
    """The header as it was before sealing, and its seal. Raises DataLoss if this is no segment."""
    if header_bytes_of(sealed_header) != len(sealed_header) or sealed_header[_LENGTH_BYTES:_SEAL_AT] != _BEFORE_SEAL:
        raise DataLoss("not a segment, or one that was never published: its header is missing")
    return sealed(sealed_header, _NO_SEAL), sealed_header[_SEAL_AT : _SEAL_AT + len(_NO_SEAL)]


def parse_header(unsealed_header: bytes) -> tuple[Layout, dict[str, str]]:
    """Layout and metadata (without the seal). Allocates nothing by what the header claims. Raises DataLoss naming what is wrong."""
    try:
        end = unsealed_header.rindex(b"}") + 1  # spaces follow, covered by the seal; skipping 2 MiB of them one by one takes 4 ms
        entries = json.loads(unsealed_header[_LENGTH_BYTES:end])
        metadata = entries.pop("__metadata__")
        rows, row_bytes = entries["rows"]["shape"]
        words = entries["token_map"]["shape"][0] if "token_map" in entries else 0
        layout = Layout(rows, row_bytes, words, len(unsealed_header), digests="sha256" in entries)
    except (ValueError, RecursionError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise DataLoss(f"the header is damaged: {error!r}") from error
    except InvalidArgument as error:
        raise DataLoss(f"the header is damaged: {error}") from error
    if entries != layout.tensors():
        raise DataLoss("the header's tensors do not fit each other")
    if not isinstance(metadata, dict) or any(not isinstance(value, str) for value in metadata.values()):
        raise DataLoss("the header's metadata is no map of text to text")
    if metadata.pop(SEAL_KEY, None) is None or metadata.get("schema") != SCHEMA:
        raise DataLoss(f"schema: {SCHEMA} expected, got {metadata.get('schema')!r}")
    return layout, metadata


def _up(size: int, align: int) -> int:
    return -(-size // align) * align

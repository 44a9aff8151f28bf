"""The first 2 MiB of a DAX device: which regions are whose, and which of them hold a whole segment.

    slot A at 0, slot B at 1 MiB; all numbers little-endian. The newer whole slot counts.
    0    8   magic "TRDLDAX" 0
    8    4   format, 1
    12   4   byte order mark 0x01020304
    16   8   generation: one more than the other slot's when it was written
    24   4   number of entries, at most ENTRIES_MAX
    28   4   flags: 1 = other hosts read this device
    32   16  host that owns the directory
    48   8   bytes of the device
    56   4   bytes of an entry, 256
    60   4   CRC32C of the header, these four bytes as zeros, and the entries
    64       entries, each
      0    4   state: 1 writing, 2 ready, 3 retired
      4    4   layer
      8    8   offset of the region, a multiple of 2 MiB
      16   8   bytes of the region, a multiple of 2 MiB
      24   8   zeros
      32   16  host whose region it is
      48   16  load that wrote it
      64   32  version of the model (sha256), once it is ready
      96   32  version of the table (sha256), once it is ready
      128  128 name of the model, UTF-8, zeros behind

Owns these bytes and their checks. A slot is written whole, in place of the older one: a write that breaks off leaves the other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from treadle.contract import DataLoss, ResourceExhausted
from treadle.kernels import crc32c
from treadle.kernels.dax import REGION_ALIGN_BYTES

SLOT_BYTES = REGION_ALIGN_BYTES // 2
MAGIC, FORMAT, ORDER_MARK = b"TRDLDAX\0", 1, 0x01020304
SHARED = 1
ID_BYTES = 16
_HEADER = struct.Struct("<8sIIQII16sQII")
_ENTRY = struct.Struct("<IIQQQ16s16s32s32s128s")
ENTRIES_MAX = (SLOT_BYTES - _HEADER.size) // _ENTRY.size
NO_DIGEST = bytes(32)


class RegionState(IntEnum):
    """How far a region is."""

    WRITING = 1  # its load is at it, or died
    READY = 2  # all of it is in memory and was read back
    RETIRED = 3  # not served any more; other hosts may still read it


@dataclass(frozen=True, slots=True)
class Region:
    """One entry. `owner`, `load`: 16 bytes each; `version`, `table`: 32 bytes each."""

    state: RegionState
    layer: int
    offset: int
    size_bytes: int
    owner: bytes
    load: bytes
    model: str = ""
    version: bytes = NO_DIGEST
    table: bytes = NO_DIGEST

    @property
    def end(self) -> int:
        """The byte behind it."""
        return self.offset + self.size_bytes


@dataclass(frozen=True, slots=True)
class Directory:
    """What a slot says. Regions rise by offset and do not overlap."""

    owner: bytes
    device_bytes: int
    generation: int = 0
    shared: bool = False
    regions: Sequence[Region] = field(default_factory=tuple)

    def with_regions(self, regions: Sequence[Region]) -> Directory:
        """The next generation. Raises ResourceExhausted beyond ENTRIES_MAX."""
        if len(regions) > ENTRIES_MAX:
            raise ResourceExhausted(f"{len(regions)} regions on one device, the limit is {ENTRIES_MAX}: remove versions")
        ordered = tuple(sorted(regions, key=lambda region: region.offset))
        return replace(self, generation=self.generation + 1, regions=ordered)

    def gap(self, size_bytes: int) -> int:
        """Offset of the first free stretch of that size. Raises ResourceExhausted naming what is free."""
        at, largest = REGION_ALIGN_BYTES, 0
        for begin, end in [*((region.offset, region.end) for region in self.regions), (self.device_bytes, 0)]:
            if begin - at >= size_bytes:
                return at
            largest, at = max(largest, begin - at), end
        raise ResourceExhausted(f"no room for {size_bytes} bytes on the device; the largest free stretch has {largest}")

    @property
    def free_bytes(self) -> int:
        """Bytes that no region takes."""
        return self.device_bytes - REGION_ALIGN_BYTES - sum(region.size_bytes for region in self.regions)


def slot_of(directory: Directory) -> bytes:
    """The bytes of a slot."""
    entries = b"".join(
        _ENTRY.pack(r.state, r.layer, r.offset, r.size_bytes, 0, r.owner, r.load, r.version, r.table, r.model.encode())
        for r in directory.regions
    )
    fields = [
        MAGIC, FORMAT, ORDER_MARK, directory.generation, len(directory.regions), SHARED * directory.shared, directory.owner,
        directory.device_bytes, _ENTRY.size,
    ]  # fmt: skip
    return _HEADER.pack(*fields, crc32c(entries, crc32c(_HEADER.pack(*fields, 0)))) + entries


def newest(page: bytes) -> Directory | None:
    """The newer whole slot of a directory page; None for a page of zeros.

    Raises DataLoss if there is something, and no whole slot of ours among it.
    """
    found = [slot for at in (0, SLOT_BYTES) if (slot := _read(page[at : at + SLOT_BYTES])) is not None]
    if found:
        return max(found, key=lambda slot: slot.generation)
    if not page.strip(b"\0"):
        return None
    ours = any(page[at : at + len(MAGIC)] == MAGIC for at in (0, SLOT_BYTES))
    raise DataLoss("both slots of the directory are damaged" if ours else "the device holds something else than our directory")


def _read(slot: bytes) -> Directory | None:
    """What a slot says; None if it is not whole, or not ours."""
    magic, form, mark, generation, count, flags, owner, device_bytes, entry_bytes, checksum = _HEADER.unpack_from(slot)
    if (magic, form, mark, entry_bytes) != (MAGIC, FORMAT, ORDER_MARK, _ENTRY.size) or count > ENTRIES_MAX:
        return None
    entries = slot[_HEADER.size : _HEADER.size + count * _ENTRY.size]
    if crc32c(entries, crc32c(slot[: _HEADER.size - 4] + bytes(4))) != checksum:
        return None
    try:
        regions = tuple(_region(entry) for entry in _ENTRY.iter_unpack(entries))
    except ValueError:  # a state of a later release
        return None
    return Directory(owner, device_bytes, generation, bool(flags & SHARED), regions)


def _region(entry: tuple[int, int, int, int, int, bytes, bytes, bytes, bytes, bytes]) -> Region:
    state, layer, offset, size_bytes, _, owner, load, version, table, model = entry
    return Region(RegionState(state), layer, offset, size_bytes, owner, load, model.rstrip(b"\0").decode(), version, table)

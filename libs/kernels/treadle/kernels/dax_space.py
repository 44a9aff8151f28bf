"""A DAX device as the one process that writes it sees it, or as a reader of another host's does.

Owns the directory's changes: a region is taken, filled, read back, made ready, retired or given back, each as one new generation
of the directory. Whether anybody still reads a region is for the caller to know: it holds the readers' locks.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, Unavailable
from treadle.kernels.dax import REGION_ALIGN_BYTES, DaxFacts, map_directory, map_writable
from treadle.kernels.dax_directory import SLOT_BYTES, Directory, Region, RegionState, newest, slot_of
from treadle.kernels.flush import flush, flush_mapping


class DaxSpace:
    """Regions on one device. `writable`: this host owns the directory, and this process holds the device's lock.

    host:      who we are, 16 bytes
    shared:    other hosts read this device: what is removed stays where it is (RETIRED) until a take-over. A device that was shared
               once stays so, whatever a later start says: the others may read it still
    take_over: make us the owner of the directory and of everything on it, and give back what was retired: nobody else uses the
               device, which is shared from then on only if `shared` says so
    """

    def __init__(self, facts: DaxFacts, host: bytes, *, shared: bool = False, take_over: bool = False) -> None:
        """Raises DataLoss for a directory that is damaged or not ours, Unavailable if another process of this host writes it or
        another host owns it and has not marked it shared, InvalidArgument if the device is smaller than it was.
        """
        self.facts, self._host = facts, host
        self._mapping: mmap.mmap | None = None
        self._descriptor = -1
        with map_directory(facts) as page:
            found = newest(page[:])
        if found is not None and found.device_bytes > facts.size_bytes:
            raise InvalidArgument(f"{facts.path}: {facts.size_bytes} bytes, its directory was made for {found.device_bytes}")
        self.writable = found is None or take_over or found.owner == host
        if not self.writable:
            assert found is not None
            if not found.shared:
                raise Unavailable(
                    f"{facts.path} belongs to another host, which may reuse its regions: have that host mark it shared, or take it over"
                )
            self.directory = found
            return
        if facts.is_device:
            flush(np.zeros(1, dtype=np.uint8))  # refused now, where rows could not be made visible to others
        self._open_alone()
        try:
            self._begin(shared, take_over)
        except BaseException:
            self.close()
            raise

    def take(self, layer: int, size_bytes: int, load: bytes) -> Region:
        """A new region in state WRITING. Raises ResourceExhausted, or Unavailable on a device that we only read."""
        self._check_writable()
        size = -(-size_bytes // REGION_ALIGN_BYTES) * REGION_ALIGN_BYTES
        region = Region(RegionState.WRITING, layer, self.directory.gap(size), size, self._host, load)
        self._write(self.directory.with_regions([*self.directory.regions, region]))
        return region

    def rows_of(self, region: Region) -> NDArray[np.uint8]:
        """The bytes of a region, uint8 [n], writable, over the mapping."""
        return np.frombuffer(self._writable_mapping(), dtype=np.uint8, count=region.size_bytes, offset=region.offset)

    def flush(self, region: Region, begin: int, end: int) -> None:
        """Make bytes [begin, end) of a region visible to whoever maps the device."""
        flush_mapping(self._writable_mapping(), region.offset + begin, region.offset + end, device=self.facts.is_device)

    def make_ready(self, load: bytes, model: str, version: str, tables: Mapping[int, str]) -> None:
        """All regions of a load at once: READY. Their bytes were flushed and read back before."""
        self._change(
            lambda region: region.load == load and region.state is RegionState.WRITING,
            lambda region: replace(
                region, state=RegionState.READY, model=model, version=bytes.fromhex(version),
                table=bytes.fromhex(tables[region.layer]),
            ),
        )  # fmt: skip

    def give_back(self, offsets: set[int]) -> None:
        """Regions of ours that nobody on this host reads: free for others, or RETIRED where other hosts may read them."""
        if not self.writable:
            return
        shared = self.directory.shared
        self._change(
            lambda region: region.offset in offsets and region.owner == self._host,
            lambda region: replace(region, state=RegionState.RETIRED) if shared and region.state is RegionState.READY else None,
        )

    def close(self) -> None:
        """Let go of the device. Arrays over its mapping stay valid."""
        if self._mapping is not None:
            with suppress(BufferError):  # it goes with the last array
                self._mapping.close()
            self._mapping = None
        if self._descriptor >= 0:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # the mapping may live on, with a descriptor of its own
            os.close(self._descriptor)
            self._descriptor = -1

    def _open_alone(self) -> None:
        self._descriptor, self._mapping = map_writable(self.facts)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise Unavailable(f"{self.facts.path}: another process of this host writes it; one pool for each device") from error

    def _begin(self, shared: bool, take_over: bool) -> None:
        """Read the directory again, now that nobody else of this host writes; what a dead load left is given back."""
        found = newest(self._writable_mapping()[:REGION_ALIGN_BYTES])
        if found is None:
            found = Directory(self._host, self.facts.size_bytes)
        kept = [r for r in found.regions if r.state is RegionState.READY or (r.state is RegionState.RETIRED and not take_over)]
        if take_over:
            kept = [replace(region, owner=self._host) for region in kept]
        shared = shared or (found.shared and not take_over)
        self.directory = found
        self._write(replace(found, owner=self._host, shared=shared, device_bytes=self.facts.size_bytes).with_regions(kept))

    def _change(self, chosen: Callable[[Region], bool], change: Callable[[Region], Region | None]) -> None:
        self._check_writable()
        after = [change(region) if chosen(region) else region for region in self.directory.regions]
        self._write(self.directory.with_regions([region for region in after if region is not None]))

    def _write(self, directory: Directory) -> None:
        """Into the older slot, flushed before anything else is written, and read back."""
        mapping, at = self._writable_mapping(), directory.generation % 2 * SLOT_BYTES
        slot = slot_of(directory)
        mapping[at : at + len(slot)] = slot
        flush_mapping(mapping, at, at + len(slot), device=self.facts.is_device)
        if mapping[at : at + len(slot)] != slot:
            raise DataLoss(f"{self.facts.path}: the directory does not read as it was written; suspect the memory")
        self.directory = directory

    def _check_writable(self) -> None:
        if not self.writable:
            raise Unavailable(f"{self.facts.path} belongs to another host: this one reads it only; load there, or take it over")

    def _writable_mapping(self) -> mmap.mmap:
        self._check_writable()
        if self._mapping is None:
            raise InvalidArgument(f"{self.facts.path}: closed")
        return self._mapping

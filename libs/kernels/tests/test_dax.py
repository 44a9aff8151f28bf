"""DAX devices: a character device through a faked sysfs (/dev/zero), and files of fixed size that stand for one."""

import mmap
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle.contract.table_manifest import version_of_rows
from treadle.kernels import crc32c
from treadle.kernels.dax import REGION_ALIGN_BYTES, DaxFacts, dax_facts, map_directory
from treadle.kernels.dax_directory import (
    ENTRIES_MAX,
    SLOT_BYTES,
    Directory,
    Region,
    RegionState,
    newest,
    slot_of,
)
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.dax_writer import RegionWriter
from treadle.kernels.flush import flush
from treadle.kernels.segment import Segment

TWO_MIB = REGION_ALIGN_BYTES
US, THEM, LOAD = b"u" * 16, b"t" * 16, b"l" * 16
ROWS = np.random.default_rng(0).integers(0, 256, (30_000, 320), dtype=np.uint8)  # three chunks
VERSION = "ab" * 32


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """A file of 64 MiB of zeros."""
    path = tmp_path / "dax"
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 64 << 20)
    return path


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """What the kernel would say of /dev/zero if it were dax0.0 with 64 MiB."""
    status = os.stat("/dev/zero")
    root = tmp_path / "sys"
    place = root / "bus/dax/devices/dax0.0"
    place.mkdir(parents=True)
    for name, text in (("size", str(64 << 20)), ("align", str(TWO_MIB)), ("numa_node", "-1"), ("target_node", "2")):
        (place / name).write_text(text + "\n")
    (place / "subsystem").symlink_to("../../../../bus/dax")
    (root / "dev/char").mkdir(parents=True)
    (root / "dev/char" / f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}").symlink_to(place)
    return root


def space_on(device: Path, host: bytes = US, *, shared: bool = False, take_over: bool = False) -> DaxSpace:
    return DaxSpace(dax_facts(device), host, shared=shared, take_over=take_over)


def write(space: DaxSpace, layer: int = 2, load: bytes = LOAD) -> RegionWriter:
    with RegionWriter(space, layer=layer, load=load, rows=len(ROWS), row_bytes=320) as writer:
        writer.append(ROWS)
        writer.publish({"layer": str(layer)})
    return writer


def publish(space: DaxSpace, layer: int = 2, load: bytes = LOAD) -> RegionWriter:
    writer = write(space, layer, load)
    space.make_ready(load, "demo", VERSION, {layer: writer.table().version})
    return writer


def test_a_character_device_is_known_by_sysfs_alone(sysfs: Path, tmp_path: Path) -> None:
    assert stat.S_ISCHR(os.stat("/dev/zero").st_mode)
    facts = dax_facts(Path("/dev/zero"), sysfs=sysfs)
    assert facts == DaxFacts(Path("/dev/zero"), 64 << 20, True, -1, 2)
    link = tmp_path / "pool-memory"  # udev names are links
    link.symlink_to("/dev/zero")
    assert dax_facts(link, sysfs=sysfs).is_device
    place = sysfs / "bus/dax/devices/dax0.0"
    (place / "size").unlink()
    with pytest.raises(InvalidArgument, match="dax_bytes"):
        dax_facts(Path("/dev/zero"), sysfs=sysfs)
    assert dax_facts(Path("/dev/zero"), sysfs=sysfs, size_bytes=(5 << 20) + 5).size_bytes == 4 << 20
    (place / "align").write_text(str(1 << 30))
    with pytest.raises(InvalidArgument, match="--align 2M"):
        dax_facts(Path("/dev/zero"), sysfs=sysfs)


def test_what_is_no_dax_device_is_refused(sysfs: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not say that it is a DAX one"):
        dax_facts(Path("/dev/null"), sysfs=sysfs)
    with pytest.raises(InvalidArgument, match="does not say that it is a DAX one"):
        dax_facts(Path("/dev/zero"), size_bytes=64 << 20)  # the real sysfs knows better
    with pytest.raises(InvalidArgument, match="neither"):
        dax_facts(tmp_path)
    with pytest.raises(NotFound, match="daxctl list"):
        dax_facts(tmp_path / "dax9.9")
    (tmp_path / "small").write_bytes(bytes(3 << 20))
    with pytest.raises(InvalidArgument, match="the directory alone takes"):
        dax_facts(tmp_path / "small")
    (tmp_path / "file").write_bytes(bytes(8 << 20))
    with pytest.raises(InvalidArgument, match="leave the setting out"):
        dax_facts(tmp_path / "file", size_bytes=8 << 20)


def test_a_region_is_written_on_a_character_device_without_truncate_write_or_msync(sysfs: Path) -> None:
    space = DaxSpace(dax_facts(Path("/dev/zero"), sysfs=sysfs), US)  # each mapping of /dev/zero is private to who made it
    writer = publish(space)
    (region,) = space.directory.regions
    assert (region.offset, region.state, region.model) == (TWO_MIB, RegionState.READY, "demo")
    content = space.rows_of(region)
    assert (content[TWO_MIB : TWO_MIB + ROWS.nbytes].reshape(ROWS.shape) == ROWS).all()
    assert newest(space._writable_mapping()[:TWO_MIB]) == space.directory
    assert writer.table().version == version_of_rows(ROWS)
    space.close()


def test_a_segment_on_a_device_is_mapped_read_only_at_its_offset(device: Path) -> None:
    space = space_on(device)
    publish(space, layer=2)
    writer = publish(space, layer=4, load=b"m" * 16)
    with Segment(device, writer.region.offset, writer.size_bytes) as segment:
        segment.verify()
        assert (segment.rows == ROWS).all()
        assert segment.metadata["layer"] == "4"
        assert writer.region.offset % TWO_MIB == 0 < writer.region.offset
        with pytest.raises(ValueError, match="read-only"):
            segment.rows[0, 0] = 1
    space.close()
    assert device.stat().st_size == 64 << 20


def test_regions_are_reused_once_given_back_and_a_full_device_says_so(device: Path) -> None:
    space = space_on(device)
    sizes = 12 << 20  # header, three chunks, tail
    offsets = [publish(space, load=bytes([n]) * 16).region.offset for n in range(5)]
    assert offsets == [TWO_MIB + n * sizes for n in range(5)]
    with pytest.raises(ResourceExhausted, match="largest free stretch has 2097152"):
        write(space)
    assert space.directory.free_bytes == 2 << 20
    space.give_back({offsets[1]})
    assert publish(space, load=b"again" + bytes(11)).region.offset == offsets[1]
    space.close()
    reopened = space_on(device)
    assert [region.offset for region in reopened.directory.regions] == offsets
    reopened.close()


def test_a_torn_directory_leaves_the_one_before(device: Path) -> None:
    space = space_on(device)
    publish(space)
    before = space.directory
    space.take(9, TWO_MIB, b"x" * 16)
    space.close()
    slot_at = space.directory.generation % 2 * SLOT_BYTES
    with device.open("r+b") as file:
        file.seek(slot_at + 64 + 200)
        file.write(b"torn")
    with map_directory(dax_facts(device)) as page:
        assert newest(page[:]) == before
    with device.open("r+b") as file:
        file.seek((slot_at + SLOT_BYTES) % TWO_MIB + 20)
        file.write(b"torn too")
    with pytest.raises(DataLoss, match="both slots"):
        space_on(device)


def test_a_device_with_something_else_on_it_is_not_touched(device: Path) -> None:
    with device.open("r+b") as file:
        file.write(b"somebody's file system")
    with pytest.raises(DataLoss, match="something else"):
        space_on(device)
    assert device.read_bytes()[:22] == b"somebody's file system"


def test_one_process_writes_a_device(device: Path) -> None:
    space = space_on(device)
    with pytest.raises(Unavailable, match="one pool for each device"):
        space_on(device)
    space.close()
    space_on(device).close()


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from treadle.kernels.dax import dax_facts
from treadle.kernels.dax_space import DaxSpace
from treadle.kernels.dax_writer import RegionWriter
space = DaxSpace(dax_facts(Path(sys.argv[1])), b"u" * 16)
writer = RegionWriter(space, layer=2, load=b"k" * 16, rows=30_000, row_bytes=320)
writer.append(np.ones((20_000, 320), dtype=np.uint8))
if sys.argv[2] == "published":
    writer.append(np.ones((10_000, 320), dtype=np.uint8))
    writer.publish({})
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("when", ["half way", "published"])
def test_a_writer_killed_before_it_is_ready_leaves_nothing_that_counts(device: Path, when: str) -> None:
    ran = subprocess.run([sys.executable, "-c", KILLED, str(device), when], check=False)
    assert ran.returncode == -signal.SIGKILL
    with map_directory(dax_facts(device)) as page:
        found = newest(page[:])
    assert found is not None
    assert [region.state for region in found.regions] == [RegionState.WRITING]
    space = space_on(device)
    assert space.directory.regions == ()
    assert publish(space).region.offset == TWO_MIB  # reclaimed
    space.close()


def test_another_hosts_device_is_read_if_it_is_shared_and_never_freed(device: Path) -> None:
    theirs = space_on(device, THEM)
    publish(theirs)
    theirs.close()
    with pytest.raises(Unavailable, match="belongs to another host"):
        space_on(device)
    theirs = space_on(device, THEM, shared=True)
    ours = space_on(device)
    assert not ours.writable
    assert [region.state for region in ours.directory.regions] == [RegionState.READY]
    before = device.read_bytes()
    ours.give_back({ours.directory.regions[0].offset})
    assert device.read_bytes() == before
    with pytest.raises(Unavailable, match="reads it only"):
        write(ours)
    ours.close()
    theirs.give_back({TWO_MIB})  # gone for them, and still there for us
    assert [region.state for region in theirs.directory.regions] == [RegionState.RETIRED]
    assert publish(theirs, load=b"next" + bytes(12)).region.offset > TWO_MIB
    theirs.close()


def test_a_device_stays_shared_until_a_take_over_says_otherwise(device: Path) -> None:
    space_on(device, THEM, shared=True).close()
    theirs = space_on(device, THEM)  # the setting was forgotten; readers of before are still there
    publish(theirs)
    theirs.give_back({TWO_MIB})
    assert [region.state for region in theirs.directory.regions] == [RegionState.RETIRED]
    assert publish(theirs, load=b"next" + bytes(12)).region.offset > TWO_MIB
    theirs.close()
    theirs = space_on(device, THEM, take_over=True)
    assert not theirs.directory.shared
    theirs.close()


def test_a_take_over_is_explicit_and_gives_back_what_was_retired(device: Path) -> None:
    theirs = space_on(device, THEM, shared=True)
    first = publish(theirs).region.offset
    second = publish(theirs, load=b"next" + bytes(12)).region.offset
    theirs.give_back({first})
    theirs.close()
    ours = space_on(device, take_over=True)
    assert ours.writable
    assert [(region.offset, region.owner) for region in ours.directory.regions] == [(second, US)]
    assert publish(ours, load=b"ours" + bytes(12)).region.offset == first
    ours.close()
    with pytest.raises(Unavailable):
        space_on(device, THEM)


def test_a_row_that_does_not_read_back_is_never_ready(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = space_on(device)
    real = DaxSpace.flush

    def flips(self: DaxSpace, region: Region, begin: int, end: int) -> None:
        real(self, region, begin, end)
        self.rows_of(region)[TWO_MIB + 77] ^= 1  # the memory itself

    monkeypatch.setattr(DaxSpace, "flush", flips)
    with pytest.raises(DataLoss, match="does not read as written"):
        publish(space)
    assert space.directory.regions == ()
    space.close()


def test_rows_are_flushed_before_they_are_read_back_and_before_the_directory_says_ready(
    device: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def flushed(mapping: mmap.mmap, begin: int, end: int, *, device: bool) -> None:
        order.append("directory" if end <= TWO_MIB else "rows")

    def read_back(data: NDArray[np.uint8], crc: int = 0) -> int:
        order.append("read back")
        return crc32c(data, crc)

    monkeypatch.setattr("treadle.kernels.dax_space.flush_mapping", flushed)
    monkeypatch.setattr("treadle.kernels.dax_writer.crc32c", read_back)
    space = space_on(device)
    publish(space)
    assert order == ["directory", "directory", "rows", "read back", "read back", "read back", "directory"]
    space.close()


def test_a_directory_has_a_limit() -> None:
    regions = [Region(RegionState.READY, 0, (n + 1) * TWO_MIB, TWO_MIB, US, LOAD) for n in range(ENTRIES_MAX + 1)]
    full = Directory(US, 1 << 50).with_regions(regions[:-1])
    assert newest(slot_of(full).ljust(TWO_MIB, b"\0")) == full
    assert len(slot_of(full)) <= SLOT_BYTES
    with pytest.raises(ResourceExhausted, match="remove versions"):
        full.with_regions(regions)


def test_a_slot_of_another_byte_order_or_format_does_not_count() -> None:
    slot = slot_of(Directory(US, 1 << 30, generation=3))
    page = slot.ljust(TWO_MIB, b"\0")
    assert newest(page) == Directory(US, 1 << 30, generation=3)
    for at in (8, 12, 57):
        other = bytearray(page)
        other[at] ^= 3
        with pytest.raises(DataLoss, match="both slots"):
            newest(bytes(other))


def test_a_shrunken_device_is_refused(device: Path) -> None:
    space_on(device).close()
    with pytest.raises(InvalidArgument, match="was made for"):
        DaxSpace(replace(dax_facts(device), size_bytes=32 << 20), US)


def test_no_room_in_the_file_system_is_said_before_anything_is_touched(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    space = space_on(device)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match="no room"):
        write(space)
    assert space.directory.regions == ()
    space.close()


def test_flush_writes_back_any_span_and_says_how() -> None:
    data = np.arange(1000, dtype=np.uint8)
    before = data.copy()
    try:
        name = flush(data[3:900])
    except Unavailable as error:
        pytest.skip(str(error))
    assert name in ("clwb", "clflushopt", "clflush")
    assert (data == before).all()

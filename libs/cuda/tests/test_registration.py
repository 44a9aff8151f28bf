"""What is registered, in which pieces, and that it is let go again, whatever fails; with a stand-in for the driver, and real memory."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import ResourceExhausted, Unavailable
from treadle.cuda.registration import RegisteredTable, chunks_of, mapping_at

PAGE, SHIFT = mmap.PAGESIZE, 1 << 40


class Driver:
    """Remembers what is registered. The device sees host memory SHIFT higher."""

    def __init__(self, *, read_only: bool = False, chunks_max: int = 1 << 20, apart: bool = False) -> None:
        self.registered: dict[int, tuple[int, bool]] = {}
        self._read_only, self._chunks_max, self._apart, self._asked = read_only, chunks_max, apart, 0

    def registers_read_only(self, device: int) -> bool:
        return self._read_only

    def register(self, address: int, byte_count: int, *, read_only: bool) -> None:
        assert address % PAGE == byte_count % PAGE == 0
        assert mapping_at(address).writable or read_only, "a driver pins read-only memory only where it is told that it is"
        if len(self.registered) >= self._chunks_max:
            raise ResourceExhausted("the driver pins no more memory")
        self.registered[address] = byte_count, read_only

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def device_pointer(self, device: int, address: int) -> int:
        assert address in self.registered
        self._asked += 1
        return address + SHIFT + (PAGE * self._asked if self._apart else 0)

    def gather(self, *arguments: int, **options: int) -> None:
        raise AssertionError("not here")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 64 * PAGE, dtype=np.uint8).tobytes())
    return path


@pytest.fixture
def read_only(file: Path) -> NDArray[np.uint8]:
    """Rows of 320 bytes in a mapping that may only be read, not at its beginning."""
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, mmap.MAP_SHARED, mmap.PROT_READ)
    return np.frombuffer(mapping, np.uint8, count=320 * 600, offset=4 * PAGE).reshape(600, 320)


@pytest.mark.parametrize(
    ("begin", "byte_count", "expected"),
    [
        (2 * PAGE, 3 * PAGE, [(2, 2), (4, 1)]),
        (2 * PAGE + 5, 10, [(2, 1)]),
        (2 * PAGE + 5, PAGE, [(2, 2)]),
        (PAGE - 1, 2 * PAGE + 2, [(0, 2), (2, 2)]),
    ],
)
def test_chunks_are_whole_pages_that_cover_the_table(begin: int, byte_count: int, expected: list[tuple[int, int]]) -> None:
    assert chunks_of(begin, byte_count, 2 * PAGE) == [(first * PAGE, pages * PAGE) for first, pages in expected]


def test_memory_of_this_process_is_registered_as_it_is() -> None:
    driver, table = Driver(), np.zeros((1000, 320), np.uint8)
    registered = RegisteredTable(driver, 0, table, chunk_bytes=16 * PAGE)
    assert registered.address == table.ctypes.data + SHIFT
    assert sum(size for size, _ in driver.registered.values()) >= table.nbytes
    assert {told for _, told in driver.registered.values()} == {False}
    registered.close()
    registered.close()
    assert not driver.registered


def test_a_mapping_for_reading_is_registered_so_where_the_device_can(read_only: NDArray[np.uint8]) -> None:
    driver = Driver(read_only=True)
    registered = RegisteredTable(driver, 0, read_only)
    assert registered.address == read_only.ctypes.data + SHIFT
    assert {told for _, told in driver.registered.values()} == {True}
    registered.close()


def test_else_the_file_is_mapped_once_more_and_protected_against_writes(read_only: NDArray[np.uint8], file: Path) -> None:
    driver = Driver()
    registered = RegisteredTable(driver, 0, read_only, chunk_bytes=8 * PAGE)
    behind = mapping_at(registered.address - SHIFT)
    assert (behind.path, behind.writable, behind.shared) == (str(file), False, True)
    at = registered.address - SHIFT
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * read_only.nbytes).from_address(at))
    np.testing.assert_array_equal(memory, read_only.reshape(-1))
    registered.close()
    assert not driver.registered


def test_a_file_that_may_not_be_written_is_refused_with_what_helps(read_only: NDArray[np.uint8], file: Path) -> None:
    file.unlink()
    with pytest.raises(Unavailable, match="transport local"):
        RegisteredTable(Driver(), 0, read_only)


@pytest.mark.parametrize(("driver", "error"), [(Driver(chunks_max=2), ResourceExhausted), (Driver(apart=True), Unavailable)])
def test_what_was_registered_before_a_failure_is_let_go(driver: Driver, error: type[Exception]) -> None:
    table = np.zeros((1000, 320), np.uint8)
    with pytest.raises(error):
        RegisteredTable(driver, 0, table, chunk_bytes=16 * PAGE)
    assert not driver.registered


def test_an_address_without_memory_is_told() -> None:
    with pytest.raises(Unavailable, match="nothing is mapped"):
        mapping_at(8)

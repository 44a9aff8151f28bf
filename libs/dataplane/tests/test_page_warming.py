"""Pages of mapped tables are entered in the background: at once usable, soon warm, stopped at any moment."""

import mmap
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import InvalidArgument
from treadle.contract.warm_state import WarmState
from treadle.dataplane.warming import STEP_BYTES, PageWarmer

Spans = list[NDArray[np.uint8]]
PATIENCE_SECONDS = 20.0


def mapped(size: int) -> NDArray[np.uint8]:
    """A shared mapping of allocated memory, none of it touched in this process."""
    descriptor = os.memfd_create("warming")
    try:
        os.posix_fallocate(descriptor, 0, size)
        return np.frombuffer(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), dtype=np.uint8)
    finally:
        os.close(descriptor)


def resident_bytes(array: NDArray[np.uint8]) -> int:
    """Of the mapping that begins where `array` does, by smaps."""
    with open("/proc/self/smaps") as lines:
        inside = False
        for line in lines:
            if line.startswith(f"{array.ctypes.data:x}-"):
                inside = True
            elif inside and line.startswith("Rss:"):
                return int(line.split()[1]) << 10
    raise AssertionError("no such mapping")


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def warmer() -> Iterator[PageWarmer]:
    warmer = PageWarmer()
    yield warmer
    warmer.close()


def test_every_page_is_entered_and_the_thread_ends(warmer: PageWarmer) -> None:
    table = mapped(3 * STEP_BYTES + mmap.PAGESIZE)
    assert resident_bytes(table) == 0
    warming = warmer.warm([table[: STEP_BYTES + 5], table[STEP_BYTES + 5 :]])
    until(lambda: warming.state is WarmState.WARM)
    assert resident_bytes(table) == table.nbytes == warming.bytes_entered == warming.bytes_total
    until(lambda: warmer._thread is None)
    assert warmer.warm([table]).bytes_total == table.nbytes  # and a new one starts


def test_a_rate_is_kept_and_a_close_does_not_wait_for_the_rest() -> None:
    warmer, table = PageWarmer(bytes_per_second=STEP_BYTES), mapped(64 * STEP_BYTES)
    begun = time.monotonic()
    warming = warmer.warm([table])
    until(lambda: warming.bytes_entered > 0)
    until(lambda: warming.state is WarmState.WARMING)
    assert resident_bytes(table) <= (2 + time.monotonic() - begun) * STEP_BYTES
    warmer.close()
    assert time.monotonic() - begun < 10  # 64 seconds' worth was asked for
    assert warming.state is WarmState.COLD
    assert warmer.warm([table]).state is WarmState.COLD  # nothing begins behind a close


def test_what_is_dropped_is_let_go(warmer: PageWarmer) -> None:
    slow = PageWarmer(bytes_per_second=STEP_BYTES)
    memory = mmap.mmap(-1, 32 * STEP_BYTES)
    warming = slow.warm([np.frombuffer(memory, dtype=np.uint8)])
    with pytest.raises(BufferError):
        memory.close()  # the span keeps it mapped while its pages are entered
    warming.drop()

    def closed() -> bool:
        try:
            memory.close()
        except BufferError:
            return False
        return True

    until(closed)
    assert warming.state is WarmState.COLD
    slow.close()


def test_tables_without_spans_stay_cold_and_a_wrong_rate_is_refused(warmer: PageWarmer) -> None:
    assert warmer.warm([]).state is WarmState.COLD
    with pytest.raises(InvalidArgument, match="at least 0"):
        PageWarmer(bytes_per_second=-1)


def test_pages_that_cannot_be_had_leave_the_table_cold(warmer: PageWarmer) -> None:
    descriptor = os.memfd_create("short")
    os.ftruncate(descriptor, mmap.PAGESIZE)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE, prot=mmap.PROT_READ)
    os.ftruncate(descriptor, 0)  # truncated under its readers: a touch would be SIGBUS
    os.close(descriptor)
    warming = warmer.warm([np.frombuffer(memory, dtype=np.uint8)])
    until(lambda: warming.state is WarmState.COLD)

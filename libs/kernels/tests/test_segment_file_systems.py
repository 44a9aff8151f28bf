"""Segments on disk, tmpfs and hugetlbfs: the same file, opened by the public library, on the pages that the kernel grants."""

import mmap
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from treadle.contract import ResourceExhausted
from treadle.kernels import gather_rows
from treadle.kernels.pages import HUGE_PAGE_BYTES, file_system, mapped_page_bytes
from treadle.kernels.segment import Segment, SegmentWriter, segment_bytes

HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
ROWS = np.random.default_rng(0).integers(0, 256, (15_000, 320), dtype=np.uint8)
TOKEN_MAP = np.arange(5_000, dtype=np.int32)
PAGES_NEEDED = 4 * segment_bytes(15_000, 320, 5_000) // HUGE_PAGE_BYTES  # ours, and the private mapping of the public library


@contextmanager
def mounted(folder: Path, kind: str, options: str) -> Iterator[Path]:
    mounting = subprocess.run(
        ["mount", "-t", kind, "-o", options, "none", str(folder)], capture_output=True, text=True, check=False
    )
    if mounting.returncode != 0:
        pytest.skip(f"{kind} cannot be mounted here: {mounting.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


@contextmanager
def huge_pages_reserved(count: int) -> Iterator[None]:
    before = int(HUGE_PAGES.read_text())
    try:
        HUGE_PAGES.write_text(str(before + count))
    except OSError as error:
        pytest.skip(f"no huge pages for hugetlbfs: {error}")
    try:
        if int(HUGE_PAGES.read_text()) < before + count:
            pytest.skip(f"no {count} huge pages for hugetlbfs: the kernel finds no room")
        yield
    finally:
        HUGE_PAGES.write_text(str(before))


@pytest.fixture(params=["disk", "tmpfs", "tmpfs with huge pages", pytest.param("hugetlbfs", marks=pytest.mark.hugetlbfs)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    with ExitStack() as stack:
        if request.param == "tmpfs with huge pages":
            stack.enter_context(mounted(tmp_path, "tmpfs", "huge=always,size=64m"))
        elif request.param == "tmpfs":
            stack.enter_context(mounted(tmp_path, "tmpfs", "size=64m"))
        elif request.param == "hugetlbfs":
            stack.enter_context(huge_pages_reserved(PAGES_NEEDED))
            stack.enter_context(mounted(tmp_path, "hugetlbfs", f"pagesize=2M,size={PAGES_NEEDED * HUGE_PAGE_BYTES}"))
        yield request.param, tmp_path


def test_a_segment_is_written_verified_gathered_and_opened_by_others_on_every_file_system(place: tuple[str, Path]) -> None:
    kind, folder = place
    path = folder / "a.segment"
    with SegmentWriter(path, rows=15_000, row_bytes=320, token_map=TOKEN_MAP) as writer:
        for begin in range(0, 15_000, 4_000):
            writer.append(ROWS[begin : begin + 4_000])
        writer.publish({"layer": "2"})
    assert [entry.name for entry in folder.iterdir()] == ["a.segment"]
    with Segment(path) as segment:
        segment.verify()
        wanted = np.random.default_rng(1).integers(0, 15_000, 700)
        out = np.empty((700, 320), dtype=np.uint8)
        gather_rows(segment.rows, wanted, out)
        assert (out == ROWS[wanted]).all()
        assert segment.page_bytes() in ({HUGE_PAGE_BYTES} if kind == "hugetlbfs" else {4096, HUGE_PAGE_BYTES})
    with safe_open(path, "np") as opened:
        assert (opened.get_tensor("rows") == ROWS).all()
        assert (opened.get_tensor("token_map") == TOKEN_MAP).all()
        assert opened.metadata()["layer"] == "2"


def test_only_files_in_memory_are_populated(place: tuple[str, Path]) -> None:
    _, folder = place
    path = folder / "a.segment"
    with SegmentWriter(path, rows=15_000, row_bytes=320) as writer:
        writer.append(ROWS)
        writer.publish({})
    with path.open("rb") as file:
        in_memory = file_system(file.fileno()) in ("tmpfs", "hugetlbfs")
    with Segment(path) as segment:
        assert segment.populate() is in_memory
        assert (segment.rows == ROWS).all()


def test_no_room_on_any_file_system_leaves_nothing_behind(place: tuple[str, Path]) -> None:
    _, folder = place
    with pytest.raises(ResourceExhausted, match="no room"):
        SegmentWriter(folder / "a.segment", rows=1 << 32, row_bytes=4096)
    assert list(folder.iterdir()) == []


def test_the_file_system_is_told_by_an_open_file(place: tuple[str, Path]) -> None:
    kind, folder = place
    with (folder / "file").open("wb") as file:
        told = file_system(file.fileno())
    assert told != "hugetlbfs" if kind == "disk" else told == kind.split(" ")[0]  # the test folder may lie in memory itself


def test_ordinary_memory_is_on_base_pages_and_unknown_addresses_too() -> None:
    memory = mmap.mmap(-1, 1 << 16)  # of its own: the heap may lie on huge pages after somebody's large array
    assert mapped_page_bytes(np.frombuffer(memory, dtype=np.uint8).ctypes.data) == 4096
    assert mapped_page_bytes(0) == 4096


SMAPS_LINES = """\
7f0000000000-7f0040000000 r--s 00000000 00:1b 42 /mnt/a.segment
Size:            1048576 kB
KernelPageSize:        4 kB
Rss:             {rss} kB
ShmemPmdMapped:  {shmem} kB
FilePmdMapped:   {file} kB
VmFlags: rd mr me ms
"""


@pytest.mark.parametrize(
    ("rss", "shmem", "file", "page_bytes"),
    [
        (0, 0, 0, 4096),
        (1000, 0, 0, 4096),
        (6000, 2048, 0, 4096),
        (6148, 6144, 0, HUGE_PAGE_BYTES),
        (4096, 0, 4096, HUGE_PAGE_BYTES),
    ],
)
def test_huge_pages_count_where_they_cover_what_is_resident(
    tmp_path: Path, read_smaps: Callable[[str], int], rss: int, shmem: int, file: int, page_bytes: int
) -> None:
    assert read_smaps(SMAPS_LINES.format(rss=rss, shmem=shmem, file=file)) == page_bytes


@pytest.fixture
def read_smaps(tmp_path: Path) -> Callable[[str], int]:
    def read(text: str) -> int:
        path = tmp_path / "smaps"
        path.write_text(text)
        return mapped_page_bytes(0x7F0000001000, path)

    return read

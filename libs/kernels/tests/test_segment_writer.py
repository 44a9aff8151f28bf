"""Writing segments: any cutting into appends, what comes back, and what is left when it goes wrong."""

import errno
import fcntl
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from treadle.contract import InvalidArgument, NotFound, ResourceExhausted, Table, Unavailable
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.kernels import crc32c
from treadle.kernels.segment import Segment, SegmentWriter, segment_bytes
from treadle.kernels.segment_layout import HEADER_BYTES, SMALL_ALIGN_BYTES, SMALL_TABLE_BYTES, Layout, header_bytes_for

TWO_MIB = 2 << 20
TOKEN_MAP = np.random.default_rng(0).integers(0, 40_000, 49_152).astype(np.int32)


def random_rows(count: int, row_bytes: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, row_bytes), dtype=np.uint8)


def write(path: Path, rows: NDArray[np.uint8], sizes: list[int] | None = None, token_map: NDArray[np.int32] | None = None) -> Table:
    with SegmentWriter(path, rows=rows.shape[0], row_bytes=rows.shape[1], token_map=token_map) as writer:
        at = 0
        for size in sizes or [rows.shape[0]]:
            writer.append(rows[at : at + size])
            at += size
        writer.publish({"model": '{"name":"demo"}', "layer": "2"})
        return writer.table()


@pytest.mark.parametrize("row_bytes", [16, 17, 264, 320, 4096])
@pytest.mark.parametrize("token_map", [None, TOKEN_MAP])
def test_a_segment_gives_back_what_was_written(tmp_path: Path, row_bytes: int, token_map: NDArray[np.int32] | None) -> None:
    rows = random_rows((CHUNK_BYTES + 99_999) // row_bytes, row_bytes)
    write(tmp_path / "a.segment", rows, token_map=token_map)
    with Segment(tmp_path / "a.segment") as segment:
        assert (segment.rows == rows).all()
        assert not segment.rows.flags.writeable
        assert (segment.row_count, segment.row_bytes) == rows.shape
        assert segment.metadata == {"schema": "treadle.segment/1", "model": '{"name":"demo"}', "layer": "2"}
        assert (segment.token_map is None) == (token_map is None)
        assert token_map is None or np.array_equal(np.asarray(segment.token_map), token_map)
        assert segment.rows_offset_bytes == TWO_MIB
        assert segment.file_bytes == segment_bytes(*rows.shape, 0 if token_map is None else 49_152)
        assert segment.file_bytes == segment.path.stat().st_size
        assert segment.file_bytes % TWO_MIB == 0
        seen: list[tuple[int, int]] = []
        segment.verify(lambda done, whole: seen.append((done, whole)))
        assert seen == [(CHUNK_BYTES, rows.size), (rows.size, rows.size)]


@pytest.mark.parametrize("rows", [random_rows(3, 33), random_rows(TWO_MIB // 256, 256), random_rows(3 * TWO_MIB // 256 - 1, 256)])
def test_the_public_safetensors_library_opens_what_we_write(tmp_path: Path, rows: NDArray[np.uint8]) -> None:
    path = tmp_path / "a.segment"
    write(path, rows, token_map=TOKEN_MAP)
    with safe_open(path, "np") as opened:
        assert opened.metadata()["layer"] == "2"
        assert sorted(opened.keys()) == ["crc32c", "pad", "rows", "sha256", "token_map"]
        assert (opened.get_slice("rows")[1:2] == rows[1:2]).all()
    tensors = load_file(path)
    assert (tensors["rows"] == rows).all()
    assert (tensors["token_map"] == TOKEN_MAP).all()
    flat = rows.reshape(-1)
    assert tensors["crc32c"].tolist() == [crc32c(flat[at : at + CHUNK_BYTES]) for at in range(0, flat.size, CHUNK_BYTES)]
    assert not tensors["pad"].any()


def test_a_table_that_fills_its_pages_to_the_last_byte_needs_no_pad(tmp_path: Path) -> None:
    count = (TWO_MIB - 36) // 16  # the last 36 bytes of the page are checksum and digest; 12 before them the token map
    rows, token_map = random_rows(count, 16), TOKEN_MAP[:3]
    assert segment_bytes(count, 16, 3) == 2 * TWO_MIB
    write(tmp_path / "a.segment", rows, token_map=token_map)
    assert load_file(tmp_path / "a.segment")["pad"].size == 0
    with Segment(tmp_path / "a.segment") as segment:
        segment.verify()
        assert segment.token_map is not None
        assert (segment.token_map == token_map).all()


def test_the_version_of_a_table_does_not_depend_on_how_it_was_appended(tmp_path: Path) -> None:
    rows, rng = random_rows(40_000, 264), np.random.default_rng(1)
    tables, contents = set(), set()
    for case in range(5):
        cuts = np.sort(rng.integers(0, 40_000, 3**case)).tolist()
        sizes = np.diff([0, *cuts, 40_000]).tolist()  # empty appends among them
        path = tmp_path / f"{case}.segment"
        tables.add(write(path, rows, sizes))
        contents.add(path.read_bytes())
    assert len(tables) == len(contents) == 1
    assert tables == {Table(40_000, version_told_plainly(rows))}
    assert write(tmp_path / "other.segment", np.roll(rows, 1, axis=0)) not in tables


def version_told_plainly(rows: NDArray[np.uint8]) -> str:
    data = rows.tobytes()
    digests = [hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES)]
    return table_version(rows.shape[0], rows.shape[1], digests)


def test_leaving_without_publish_leaves_no_file(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "a.segment", rows=10, row_bytes=64) as writer:
        writer.append(random_rows(10, 64))
        assert [path.name for path in tmp_path.iterdir()] == ["a.segment.partial"]
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ZeroDivisionError), SegmentWriter(tmp_path / "a.segment", rows=10, row_bytes=64):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_segment_has_its_name_only_once_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.segment"
    with SegmentWriter(path, rows=10, row_bytes=64) as writer:
        with pytest.raises(NotFound):
            Segment(path)
        writer.append(random_rows(9, 64))
        with pytest.raises(InvalidArgument, match="10 were announced, 9 came"):
            writer.publish({})
        assert not path.exists()
        writer.append(random_rows(1, 64))
        writer.publish({})
        assert [entry.name for entry in tmp_path.iterdir()] == ["a.segment"]
    assert path.exists()
    with pytest.raises(InvalidArgument, match="published or given up"):
        writer.append(random_rows(1, 64))
    with pytest.raises(InvalidArgument, match="published or given up"):
        writer.publish({})


def test_a_reader_of_the_old_file_keeps_it_when_a_new_one_takes_the_name(tmp_path: Path) -> None:
    path, old, new = tmp_path / "a.segment", random_rows(500, 64, seed=1), random_rows(500, 64, seed=2)
    write(path, old)
    with Segment(path) as before:
        write(path, new)
        with Segment(path) as after:
            assert (before.rows == old).all()
            assert (after.rows == new).all()


def test_the_owner_writes_and_the_group_reads_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write(tmp_path / "a.segment", random_rows(4, 64))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.segment").stat().st_mode) == 0o640


def test_a_file_that_a_dead_writer_left_is_replaced_and_a_living_writer_is_left_alone(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.segment", random_rows(4, 64)
    (tmp_path / "a.segment.partial").write_bytes(b"\xff" * 3 * TWO_MIB)
    write(path, rows)
    with Segment(path) as segment:
        segment.verify()
    with SegmentWriter(path, rows=4, row_bytes=64) as writer:
        with pytest.raises(Unavailable, match="another writer"):
            SegmentWriter(path, rows=4, row_bytes=64)
        writer.append(rows)
        writer.publish({})


def test_the_lock_is_gone_with_its_writer(tmp_path: Path) -> None:
    partial = tmp_path / "a.segment.partial"
    with partial.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Unavailable):
            SegmentWriter(tmp_path / "a.segment", rows=4, row_bytes=64)
    assert partial.exists()
    SegmentWriter(tmp_path / "a.segment", rows=4, row_bytes=64).abort()
    assert not partial.exists()


def test_a_table_larger_than_the_disk_is_refused_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.segment"
    size = segment_bytes(1 << 40, 4096)
    with pytest.raises(ResourceExhausted, match=rf"{path}.partial: no room for {size} bytes, \d+ are free"):
        SegmentWriter(path, rows=1 << 40, row_bytes=4096)
    assert list(tmp_path.iterdir()) == []


def test_a_file_larger_than_the_process_may_write_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    program = """
import resource, signal, sys
from pathlib import Path
from treadle.contract import ResourceExhausted
from treadle.kernels.segment import SegmentWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    SegmentWriter(Path(sys.argv[1]), rows=1000, row_bytes=64)
except ResourceExhausted as error:
    print(error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.segment")], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"no room for {segment_bytes(1000, 64)} bytes: {os.strerror(errno.EFBIG)}" in ran.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (random_rows(2, 65), r"uint8 \[n, 64\]"),
        (random_rows(2, 128)[:, ::2], "C-contiguous"),
        (random_rows(2, 64).astype(np.int8), "uint8"),
        (random_rows(1, 64)[0], "uint8"),
        (random_rows(6, 64), "5 were announced, these make 6"),
    ],
)
def test_rows_that_do_not_fit_are_refused(tmp_path: Path, rows: Any, message: str) -> None:
    with SegmentWriter(tmp_path / "a.segment", rows=5, row_bytes=64) as writer, pytest.raises(InvalidArgument, match=message):
        writer.append(rows)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"layer": 2}, "metadata: text to text"),
        ({"schema": "another/1"}, "schema is treadle.segment/1"),
        ({"treadle.crc32c": "00000000"}, "not yours to set"),
        ({"model": "x" * TWO_MIB}, "the limit is 2097144"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(tmp_path: Path, metadata: Any, message: str) -> None:
    with SegmentWriter(tmp_path / "a.segment", rows=5, row_bytes=64) as writer:
        writer.append(random_rows(5, 64))
        with pytest.raises(InvalidArgument, match=message):
            writer.publish(metadata)
        writer.publish({"model": 'a "quoted" { manifest } \u00e9\U0001f9f5' * 20_000})  # as much as fits, of any letters
    with Segment(tmp_path / "a.segment") as segment:
        assert segment.metadata["model"].startswith('a "quoted" { manifest } \u00e9\U0001f9f5a')


@pytest.mark.parametrize("sizes", [(0, 64, 0), (5, 15, 0), (5, 4097, 0), (2**40 + 1, 64, 0), (5, 64, 2**24 + 1), (True, 64, 0)])
def test_sizes_beyond_the_limits_are_refused(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidArgument):
        segment_bytes(*sizes)
    with pytest.raises(InvalidArgument):
        SegmentWriter(tmp_path / "a.segment", rows=sizes[0], row_bytes=sizes[1], token_map=np.zeros(sizes[2], dtype=np.int32))
    assert list(tmp_path.iterdir()) == []


def test_writing_takes_little_memory_of_its_own_whatever_the_size(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import numpy as np
from treadle.kernels.segment import SegmentWriter
def anonymous_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10
rows = np.full((20_000, 320), 7, dtype=np.uint8)
with SegmentWriter(Path(sys.argv[1]), rows=800_000, row_bytes=320) as writer:
    writer.append(rows)
    before = anonymous_bytes()
    for _ in range(39):
        writer.append(rows)
    writer.publish({})
    print(anonymous_bytes() - before)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a.segment")], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(ran.stdout) < 12 << 20  # 256 MB were written; the header with its copies is what is seen


@pytest.mark.parametrize("header_bytes", [SMALL_ALIGN_BYTES, 3 * SMALL_ALIGN_BYTES])
def test_a_small_header_costs_a_small_table_little(tmp_path: Path, header_bytes: int) -> None:
    rows, token_map = random_rows(20_000, 18), np.arange(500, dtype=np.int32)
    path = tmp_path / "small.segment"
    with SegmentWriter(path, rows=20_000, row_bytes=18, token_map=token_map, header_bytes=header_bytes) as writer:
        writer.append(rows)
        writer.publish({"model": "m"})
    with Segment(path) as segment:
        segment.verify()
        assert segment.rows_offset_bytes == header_bytes
        np.testing.assert_array_equal(segment.rows, rows)
        assert segment.token_map is not None
        np.testing.assert_array_equal(segment.token_map, token_map)
        assert path.stat().st_size == segment.file_bytes == segment_bytes(20_000, 18, 500, header_bytes)
        assert segment.file_bytes - rows.size < header_bytes + 2 * SMALL_ALIGN_BYTES
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("rows"), rows)


def test_the_header_of_a_table_follows_its_size_and_its_metadata() -> None:
    assert header_bytes_for(SMALL_TABLE_BYTES, 10) == HEADER_BYTES
    assert header_bytes_for(SMALL_TABLE_BYTES - 1, 10) == SMALL_ALIGN_BYTES
    assert header_bytes_for(3 << 20, 100_000) == 4 * SMALL_ALIGN_BYTES
    assert header_bytes_for(3 << 20, 1 << 20) == HEADER_BYTES
    for wrong in (0, 4096, SMALL_ALIGN_BYTES + 1, 2 * HEADER_BYTES):
        with pytest.raises(InvalidArgument, match="header"):
            Layout(10, 64, header_bytes=wrong)

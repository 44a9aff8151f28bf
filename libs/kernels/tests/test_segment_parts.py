"""Segments that hold some rows of their table, and segments that begin inside a larger file."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from treadle.contract import DataLoss, InvalidArgument, NotFound
from treadle.contract.table_manifest import CHUNK_BYTES, version_of_rows
from treadle.kernels.held import HELD_RANGES_MAX, checked_ranges, chunk_runs, first_not_held
from treadle.kernels.segment import Segment, SegmentWriter
from treadle.kernels.segment_layout import HEADER_BYTES, Layout, header, seal_of, sealed

ROWS = np.random.default_rng(0).integers(0, 256, (5 * CHUNK_BYTES // 320 + 77, 320), dtype=np.uint8)  # six chunks
IN_CHUNK_1 = (CHUNK_BYTES // 320 + 10, CHUNK_BYTES // 320 + 20)
ACROSS_3_AND_4 = (4 * CHUNK_BYTES // 320 - 10, 4 * CHUNK_BYTES // 320 + 10)
HELD = [ACROSS_3_AND_4, IN_CHUNK_1]
DIGESTS = [hashlib.sha256(ROWS.reshape(-1)[at : at + CHUNK_BYTES].tobytes()).digest() for at in range(0, ROWS.size, CHUNK_BYTES)]


@pytest.fixture
def partial(tmp_path: Path) -> Path:
    path = tmp_path / "part.segment"
    with SegmentWriter(path, rows=len(ROWS), row_bytes=320, held=HELD) as writer:
        writer.append(ROWS)
        assert writer.table().version == version_of_rows(ROWS)  # of the whole table
        writer.publish({"layer": "2"})
    return path


def test_only_touched_chunks_take_room_and_sizes_and_offsets_stay(partial: Path) -> None:
    status = partial.stat()
    with Segment(partial) as segment:
        assert segment.chunks == [1, 3, 4]
        assert segment.held == (IN_CHUNK_1, ACROSS_3_AND_4)
        assert status.st_size == segment.file_bytes == Layout(len(ROWS), 320).file_bytes
        assert segment.stored_bytes == segment.file_bytes - ROWS.nbytes + 3 * CHUNK_BYTES
        assert 0 <= status.st_blocks * 512 - segment.stored_bytes <= 64 << 10  # pages at the ends of runs
        for first, last in HELD:
            assert (segment.rows[first:last] == ROWS[first:last]).all()
        assert segment.chunk_digests == tuple(DIGESTS)
        assert segment.metadata == {"schema": "treadle.segment/1", "layer": "2"}
        seen: list[tuple[int, int]] = []
        segment.verify(lambda done, whole: seen.append((done, whole)))
        assert seen[-1] == (3 * CHUNK_BYTES, 3 * CHUNK_BYTES)
        segment.populate()
    assert partial.stat().st_blocks == status.st_blocks  # holes were neither read nor filled


def test_chunks_are_passed_over_by_their_digest(tmp_path: Path) -> None:
    flat = ROWS.reshape(-1)
    path = tmp_path / "part.segment"
    with SegmentWriter(path, rows=len(ROWS), row_bytes=320, held=HELD) as writer:
        with pytest.raises(InvalidArgument, match="passed over"):
            writer.skip(b"short")
        for chunk, digest in enumerate(DIGESTS):
            if chunk in (1, 3, 4):
                with pytest.raises(InvalidArgument, match="passed over"):
                    writer.skip(digest)
                writer.append_bytes(flat[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
            else:
                writer.skip(digest)
        assert writer.table().version == version_of_rows(ROWS)
        writer.publish({})
    with Segment(path) as segment:
        segment.verify()
        assert (segment.rows[slice(*IN_CHUNK_1)] == ROWS[slice(*IN_CHUNK_1)]).all()


def test_damage_is_found_in_what_is_held_only(partial: Path) -> None:
    with partial.open("r+b") as file:
        file.seek(HEADER_BYTES + 3 * CHUNK_BYTES + 100)
        file.write(b"\0" if ROWS.reshape(-1)[3 * CHUNK_BYTES + 100] else b"\1")
    with Segment(partial) as segment:
        segment.check_chunk(1)
        with pytest.raises(DataLoss, match="chunk 3 at byte"):
            segment.check_chunk(3)
        with pytest.raises(DataLoss, match="chunk 3"):
            segment.verify()


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([(0, 0)], "no range"),
        ([(5, 3)], "no range"),
        ([(0, 101)], "no range"),
        ([(0, 5), (4, 8)], "row 4 is in two"),
        ([(2 * n, 2 * n + 1) for n in range(HELD_RANGES_MAX + 1)], "make the stretches longer"),
    ],
)
def test_ranges_that_make_no_sense_are_refused(ranges: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        checked_ranges(ranges, 100 if len(ranges) < 9 else 1 << 20)


def test_ranges_that_touch_are_one_and_their_chunks_too() -> None:
    assert checked_ranges([(7, 9), (0, 3), (3, 7)], 10) == ((0, 9),)
    rows = CHUNK_BYTES // 64
    assert chunk_runs(((0, 1), (rows + 1, rows + 2), (4 * rows, 5 * rows)), 64, 9) == ((0, 2), (4, 5))
    assert chunk_runs(None, 64, 9) == ((0, 9),)


def test_the_first_id_outside_is_named_by_its_place() -> None:
    held = ((2, 5), (9, 10))
    ids = np.arange(12)
    outside = [first_not_held(ids[at : at + 1], held) is not None for at in range(12)]
    assert [at for at in range(12) if not outside[at]] == [2, 3, 4, 9]
    assert first_not_held(np.array([3, 9, 5, 7]), held) == 2
    assert first_not_held(np.array([], dtype=np.int64), held) is None
    assert first_not_held(np.array([3]), ()) == 0


def test_an_owner_of_no_row_has_a_frame_only(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path / "none", rows=len(ROWS), row_bytes=320, held=[]) as writer:
        writer.append(ROWS)
        writer.publish({})
    with Segment(tmp_path / "none") as segment:
        segment.verify()
        assert (segment.held, segment.chunks) == ((), [])
        assert segment.stored_bytes == segment.file_bytes - ROWS.nbytes
        assert segment.page_bytes() > 0


def test_a_segment_begins_where_it_is_said_to(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    with SegmentWriter(alone, rows=100, row_bytes=320) as writer:
        writer.append(ROWS[:100])
        writer.publish({"layer": "2"})
    content = alone.read_bytes()
    shared.write_bytes(bytes(HEADER_BYTES) + content + b"behind" * 100)
    with Segment(shared, HEADER_BYTES, len(content)) as segment:
        segment.verify()
        assert (segment.rows == ROWS[:100]).all()
        assert segment.offset == HEADER_BYTES
    for offset, size, message in (
        (0, len(content), "not a segment"), (HEADER_BYTES, len(content) + 1, "torn or truncated"),
        (HEADER_BYTES, 2 * len(content), "no whole segment"), (2 * HEADER_BYTES, None, "not a segment"),
    ):  # fmt: skip
        with pytest.raises(DataLoss, match=message):
            Segment(shared, offset, size)
    with pytest.raises(InvalidArgument, match="begin at multiples"):
        Segment(shared, 4096, len(content))


def test_a_device_needs_a_size_and_an_empty_one_holds_no_segment() -> None:
    with pytest.raises(InvalidArgument, match="name the size"):
        Segment(Path("/dev/zero"))
    with pytest.raises(DataLoss, match="never published"):
        Segment(Path("/dev/zero"), 0, 4 * HEADER_BYTES)
    with pytest.raises(NotFound):
        Segment(Path("/dev/treadle-none"), 0, 4 * HEADER_BYTES)


def test_a_file_shorter_than_its_header_says_is_refused_before_it_is_mapped(partial: Path) -> None:
    os.truncate(partial, partial.stat().st_size - HEADER_BYTES)
    with pytest.raises(DataLoss, match="torn or truncated"):
        Segment(partial)


def test_a_truncation_under_a_reader_is_seen_by_size_and_not_by_a_touch(partial: Path) -> None:
    with Segment(partial) as segment:
        segment.check_frame()
        os.truncate(partial, HEADER_BYTES)
        with pytest.raises(DataLoss, match="truncated under its readers"):
            segment.check_frame()


def test_a_damaged_frame_is_found(partial: Path) -> None:
    with Segment(partial) as segment:
        layout = Layout(len(ROWS), 320)
        for at in (60, layout.tail_at + 3, layout.file_bytes - 1):
            with partial.open("r+b") as file:
                file.seek(at)
                before = file.read(1)
                file.seek(at)
                file.write(bytes([before[0] ^ 1]))
                file.flush()
                with pytest.raises(DataLoss):
                    segment.check_frame()
                file.seek(at)
                file.write(before)
        segment.check_frame()


def test_files_of_older_releases_without_digests_are_read(tmp_path: Path, partial: Path) -> None:
    from treadle.kernels import crc32c

    layout = Layout(100, 320, digests=False)
    text = header(layout, {"layer": "2"})
    tail = crc32c(ROWS[:100].reshape(-1)).to_bytes(4, "little")
    pad = bytes(layout.file_bytes - layout.pad_at)
    path = tmp_path / "old.segment"
    path.write_bytes(sealed(text, seal_of(text, tail)) + ROWS[:100].tobytes() + tail + pad)
    with Segment(path) as segment:
        segment.verify()
        assert segment.chunk_digests == ()
        assert (segment.rows == ROWS[:100]).all()

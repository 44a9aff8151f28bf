"""Segments that are torn, damaged or lie about themselves are never served."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from treadle.contract import DataLoss, InvalidArgument, NotFound
from treadle.contract.table_manifest import CHUNK_BYTES
from treadle.kernels.segment import Segment, SegmentWriter
from treadle.kernels.segment_layout import HEADER_BYTES, SMALL_ALIGN_BYTES, Layout, header, seal_of, sealed

ROWS = np.random.default_rng(0).integers(0, 256, (18_000, 264), dtype=np.uint8)  # two chunks, the second one short
TOKEN_MAP = np.arange(1_000, dtype=np.int32)
LAYOUT = Layout(18_000, 264, 1_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("segments") / "whole.segment"
    with SegmentWriter(path, rows=18_000, row_bytes=264, token_map=TOKEN_MAP) as writer:
        writer.append(ROWS)
        writer.publish({"model": '{"name":"demo"}', "layer": "2"})
    return path.read_bytes()


def opened_and_verified(path: Path) -> None:
    with Segment(path) as segment:
        segment.verify()


def refused(path: Path, content: bytes | bytearray, message: str = "") -> None:
    path.write_bytes(content)
    with pytest.raises(DataLoss, match=message):
        opened_and_verified(path)


def test_a_flipped_bit_anywhere_is_found(tmp_path: Path, whole: bytes) -> None:
    rng = np.random.default_rng(1)
    tail = range(LAYOUT.tail_at, LAYOUT.pad_at)
    places = [
        0,
        7,
        8,
        20,
        34,
        41,
        42,
        80,
        200,
        5_000,
        HEADER_BYTES - 1,
        HEADER_BYTES,
        LAYOUT.tail_at - 1,
        tail[0],
        tail[-1],
        LAYOUT.pad_at,
    ]
    places += (
        rng.integers(8, 600, 60).tolist() + rng.choice(tail, 20).tolist() + rng.integers(HEADER_BYTES, len(whole), 40).tolist()
    )
    path = tmp_path / "a.segment"
    path.write_bytes(whole)
    opened_and_verified(path)
    for at in [*places, len(whole) - 1]:
        for bit in (0, 5):
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([whole[at] ^ (1 << bit)]))
            with pytest.raises(DataLoss):
                opened_and_verified(path)
            with path.open("r+b") as file:
                file.seek(at)
                file.write(whole[at : at + 1])
    opened_and_verified(path)


@pytest.mark.parametrize(("row_byte", "chunk"), [(0, 0), (CHUNK_BYTES - 1, 0), (CHUNK_BYTES, 1), (18_000 * 264 - 1, 1)])
def test_damaged_rows_are_named_by_chunk_and_offset(tmp_path: Path, whole: bytes, row_byte: int, chunk: int) -> None:
    damaged = bytearray(whole)
    damaged[HEADER_BYTES + row_byte] ^= 4
    refused(tmp_path / "a.segment", damaged, f"a.segment: chunk {chunk} at byte {HEADER_BYTES + chunk * CHUNK_BYTES} is damaged")


def test_swapped_pages_and_zeroed_pages_are_found(tmp_path: Path, whole: bytes) -> None:
    one, two = slice(HEADER_BYTES, HEADER_BYTES + 4096), slice(HEADER_BYTES + 8192, HEADER_BYTES + 12288)
    swapped, zeroed = bytearray(whole), bytearray(whole)
    swapped[one], swapped[two] = whole[two], whole[one]
    zeroed[two] = bytes(4096)
    refused(tmp_path / "a.segment", swapped, "chunk 0")
    refused(tmp_path / "a.segment", zeroed, "chunk 0")


@pytest.mark.parametrize(
    "size", [0, 1, 8, 512, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, LAYOUT.pad_at, LAYOUT.file_bytes - 1]
)
def test_a_truncated_file_is_refused(tmp_path: Path, whole: bytes, size: int) -> None:
    refused(tmp_path / "a.segment", whole[:size], "a.segment")


def test_a_longer_file_is_refused(tmp_path: Path, whole: bytes) -> None:
    refused(tmp_path / "a.segment", whole + bytes(2 << 20), "the header says")


def test_a_file_without_its_header_was_never_published(tmp_path: Path, whole: bytes) -> None:
    refused(tmp_path / "a.segment", bytes(HEADER_BYTES) + whole[HEADER_BYTES:], "never published")


def test_other_files_are_no_segments(tmp_path: Path) -> None:
    refused(tmp_path / "a.segment", b"PK\x03\x04" + bytes(3 << 20), "not a segment")
    small = json.dumps({"rows": {"dtype": "U8", "shape": [1, 16], "data_offsets": [0, 16]}}).encode()
    refused(tmp_path / "b.segment", len(small).to_bytes(8, "little") + small + bytes(16), "no whole segment")


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES, 2**63, 2**64 - 1])
def test_a_header_that_lies_about_its_length_is_refused(tmp_path: Path, whole: bytes, length: int) -> None:
    refused(tmp_path / "a.segment", length.to_bytes(8, "little") + whole[8:], "not a segment")


def rewritten(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with its header changed and sealed again, as a liar would do it."""
    entries = json.loads(whole[8:HEADER_BYTES])
    entries["__metadata__"]["treadle.crc32c"] = "00000000"
    change(entries)
    text = whole[:8] + json.dumps(entries, separators=(",", ":")).encode().ljust(HEADER_BYTES - 8)
    return sealed(text, seal_of(text, whole[LAYOUT.tail_at : LAYOUT.pad_at])) + whole[HEADER_BYTES:]


def test_a_rewritten_header_that_says_the_same_is_taken(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a.segment").write_bytes(rewritten(whole, lambda entries: None))
    opened_and_verified(tmp_path / "a.segment")


LIES: list[Callable[[dict[str, Any]], object]] = [
    lambda e: e["rows"].update(shape=[2**40, 4096]),
    lambda e: e["rows"].update(shape=[2**63, 264]),
    lambda e: e["rows"].update(shape=[10**400, 264]),
    lambda e: e["rows"].update(shape=[-18_000, -264]),
    lambda e: e["rows"].update(shape=[18_000.0, 264]),
    lambda e: e["rows"].update(shape=[18_000]),
    lambda e: e["rows"].update(shape=[9_001, 528]),
    lambda e: e["rows"].update(shape="ab"),
    lambda e: e["rows"].update(shape=None),
    lambda e: e["rows"].update(dtype="I8"),
    lambda e: e["rows"].update(data_offsets=[1, 18_000 * 264 + 1]),
    lambda e: e["token_map"].update(shape=[2**32]),
    lambda e: e["token_map"].update(shape=[]),
    lambda e: e["crc32c"].update(shape=[2**40]),
    lambda e: e["pad"].update(data_offsets=[0, 2**62]),
    lambda e: e.pop("rows"),
    lambda e: e.pop("pad"),
    lambda e: e.update(extra={"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
    lambda e: e["__metadata__"].pop("schema"),
    lambda e: e["__metadata__"].update(schema="treadle.segment/2"),
    lambda e: e["__metadata__"].update(layer=2),
    lambda e: e["__metadata__"].update(layer={"a": "b"}),
]


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_and_nothing_is_allocated_by_it(
    tmp_path: Path, whole: bytes, lie: Callable[[dict[str, Any]], object]
) -> None:
    refused(tmp_path / "a.segment", rewritten(whole, lie), "a.segment: ")


@pytest.mark.parametrize(
    "text", [b"[" * 1_000_000, b'{"a":' * 300_000, b"{}", b"[]", b"null", b"1", b"\xff\xfe}", b"}", b'{"__metadata__":[]}']
)
def test_a_header_that_is_no_proper_json_is_refused(tmp_path: Path, whole: bytes, text: bytes) -> None:
    begin = header(LAYOUT, {})[:42]  # up to the seal, which readers look for first
    content = (begin + b'00000000"}}' + text).ljust(HEADER_BYTES)
    refused(tmp_path / "a.segment", sealed(content, seal_of(content, b"")) + whole[HEADER_BYTES:], "a.segment: ")


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such segment"):
        Segment(tmp_path / "a.segment")


def test_a_closed_segment_gives_no_rows_and_arrays_taken_before_stay_valid(tmp_path: Path, whole: bytes) -> None:
    (tmp_path / "a.segment").write_bytes(whole)
    segment = Segment(tmp_path / "a.segment")
    kept = segment.rows[5:7]
    segment.close()
    segment.close()
    assert (kept == ROWS[5:7]).all()
    with pytest.raises(InvalidArgument, match="closed"):
        _ = segment.rows


def test_a_small_segment_is_guarded_like_a_large_one(tmp_path: Path) -> None:
    path, small = tmp_path / "small.segment", SMALL_ALIGN_BYTES
    with SegmentWriter(path, rows=3_000, row_bytes=18, header_bytes=small) as writer:
        writer.append(ROWS.reshape(-1)[:54_000].reshape(3_000, 18))
        writer.publish({"layer": "1"})
    content = path.read_bytes()
    for at in (0, 2, 7, 8, 60, 5_000, small - 1, small, small + 53_999, small + 54_000, len(content) - 1):
        damaged = bytearray(content)
        damaged[at] ^= 1
        refused(path, damaged, "small.segment: ")
    for size in (small - 1, small, len(content) - 1, len(content) - small):
        refused(path, content[:size], "small.segment: ")
    for length in (small, 2 * small - 8, HEADER_BYTES - 8, 2 * HEADER_BYTES - 8):  # another header's size
        refused(path, length.to_bytes(8, "little") + content[8:], "small.segment: ")

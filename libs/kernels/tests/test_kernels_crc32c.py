"""CRC32C: published vectors, any length and alignment, and any cutting into pieces."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import InvalidArgument
from treadle.kernels import crc32c, reference

DATA = np.random.default_rng(0).integers(0, 256, (5 << 20) + 13, dtype=np.uint8)


@pytest.fixture(params=["native", "reference"])
def kernels(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(f"treadle.kernels.{request.param}", reason="the extension was not built", exc_type=ImportError)


def bit_by_bit(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "crc"),
    [
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # RFC 3720, B.4
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_vectors_are_met(kernels: ModuleType, data: bytes, crc: int) -> None:
    assert kernels.crc32c(data) == crc


def test_every_length_and_alignment_gives_the_crc_bit_by_bit(kernels: ModuleType) -> None:
    for length in (1, 2, 3, 7, 8, 9, 63, 64, 65, 1_023, 1_024, 1_025, 2_500, 12_287, 12_288, 12_289, 24_600):
        for offset in (0, 1, 3, 8):
            piece = DATA[offset : offset + length]
            assert kernels.crc32c(piece) == bit_by_bit(piece.tobytes()), (length, offset)


def test_all_forms_agree_on_megabytes(kernels: ModuleType) -> None:
    assert kernels.crc32c(DATA) == reference.crc32c(DATA)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 40_000), max_size=6))
def test_pieces_one_after_the_other_give_the_crc_of_the_whole(cuts: list[int]) -> None:
    for form in (crc32c, reference.crc32c):
        crc, before = 0, 0
        for cut in [*sorted(cuts), 40_000]:
            crc = form(DATA[before:cut], crc)
            before = cut
        assert crc == reference.crc32c(DATA[:40_000])


def test_a_flipped_bit_changes_the_crc(kernels: ModuleType) -> None:
    rng = np.random.default_rng(1)
    whole = kernels.crc32c(DATA[:50_000])
    for bit in rng.integers(0, 400_000, 40).tolist():
        flipped = DATA[:50_000].copy()
        flipped[bit // 8] ^= 1 << (bit % 8)
        assert kernels.crc32c(flipped) != whole


@pytest.mark.parametrize(
    "data", [b"123456789", bytearray(b"123456789"), memoryview(b"123456789"), np.frombuffer(b"123456789", np.uint8)]
)
def test_bytes_of_any_kind_are_taken(kernels: ModuleType, data: Any) -> None:
    assert kernels.crc32c(data) == 0xE3069283


def test_whole_arrays_are_their_bytes(kernels: ModuleType) -> None:
    words = np.arange(6, dtype=np.int64).reshape(2, 3)
    assert kernels.crc32c(words) == kernels.crc32c(words.tobytes())


@pytest.mark.parametrize(("data", "crc"), [(DATA[::2], 0), (DATA[:64].reshape(8, 8).T, 0), (b"x", -1), (b"x", 1 << 32)])
def test_scattered_data_and_crcs_of_more_than_32_bits_are_refused(kernels: ModuleType, data: Any, crc: int) -> None:
    with pytest.raises(InvalidArgument):
        kernels.crc32c(data, crc)

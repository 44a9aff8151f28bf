"""CRC32C (Castagnoli, RFC 3720) in numpy: many short lanes side by side, joined by multiplication modulo the polynomial.

Owns the checksum where the native form was not built; some hundred MB/s, so that a loader stays usable.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument

_POLYNOMIAL = 0x82F63B78  # bit-reflected: the top bit is x^0
_LOW_HALF, _HALF_BITS = np.uint32(0xFFFF), np.uint32(16)
_LANE_BYTES = 1024  # a multiple of 4; what is left of the data after whole lanes goes byte by byte
_LANES_MAX = 4096  # lanes at once: the arrays of one step stay in the second-level cache

BytesLike = bytes | bytearray | memoryview | NDArray[np.generic]


def crc32c(data: BytesLike, crc: int = 0) -> int:
    """CRC32C of `data`, going on from `crc`, the CRC of what came before it.

    data: C-contiguous bytes of any kind, borrowed
    Raises InvalidArgument for scattered data and for a `crc` that is not 32 bits.
    """
    flat = flat_bytes(data, crc)
    state = crc ^ 0xFFFFFFFF
    lanes_bytes = _LANES_MAX * _LANE_BYTES
    for begin in range(0, flat.size, lanes_bytes):
        state = _extended(state, flat[begin : begin + lanes_bytes])
    return state ^ 0xFFFFFFFF


def flat_bytes(data: BytesLike, crc: int) -> NDArray[np.uint8]:
    """`data` as [n] uint8, not copied. Raises InvalidArgument as `crc32c` says."""
    if not 0 <= crc <= 0xFFFFFFFF:
        raise InvalidArgument(f"crc: 32 bits expected, got {crc}")
    view = memoryview(data.data if isinstance(data, np.ndarray) else data)
    if not view.c_contiguous:
        raise InvalidArgument("data: must be C-contiguous")
    return np.frombuffer(view.cast("B") if view.nbytes else b"", dtype=np.uint8)


def _extended(state: int, data: NDArray[np.uint8]) -> int:
    lanes = data.size // _LANE_BYTES
    if lanes:
        words = np.ascontiguousarray(data[: lanes * _LANE_BYTES].reshape(lanes, _LANE_BYTES).view("<u4").T)
        crc = np.zeros(lanes, dtype=np.uint32)
        crc[0] = state
        low, high = _tables()
        for word in words:
            crc ^= word
            crc = low[crc & _LOW_HALF] ^ high[crc >> _HALF_BITS]
        weights = _lane_weights()[
            _LANES_MAX - lanes :
        ]  # the last lane has x^0 behind it, the one before it x^(8 * lane bytes), ...
        state = int(np.bitwise_xor.reduce(_multiply(crc, weights)))
    table = _byte_table()
    for byte in data[lanes * _LANE_BYTES :].tobytes():
        state = (state >> 8) ^ table[(state ^ byte) & 0xFF]
    return state


def _multiply(a: NDArray[np.uint32], b: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """a * b modulo the polynomial, elementwise."""
    one, zero, polynomial = np.uint32(1), np.uint32(0), np.uint32(_POLYNOMIAL)
    product = np.zeros_like(a)
    for bit in range(31, -1, -1):
        product ^= np.where(a >> np.uint32(bit) & one, b, zero)
        b = b >> one ^ np.where(b & one, polynomial, zero)
    return product


@cache
def _byte_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = (state >> 1) ^ (_POLYNOMIAL if state & 1 else 0)
        table.append(state)
    return tuple(table)


@cache
def _tables() -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """What the low and the high 16 bits of a state become after four bytes: two tables of 65,536."""
    step = np.array(_byte_table(), dtype=np.uint32)
    low = np.arange(1 << 16, dtype=np.uint32)
    high = low << _HALF_BITS
    for _ in range(4):
        low = low >> np.uint32(8) ^ step[low & np.uint32(0xFF)]
        high = high >> np.uint32(8) ^ step[high & np.uint32(0xFF)]
    return low, high


@cache
def _lane_weights() -> NDArray[np.uint32]:
    """x^(8 * lane bytes * k) for k = lanes-1 .. 0: what stands behind each lane."""
    power = np.array([0x00800000], dtype=np.uint32)  # x^8
    for _ in range(_LANE_BYTES.bit_length() - 1):
        power = _multiply(power, power)
    weights = np.array([0x80000000], dtype=np.uint32)  # x^0
    while weights.size < _LANES_MAX:
        weights = np.concatenate([_multiply(weights, np.broadcast_to(power, weights.shape)), weights])
        power = _multiply(power, power)
    return weights

"""Windows as little-endian bytes: sizes are checked against each other before an array stands on them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import InvalidArgument, Windows


def read_windows(order_max: int, *, tokens: bytes, starts: bytes, lookback: bytes, dead: bytes, lookback_dead: bytes) -> Windows:
    """Windows of a step for n-grams up to `order_max`; the arrays are views of the bytes.

    tokens [T] int64, starts [R+1] int32, lookback [R, order_max-1] int64; dead [T] and lookback_dead [R, order_max-1] one byte
    each, 0 or 1, empty for none. Raises InvalidArgument naming the array whose size or content is wrong.
    """
    depth = order_max - 1
    count, requests = _whole("tokens", tokens, 8), _whole("starts", starts, 4) - 1
    if requests < 0:
        raise InvalidArgument("starts: int32 [R+1] expected, got none")
    if len(lookback) != requests * depth * 8:
        raise InvalidArgument(f"lookback: int64 [{requests}, {depth}] expected, got {len(lookback)} bytes")
    return Windows(
        tokens=np.frombuffer(tokens, dtype="<i8", count=count), starts=np.frombuffer(starts, dtype="<i4"),
        lookback=np.frombuffer(lookback, dtype="<i8").reshape(requests, depth),
        dead=_mask("dead", dead, (count,)), lookback_dead=_mask("lookback_dead", lookback_dead, (requests, depth)),
    )  # fmt: skip


def read_ids(data: bytes) -> NDArray[np.int64]:
    """Row ids, int64 little-endian; a view of the bytes. Raises InvalidArgument for another size."""
    return np.frombuffer(data, dtype="<i8", count=_whole("rows", data, 8))


def _whole(name: str, data: bytes, item_bytes: int) -> int:
    if len(data) % item_bytes:
        raise InvalidArgument(f"{name}: whole {item_bytes}-byte numbers expected, got {len(data)} bytes")
    return len(data) // item_bytes


def _mask(name: str, data: bytes, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
    if not data:
        return None
    if len(data) != np.prod(shape, dtype=np.int64):
        raise InvalidArgument(f"{name}: one byte for each of {list(shape)} expected, got {len(data)}")
    flags = np.frombuffer(data, dtype=np.uint8)
    if int(flags.max()) > 1:
        raise InvalidArgument(f"{name}: 0 or 1 expected, got {int(flags.max())}")
    return flags.view(np.bool_).reshape(shape)

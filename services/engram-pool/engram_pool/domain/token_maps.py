"""Token maps as they come in: int32 little-endian bytes, raw id -> compressed id."""

from __future__ import annotations

import hashlib

import numpy as np

from engram_pool.domain.storing import TokenMap
from treadle.contract import EngramModel, FingerprintMismatch, InvalidArgument

TOKEN_MAP_IDS_MAX = 1 << 22  # 4 M ids, 16 MiB: sixteen times the largest vocabulary in use


def read_token_map(data: bytes) -> TokenMap | None:
    """The map in `data`, a view of it; None if it is empty. Raises InvalidArgument for another size or a negative id."""
    if not data:
        return None
    if len(data) % 4 or len(data) // 4 > TOKEN_MAP_IDS_MAX:
        raise InvalidArgument(f"token_map: int32 for at most {TOKEN_MAP_IDS_MAX} ids expected, got {len(data)} bytes")
    token_map = np.frombuffer(data, dtype="<i4")
    if int(token_map.min()) < 0:
        raise InvalidArgument(f"token_map: compressed ids are >= 0, got {int(token_map.min())}")
    return token_map


def token_map_digest(token_map: TokenMap) -> str:
    """What a manifest names a token map by: sha256 of its int32 little-endian bytes."""
    return hashlib.sha256(token_map.astype("<i4", copy=False).tobytes()).hexdigest()


def compressed_size(token_map: TokenMap) -> int:
    """Number of compressed ids: they are handed out in order, so one more than the largest."""
    return int(token_map.max()) + 1


def check_token_map(model: EngramModel, token_map: TokenMap | None) -> None:
    """Raise InvalidArgument unless the map is there exactly if the family needs one, FingerprintMismatch unless it fits."""
    if (model.token_map is None) != (token_map is None):
        wanted = "needs one" if token_map is None else "has none"
        raise InvalidArgument(f"token_map: {'missing' if token_map is None else 'given'}, but the family {model.family} {wanted}")
    if token_map is None or model.token_map is None:
        return
    if token_map_digest(token_map) != model.token_map:
        raise FingerprintMismatch("token_map", model.token_map, token_map_digest(token_map))
    if compressed_size(token_map) != model.compressed_vocab_size:
        raise FingerprintMismatch("compressed_vocab_size", model.compressed_vocab_size, compressed_size(token_map))
    if not model.pad_id < token_map.shape[0]:
        raise InvalidArgument(f"pad_id: {model.pad_id} is not in the token map of {token_map.shape[0]} ids")

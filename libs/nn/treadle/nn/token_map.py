"""Compressed token ids: raw ids whose texts differ only in case, accents or spacing share one.

Source: the Engram demonstration code and DeepSeek-V4.1, which define it with these very normalisers. Uses the raw
`tokenizers` backend, which cleans up no spaces. Owns the map; `treadle.kernels` applies it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, normalizers

from treadle.contract.errors import DataLoss, NotFound

VOCABULARY_MAX = 1 << 24  # ids; far above any tokenizer's, and it bounds what a file can make us allocate
_LONE_SPACE = "\ue000"  # private use: carries a text that is one space past Strip
_UNDECODABLE = "\ufffd"  # a token that is part of a UTF-8 sequence decodes to this


def compressed_token_map(tokenizer_json: Path) -> tuple[NDArray[np.int32], int]:
    """The map from raw to compressed ids, and how many compressed ids there are.

    Each id, special tokens included, is keyed by its normalised text (by its text where that is empty, by its raw token
    where it does not decode); keys are numbered in the order in which they are first seen.
    Returns (int32 [V], size). Raises NotFound, or DataLoss where the file is no tokenizer.
    """
    tokenizer = _load(tokenizer_json)
    vocabulary = tokenizer.get_vocab_size(with_added_tokens=True)
    if vocabulary > VOCABULARY_MAX:
        raise DataLoss(f"{tokenizer_json}: {vocabulary} tokens, the limit is {VOCABULARY_MAX}")
    texts = tokenizer.decode_batch([[token] for token in range(vocabulary)], skip_special_tokens=False)
    normalise, numbers = _normaliser().normalize_str, dict[str, int]()
    token_map = np.empty(vocabulary, dtype=np.int32)
    for token, text in enumerate(texts):
        key = str(tokenizer.id_to_token(token)) if _UNDECODABLE in text else normalise(text) or text
        token_map[token] = numbers.setdefault(key, len(numbers))
    return token_map, len(numbers)


def token_map_digest(token_map: NDArray[np.int32]) -> str:
    """What a manifest's `token_map` holds: sha256 over the map as little-endian int32."""
    return hashlib.sha256(token_map.astype("<i4", copy=False).tobytes()).hexdigest()


def _normaliser() -> normalizers.Sequence:
    return normalizers.Sequence([
        normalizers.NFKC(), normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "), normalizers.Replace(Regex(r"^ $"), _LONE_SPACE),
        normalizers.Strip(), normalizers.Replace(_LONE_SPACE, " "),
    ])  # fmt: skip


def _load(path: Path) -> Tokenizer:
    if not path.is_file():
        raise NotFound(f"{path}: no such tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the backend raises plain Exception for whatever it cannot read
        raise DataLoss(f"{path}: not a tokenizer.json: {error}") from error

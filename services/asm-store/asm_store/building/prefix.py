"""The prefix as token ids, and the digests of ids.

Owns reading text files and a model's tokenizer. Does not run the model (`collection`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound

TEXT_BYTES_MAX = 64 << 20  # of one file: some 16M tokens, more than any model's positions


def read_text(path: Path) -> str:
    """A UTF-8 file with plain newlines and without a byte order mark.

    Raises NotFound, InvalidArgument (not UTF-8, naming the offset; larger than TEXT_BYTES_MAX; empty).
    """
    if not path.is_file():
        raise NotFound(f"{path}: no such text file")
    with path.open("rb") as file:
        data = file.read(TEXT_BYTES_MAX + 1)
    if len(data) > TEXT_BYTES_MAX:
        raise InvalidArgument(f"{path}: more than {TEXT_BYTES_MAX} bytes of text")
    try:
        text = data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path}: not UTF-8 at byte {error.start}; convert it, e.g. with iconv") from error
    if not text.strip():
        raise InvalidArgument(f"{path}: no text in it")
    return text


def load_tokenizer(model_folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises NotFound, DataLoss."""
    path = model_folder / "tokenizer.json"
    if not path.is_file():
        raise NotFound(f"{path}: no such file; a model folder holds config.json, safetensors weights and tokenizer.json")
    try:
        tokenizer: Tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # what the tokenizers package raises is a bare Exception
        raise DataLoss(f"{path}: not a tokenizer: {error}") from error
    return tokenizer


def prefix_tokens(tokenizer: Tokenizer, texts: Sequence[str], *, begins: bool) -> tuple[int, ...]:
    """Token ids of the texts one after the other; begins: with the special tokens that the tokenizer sets at the beginning of a text."""
    return tuple(tokenizer.encode("".join(texts), add_special_tokens=begins).ids)


def tokens_of_parts(tokenizer: Tokenizer, texts: Sequence[str], digests: Sequence[str]) -> tuple[int, ...]:
    """Token ids of a prefix of parts, in order: each of one or more of the texts, tokenised by itself as its builder did.

    digests: of the parts' token ids
    Raises InvalidArgument naming the part whose tokens the texts, or those that are left, do not give.
    """
    tokens, left = tuple[int, ...](), list(texts)
    for number, digest in enumerate(digests, 1):
        for count in range(1, len(left) + 1):
            part = prefix_tokens(tokenizer, left[:count], begins=number == 1)
            if digest_of(part) == digest:
                tokens, left = tokens + part, left[count:]
                break
        else:
            of = f"part {number} of {len(digests)} of it" if len(digests) > 1 else "it"
            raise InvalidArgument(f"the texts: their tokens are not the ones {of} was built from")
    if left:
        raise InvalidArgument(f"the texts: {len(left)} more than it was built from")
    return tokens


def digest_of(ids: Iterable[int]) -> str:
    """sha256 of token ids as int32 little-endian, as manifests have it."""
    return hashlib.sha256(np.fromiter(ids, dtype="<i4").tobytes()).hexdigest()

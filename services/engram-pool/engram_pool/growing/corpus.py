"""Text to blocks of token ids: what is learnt from, what is held out, what only keeps the rest of the language in place.

Owns reading, the split and the order of blocks. Does not know a model or what is learnt. Text is read whole: TEXT_BYTES_MAX.
"""

from __future__ import annotations

import codecs
import hashlib
import lzma
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engram_pool.growing.overlap import covered, ngram_hashes
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound

TEXT_BYTES_MAX = 1 << 30  # of one file, unpacked; tokens take up to 8 times a text's bytes, a quarter of that in practice
TOKENS_MIN = 8 * 512  # below this nothing can be held out, and nothing is learnt
PASSAGE_BLOCKS, HELD_OUT_EVERY = 4, 15  # of each 15 passages of four blocks the last is held out
CHUNK_CHARACTERS = 1 << 20  # given to the tokenizer at once

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Text:
    """One text: its name, and token ids int64 [n]."""

    name: str
    tokens: Tokens


@dataclass(frozen=True, slots=True)
class Corpus:
    """Blocks int64 [n, block_tokens] each.

    train:    to learn from
    held_out: of the same text, never learnt from
    mix:      other text, to keep the rest of the language in place; may be empty
    other:    the end of the mixed text, never used in training; may be empty
    digest:   over the token ids of the texts to learn from, held-out parts included
    names:    of those texts
    repeated: share of the held-out tokens that lie in a long n-gram of what is learnt (see `overlap`)
    """

    train: Tokens
    held_out: Tokens
    mix: Tokens
    other: Tokens
    digest: str
    names: tuple[str, ...]
    repeated: float = 0.0

    @property
    def blocks_digest(self) -> str:
        """sha256 over every block that training reads, in order."""
        digest = hashlib.sha256()
        for part in (self.train, self.mix):
            digest.update(repr(part.shape).encode())
            digest.update(np.ascontiguousarray(part, dtype="<i8").data)
        return digest.hexdigest()

    def vocabulary(self) -> Tokens:
        """The different token ids of what is trained on, rising."""
        return np.unique(np.concatenate((self.train.reshape(-1), self.mix.reshape(-1))))


def read_text(path: Path) -> str:
    """A file's text with plain newlines and without a byte order mark, unpacked where its name ends in .xz.

    Raises NotFound, DataLoss (torn .xz), InvalidArgument (not UTF-8, naming the offset; larger than TEXT_BYTES_MAX).
    """
    if not path.is_file():
        raise NotFound(f"{path}: no such text file")
    try:
        with lzma.open(path) if path.suffix == ".xz" else path.open("rb") as file:
            data = file.read(TEXT_BYTES_MAX + 1)
    except (lzma.LZMAError, EOFError) as error:
        raise DataLoss(f"{path}: not a whole .xz file: {error}") from error
    if len(data) > TEXT_BYTES_MAX:
        raise InvalidArgument(f"{path}: more than {TEXT_BYTES_MAX} bytes of text; give fewer or smaller files")
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in data:
        raise InvalidArgument(f"{path}: not UTF-8 but UTF-16, or no text at all; convert it, e.g. `iconv -f utf-16 -t utf-8`")
    try:
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"{path}: not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}; convert it, e.g. `iconv -f latin1 -t utf-8`"
        ) from error


def tokenise(tokenizer_json: Path, texts: Sequence[tuple[str, str]]) -> list[Text]:
    """Token ids of (name, text) pairs, without special tokens. Raises NotFound or DataLoss for the tokenizer."""
    if not tokenizer_json.is_file():
        raise NotFound(f"{tokenizer_json}: no such tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the backend raises plain Exception for whatever it cannot read
        raise DataLoss(f"{tokenizer_json}: not a tokenizer.json: {error}") from error
    return [Text(name, _ids(tokenizer, text)) for name, text in texts]


def blocks_of(tokens: Tokens, length: int) -> Tokens:
    """Whole blocks [n, length] from the beginning of `tokens`; a rest shorter than a block is left out."""
    return tokens[: len(tokens) // length * length].reshape(-1, length)


def split(texts: Sequence[Text], length: int) -> tuple[Tokens, Tokens]:
    """(train, held out): of each HELD_OUT_EVERY passages of PASSAGE_BLOCKS blocks the last is held out.

    A passage is long, so that few n-grams of the held-out text stand just beside it in what is learnt.
    Raises InvalidArgument for texts of fewer than TOKENS_MIN tokens together.
    """
    _require_enough(texts, length)
    blocks = blocks_of(_joined(texts), length)
    every = HELD_OUT_EVERY if len(blocks) >= PASSAGE_BLOCKS * HELD_OUT_EVERY else max(2, len(blocks) // PASSAGE_BLOCKS)
    held = (np.arange(len(blocks)) // PASSAGE_BLOCKS) % every == every - 1
    return blocks[~held], blocks[held]


def corpus_of(
    texts: Sequence[Text], length: int, *, held_out: Sequence[Text] = (), mix: Sequence[Text] = (), learn_mix: bool = True
) -> Corpus:
    """The corpus of `texts`. held_out: texts of their own instead of passages of `texts`; mix: other text.

    learn_mix: False: nothing of `mix` is trained on, its end is measured all the same
    Raises InvalidArgument for too little text, or a text that is given twice.
    """
    _require_apart([*texts, *held_out, *mix])
    if held_out:
        _require_enough(texts, length)
        train, held = blocks_of(_joined(texts), length), blocks_of(_joined(held_out), length)
    else:
        train, held = split(texts, length)
    if not len(held):
        raise InvalidArgument(f"held-out text: not one whole block of {length} tokens")
    mixed = blocks_of(_joined(mix), length) if mix else train[:0]
    if mix and len(mixed) < 2:
        raise InvalidArgument(
            f"{', '.join(text.name for text in mix)}: fewer than two blocks of {length} tokens to mix in; --no-mix does without"
        )
    other = -(-len(mixed) // HELD_OUT_EVERY) if len(mixed) < HELD_OUT_EVERY else len(mixed) // HELD_OUT_EVERY  # from its end
    return Corpus(
        train, held, mixed[: len(mixed) - other] if learn_mix else mixed[:0], mixed[len(mixed) - other :],
        digest_of([*texts, *held_out]), tuple(text.name for text in texts),
        covered([held.reshape(-1)], ngram_hashes([train.reshape(-1)])),
    )  # fmt: skip


def digest_of(texts: Sequence[Text]) -> str:
    """sha256 over the token ids of the texts, little-endian, each behind its length."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(len(text.tokens).to_bytes(8, "little"))
        digest.update(text.tokens.astype("<i8", copy=False).tobytes())
    return digest.hexdigest()


def _require_apart(texts: Sequence[Text]) -> None:
    """Raise InvalidArgument if two of the texts are one."""
    seen: dict[str, str] = {}
    for text in texts:
        digest = digest_of([text])
        first = seen.get(digest)
        if first is not None:
            raise InvalidArgument(
                f"{text.name}: the same text as {first}; what is learnt, held out and mixed in must be different texts"
            )
        seen[digest] = text.name


def _joined(texts: Sequence[Text]) -> Tokens:
    return np.concatenate([text.tokens for text in texts])


def _require_enough(texts: Sequence[Text], length: int) -> None:
    total, least = sum(len(text.tokens) for text in texts), max(TOKENS_MIN, 8 * length)
    if total < least:
        names = ", ".join(text.name for text in texts)
        raise InvalidArgument(f"{names}: {total} tokens are too few to learn from and hold some out; at least {least} are needed")


def _ids(tokenizer: Tokenizer, text: str) -> Tokens:
    """Encoded in pieces that end at a line, so that memory stays bounded; the tokenizer splits at line ends anyway."""
    pieces = tokenizer.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
    return np.concatenate([np.asarray(piece.ids, dtype=np.int64) for piece in pieces]) if pieces else np.empty(0, dtype=np.int64)


def _pieces(text: str) -> Iterator[str]:
    at = 0
    while at < len(text):
        end = text.rfind("\n", at, at + CHUNK_CHARACTERS) + 1 if len(text) - at > CHUNK_CHARACTERS else len(text)
        end = end if end > at else at + CHUNK_CHARACTERS
        yield text[at:end]
        at = end

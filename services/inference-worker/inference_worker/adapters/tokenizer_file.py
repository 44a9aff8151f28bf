"""Reads the bytes of every token from a folder's tokenizer.json.

Understands byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) and SentencePiece-like BPE with byte fallback (Llama 2,
Mistral); refuses others, for their text cannot be put together token by token.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from inference_worker.domain.text import Vocabulary
from treadle.contract.errors import InvalidArgument, NotFound

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # SentencePiece writes a space so


def read_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in `path` (a tokenizer.json). Raises NotFound, or InvalidArgument for a kind it does not understand."""
    try:
        tokenizer = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"{path}: no such file; a model folder has a tokenizer.json") from error
    except ValueError as error:
        raise InvalidArgument(f"{path}: not JSON: {error}") from error
    to_bytes = _byte_level if "ByteLevel" in _parts(tokenizer.get("decoder")) else _byte_fallback
    if to_bytes is _byte_fallback and "ByteFallback" not in _parts(tokenizer.get("decoder")):
        raise InvalidArgument(f"{path}: decoder {sorted(_parts(tokenizer.get('decoder')))}: ByteLevel or ByteFallback expected")
    pieces = {index: to_bytes(token) for token, index in _vocabulary_of(tokenizer).items()}
    added = tokenizer.get("added_tokens") or []
    pieces |= {token["id"]: to_bytes(token["content"]) for token in added}
    special = frozenset(token["id"] for token in added if token["special"])
    return Vocabulary(tuple(pieces.get(index, b"") for index in range(max(pieces) + 1)), special)


def digest_of(path: Path) -> str:
    """sha256 of a file, 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _vocabulary_of(tokenizer: dict[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer["model"]["vocab"]
    return vocabulary if isinstance(vocabulary, dict) else {token: index for index, (token, _) in enumerate(vocabulary)}


def _parts(decoder: dict[str, Any] | None) -> set[str]:
    """Names of a decoder and of those it is a sequence of."""
    if decoder is None:
        return set()
    return {decoder["type"]}.union(*(_parts(part) for part in decoder.get("decoders", [])))


def _byte_level(token: str) -> bytes:
    """GPT-2's alphabet back to bytes; a token with a character outside of it stands for itself, as `tokenizers` has it."""
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from characters to bytes: printable ones stand for themselves, the rest for 256, 257, …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


_ALPHABET = _byte_alphabet()

"""What an artifact is: the sha256 of its canonical manifest."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from treadle.contract.errors import InvalidArgument

_VERSION = re.compile(r"[0-9a-f]{64}")
_VERSION_PREFIX = re.compile(r"[0-9a-f]{8,64}")
VERSION_PREFIX_FORM = "8 to 64 hexadecimal digits"  # the words for it, in refusals
RESERVED_NAMES = ("none", "default")  # what a request says instead of a model's name
_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,127}")


def canonical_json(manifest: Mapping[str, Any]) -> bytes:
    """`manifest` as canonical JSON: keys sorted, no spaces, UTF-8, integers as integers.

    Raises InvalidArgument for floats (their text differs between writers) and for anything that JSON does not know.
    """
    _refuse_floats(manifest, "manifest")
    try:
        return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"not a JSON manifest: {error}") from error


def version_of(manifest: Mapping[str, Any]) -> str:
    """The version of an artifact: sha256 of its canonical manifest, 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(manifest)).hexdigest()


def check_version(text: str) -> str:
    """`text` itself if it is a version. Raises InvalidArgument otherwise."""
    if not _VERSION.fullmatch(text):
        raise InvalidArgument(f"a version is 64 hexadecimal digits, got {text!r}")
    return text


def is_version_prefix(text: str) -> bool:
    """Whether `text` can be the beginning of a version by which a request chooses it: eight digits tell a pool's versions apart."""
    return _VERSION_PREFIX.fullmatch(text) is not None


def check_name(text: str) -> str:
    """`text` itself if it can name a model: it becomes a folder, so no slashes, no leading dot, at most 128 characters.

    Raises InvalidArgument otherwise, and for RESERVED_NAMES, which no request could ask for.
    """
    if not isinstance(text, str) or not _NAME.fullmatch(text):
        raise InvalidArgument(f"a name is 1-128 of a-z 0-9 . _ + - and starts with a letter or digit, got {text!r}")
    if text in RESERVED_NAMES:
        raise InvalidArgument(f"the name {text!r} means something else in requests; choose another")
    return text


def _refuse_floats(value: object, path: str) -> None:
    if isinstance(value, float):
        raise InvalidArgument(f"{path}: floats have no canonical text, got {value!r}")
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"{path}: keys are strings, got {key!r}")
            _refuse_floats(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_floats(item, f"{path}[{index}]")

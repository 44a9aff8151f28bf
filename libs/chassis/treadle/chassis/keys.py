"""API keys as files hold them: the key itself, or `sha256:` and its digest, which opens nothing to who reads the file.

Owns the form of both. One plain SHA-256 is enough because a key of ours is 256 random bits: there is no list of likely keys to
try, which is all that salt and slow hashes protect against (docs/decisions/0029).
"""

from __future__ import annotations

import hashlib
import re
import secrets

KEY_PREFIX = "tk-"  # by which scanners of leaked secrets know one
KEY_BYTES = 32
HASHED = "sha256:"
_HASHED_FORM = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """A key of 256 random bits, as text without spaces."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def is_hashed(text: str) -> bool:
    """Whether a file's text says that it is a digest. It may still be a wrong one, see `key_digest`."""
    return text.startswith(HASHED)


def key_digest(text: str) -> bytes:
    """The 32 bytes that stand for a key, from the key or from `sha256:<64 hexadecimal digits>`.

    Raises ValueError, which shows no text, for a digest of another form.
    """
    if not is_hashed(text):
        return hashlib.sha256(text.encode()).digest()
    if not _HASHED_FORM.fullmatch(text):
        raise ValueError("sha256: and 64 hexadecimal digits, small letters, expected")
    return bytes.fromhex(text.removeprefix(HASHED))


def hashed(key: str) -> str:
    """What stands in a file in place of `key`."""
    return HASHED + key_digest(key).hex()

"""Who may call: keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from treadle.contract.errors import AccessDenied

_SCHEME = "bearer "


class ApiKeys:
    """The keys that open the gateway; without any it is open to everybody who reaches it."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def any(self) -> bool:
        """Whether there are keys to show."""
        return bool(self._digests)

    def tenant_of(self, authorization: str | None) -> str:
        """A name for the holder of the key in an Authorization header, from which the key cannot be told; "" without keys.

        Raises AccessDenied for a header that shows none of the keys.
        """
        if not self._digests:
            return ""
        shown = authorization or ""
        key = shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, so that time tells nothing
        if not any(matches):
            raise AccessDenied("show one of this gateway's keys: Authorization: Bearer <key>")
        return hashlib.sha256(b"treadle tenant " + digest).hexdigest()[:32]

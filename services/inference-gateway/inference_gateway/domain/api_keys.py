"""Who may call: keys, compared in constant time, and the memory that is the default of each."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from inference_gateway.domain.memories import MemoryChoice
from treadle.contract.errors import AccessDenied

_SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls. `tenant`: a name from which the key cannot be told, "" without keys; `memory`: None: the key names none."""

    tenant: str = ""
    memory: MemoryChoice | None = None


ANYBODY = Caller()  # who calls a gateway without keys


class ApiKeys:
    """The keys that open the gateway; without any it is open to everybody who reaches it."""

    def __init__(self, memories: Mapping[str, MemoryChoice | None]) -> None:
        """memories: for each key the memory of requests that choose none, or None."""
        self._digests = [hashlib.sha256(key.encode()).digest() for key in memories]
        self._callers = [
            Caller(hashlib.sha256(b"treadle tenant " + digest).hexdigest()[:32], memory)
            for digest, memory in zip(self._digests, memories.values(), strict=True)
        ]

    @property
    def any(self) -> bool:
        """Whether there are keys to show."""
        return bool(self._digests)

    def caller_of(self, authorization: str | None) -> Caller:
        """The holder of the key in an Authorization header.

        Raises AccessDenied for a header that shows none of the keys.
        """
        if not self._digests:
            return ANYBODY
        shown = authorization or ""
        key = shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, so that time tells nothing
        if not any(matches):
            raise AccessDenied("show one of this gateway's keys: Authorization: Bearer <key>")
        return self._callers[matches.index(True)]

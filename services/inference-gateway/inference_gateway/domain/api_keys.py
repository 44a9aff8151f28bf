"""Who may call: keys, known by their digests alone, and what each brings: a tenant, a memory, a priority, limits.

Owns the tenant's part of cache keys, too. Where keys are written down is the adapters' (key_file).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field

from inference_gateway.domain.limits import UNLIMITED, Allowance, KeyUse
from inference_gateway.domain.memories import MemoryChoice
from treadle.contract.errors import AccessDenied

PRIORITIES = ("high", "normal", "low")
_SCHEME = "bearer "
_SALT_CHARACTERS = 32  # 128 bits of a digest


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key. digest: sha256 of it, 32 bytes; tenant: a configured name, "": the key is a tenant of its own."""

    digest: bytes = field(repr=False)
    tenant: str = ""
    memory: MemoryChoice | None = None
    priority: str | None = None
    allowance: Allowance = UNLIMITED


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    tenant:      a name from which the key cannot be told, "" without keys; part of every cache key
    memory:      None: the key names none
    tenant_name: as configured, "" where the key names none; a metric label
    priority:    one of PRIORITIES; None: the key says nothing
    use:         what the key has asked for lately; None without keys
    """

    tenant: str = ""
    memory: MemoryChoice | None = None
    tenant_name: str = ""
    priority: str | None = None
    use: KeyUse | None = field(default=None, compare=False, repr=False)


ANYBODY = Caller()  # who calls a gateway without keys


class ApiKeys:
    """The keys that open the gateway; one that needs none is open to everybody who reaches it."""

    def __init__(self, records: Iterable[KeyRecord] | None) -> None:
        """records: None: no keys are needed; none at all: nobody comes in."""
        self._needed = records is not None
        # Found by a digest that is keyed with a secret of this process: how long that takes tells nothing about any key, however
        # many there are.
        self._secret = secrets.token_bytes(32)
        self._found: dict[bytes, tuple[bytes, Caller]] = {}
        self.replace(records or ())

    @property
    def any(self) -> bool:
        """Whether a key must be shown."""
        return self._needed

    def replace(self, records: Iterable[KeyRecord]) -> None:
        """From now on only these keys open the gateway. One that was there before keeps what it has used."""
        found = {}
        for record in records:
            blinded = self._blinded(record.digest)
            known = self._found.get(blinded)
            use = known[1].use if known is not None else None
            if use is None:
                use = KeyUse(record.allowance)
            else:
                use.allow(record.allowance)
            caller = Caller(_tenant(record), record.memory, record.tenant, record.priority, use)
            found[blinded] = (record.digest, caller)
        self._found = found

    def caller_of(self, authorization: str | None) -> Caller:
        """The holder of the key in an Authorization header.

        Raises AccessDenied for a header that shows none of the keys.
        """
        if not self._needed:
            return ANYBODY
        shown = authorization or ""
        key = shown[len(_SCHEME) :].strip() if shown.lower().startswith(_SCHEME) else ""
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        known, caller = self._found.get(self._blinded(digest), (bytes(32), ANYBODY))
        if not hmac.compare_digest(digest, known):
            raise AccessDenied("show one of this gateway's keys: Authorization: Bearer <key>")
        return caller

    def _blinded(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def cache_salt(tenant: str, wish: str | None) -> str:
    """What keeps a request's cached prefixes apart: its tenant, and within that what it wishes itself.

    A wish is hashed together with its tenant, so that no wish makes the salt of another tenant, or of the tenant without a wish.
    """
    if not wish:
        return tenant
    return hashlib.sha256(b"treadle salt " + tenant.encode() + b"\0" + wish.encode("utf-8", "surrogatepass")).hexdigest()[
        :_SALT_CHARACTERS
    ]


def _tenant(record: KeyRecord) -> str:
    source = b"treadle tenant name " + record.tenant.encode() if record.tenant else b"treadle tenant " + record.digest
    return hashlib.sha256(source).hexdigest()[:_SALT_CHARACTERS]

"""The tenants file: names, tokens and quotas, read once at the start. Tokens stay in files of their own, or come as digests.

tenants:
  - name: team-a
    token_file: /run/secrets/team-a     # or token_sha256: 64 hexadecimal digits
    file_bytes_max: 2000000000          # 0 or none: the setting tenant_bytes_max
    admin: false                        # true: may change every tenant's versions, as keys of the store itself may
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asm_store.domain.tenancy import Caller, Tenants
from asm_store.domain.versions import TENANT
from treadle.chassis.settings import WrongSetting
from treadle.chassis.tenant_entries import is_admin, read_entries, token_digests
from treadle.contract.checks import is_int
from treadle.contract.dictionary import DICTIONARY_BYTES_MAX

_FIELDS = {"name", "token_file", "token_sha256", "file_bytes_max", "admin"}


def read_tenants(path: Path | None, *, nobody: str, bytes_max: int) -> Tenants:
    """The tenants in a file; none without one. nobody: the tenant of whoever is none of them.

    Raises WrongSetting, naming the tenant, for what cannot be read or makes no sense.
    """
    callers, quotas = dict[bytes, Caller](), dict[str, int]()
    for index, entry in enumerate(read_entries(path, _FIELDS) if path is not None else ()):
        place = f"tenants_file: {path}: tenant {entry.get('name', index)!r}"
        caller = Caller(_name(entry, place), is_admin(entry, place))
        if caller.tenant in quotas:
            raise WrongSetting(f"{place}: it stands there twice")
        quotas[caller.tenant] = _quota(entry, place) or bytes_max
        for digest in token_digests(entry, place):
            if callers.setdefault(digest, caller) is not caller:
                raise WrongSetting(f"{place}: its token is another's already")
    return Tenants(Caller(nobody, admin=True), callers, quotas, bytes_max)


def _name(entry: Mapping[str, Any], place: str) -> str:
    name = entry.get("name")
    if not isinstance(name, str) or not TENANT.fullmatch(name):
        raise WrongSetting(f"{place}: name: 1-64 of a-z 0-9 . _ - that begin with a letter or digit")
    return name


def _quota(entry: Mapping[str, Any], place: str) -> int:
    said = entry.get("file_bytes_max", 0)
    if not is_int(said, 0, DICTIONARY_BYTES_MAX):
        raise WrongSetting(f"{place}: file_bytes_max: bytes, 0 to {DICTIONARY_BYTES_MAX}, got {said!r}")
    return int(said)

"""The tenants file: names, shares, quotas and tokens, read once at the start. Tokens stay in files of their own, or come as digests.

tenants:
  - name: decode
    token_file: /run/secrets/decode     # or token_sha256: 64 hexadecimal digits
    share: 3                            # against the other tenants' when the load is too much; 1
    priority: 1                         # of those over their share the lowest is refused first; 0
    rows_per_second_max: 2000000        # 0: no quota
    bytes_per_second_max: 0
    admin: false                        # true: may load, remove, promote, verify and reserve, as keys of the pool itself may
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from treadle.chassis.server import read_key_file
from treadle.chassis.settings import WrongSetting
from treadle.contract import InvalidArgument
from treadle.dataplane import NOBODY, TenantLimits, Tenants

FILE_BYTES_MAX = 1 << 20
_FIELDS = {"name", "token_file", "token_sha256", "share", "priority", "rows_per_second_max", "bytes_per_second_max", "admin"}


def read_tenants(path: Path | None, keys: Collection[str]) -> Tenants:
    """The tenants in a file; none without one. keys: of the pool itself, whose callers belong to no tenant.

    Raises WrongSetting, naming the tenant, for what cannot be read or makes no sense.
    """
    tokens = {hashlib.sha256(key.encode()).digest(): NOBODY for key in keys}
    if path is None:
        return Tenants((), tokens)
    limits = []
    for index, entry in enumerate(_entries(path), NOBODY + 1):
        place = f"tenants_file: {path}: tenant {entry.get('name', index)!r}"
        try:
            limits.append(
                TenantLimits(
                    str(entry.get("name", "")), float(entry.get("share", 1.0)), int(entry.get("priority", 0)),
                    int(entry.get("rows_per_second_max", 0)), int(entry.get("bytes_per_second_max", 0)), _admin(entry, place),
                )
            )  # fmt: skip
        except (InvalidArgument, TypeError, ValueError) as error:
            raise WrongSetting(f"{place}: {error}") from error
        for digest in _digests(entry, place):
            if digest in tokens:
                raise WrongSetting(f"{place}: its token is another's already")
            tokens[digest] = index
    try:
        return Tenants(limits, tokens)
    except InvalidArgument as error:
        raise WrongSetting(f"tenants_file: {path}: {error}") from error


def _entries(path: Path) -> list[Mapping[str, Any]]:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise WrongSetting(f"tenants_file: {path} is above {FILE_BYTES_MAX} bytes")
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongSetting(f"tenants_file: cannot read {path}: {' '.join(str(error).split())}") from error
    entries = loaded.get("tenants") if isinstance(loaded, dict) and set(loaded) == {"tenants"} else None
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise WrongSetting(f"tenants_file: {path}: one key `tenants`, a list of at least one tenant expected")
    unknown = sorted({str(name) for entry in entries for name in entry} - _FIELDS)
    if unknown:
        raise WrongSetting(f"tenants_file: {path}: unknown fields {unknown}; known are {sorted(_FIELDS)}")
    return entries


def _admin(entry: Mapping[str, Any], place: str) -> bool:
    said = entry.get("admin", False)
    if not isinstance(said, bool):  # "false" in quotes is true to Python
        raise WrongSetting(f"{place}: admin: true or false, got {said!r}")
    return said


def _digests(entry: Mapping[str, Any], place: str) -> list[bytes]:
    if ("token_file" in entry) == ("token_sha256" in entry):
        raise WrongSetting(f"{place}: token_file or token_sha256, one of the two")
    if "token_file" in entry:
        keys = read_key_file(Path(str(entry["token_file"])), f"{place}: token_file")
        return [hashlib.sha256(key.encode()).digest() for key in keys]
    try:
        digest = bytes.fromhex(str(entry["token_sha256"]))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise WrongSetting(f"{place}: token_sha256: 64 hexadecimal digits, in quotes, expected")
    return [digest]

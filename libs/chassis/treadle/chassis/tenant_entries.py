"""The form that the tenants files of all services have: one key `tenants`, a list; what an entry says beside its tokens is each service's.

Tokens stay in files of their own, or come as digests.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import yaml

from treadle.chassis.keys import HASHED, key_digest
from treadle.chassis.server import read_key_file
from treadle.chassis.settings import WrongSetting

FILE_BYTES_MAX = 1 << 20
TENANTS_MAX = 4096


def read_entries(path: Path, fields: Set[str]) -> list[Mapping[str, Any]]:
    """The tenants of a file, which have these fields at most. Raises WrongSetting."""
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise WrongSetting(f"tenants_file: {path} is above {FILE_BYTES_MAX} bytes")
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise WrongSetting(f"tenants_file: cannot read {path}: {' '.join(str(error).split())}") from error
    entries = loaded.get("tenants") if isinstance(loaded, dict) and set(loaded) == {"tenants"} else None
    if not isinstance(entries, list) or not 1 <= len(entries) <= TENANTS_MAX or not all(isinstance(one, dict) for one in entries):
        raise WrongSetting(f"tenants_file: {path}: one key `tenants`, a list of 1 to {TENANTS_MAX} tenants expected")
    unknown = sorted({str(name) for entry in entries for name in entry} - fields)
    if unknown:
        raise WrongSetting(f"tenants_file: {path}: unknown fields {unknown}; known are {sorted(fields)}")
    return entries


def is_admin(entry: Mapping[str, Any], place: str) -> bool:
    """The field `admin`, false where there is none. Raises WrongSetting, which begins with `place`."""
    said = entry.get("admin", False)
    if not isinstance(said, bool):  # "false" in quotes is true to Python
        raise WrongSetting(f"{place}: admin: true or false, got {said!r}")
    return said


def token_digests(entry: Mapping[str, Any], place: str) -> list[bytes]:
    """sha256 of each token, from `token_file` or `token_sha256`. Raises WrongSetting, which begins with `place` and shows no token."""
    if ("token_file" in entry) == ("token_sha256" in entry):
        raise WrongSetting(f"{place}: token_file or token_sha256, one of the two")
    if "token_sha256" in entry:
        field, texts = "token_sha256", [HASHED + str(entry["token_sha256"]).lower()]
    else:
        field, texts = "token_file", read_key_file(Path(str(entry["token_file"])), f"{place}: token_file")
    try:
        return [key_digest(text) for text in texts]
    except ValueError as error:
        raise WrongSetting(f"{place}: {field}: 64 hexadecimal digits, in quotes, expected for a digest") from error

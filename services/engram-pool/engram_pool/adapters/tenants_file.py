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

from collections.abc import Collection
from pathlib import Path

from treadle.chassis.keys import key_digest
from treadle.chassis.settings import WrongSetting
from treadle.chassis.tenant_entries import is_admin, read_entries, token_digests
from treadle.contract import InvalidArgument
from treadle.dataplane import NOBODY, TenantLimits, Tenants

_FIELDS = {"name", "token_file", "token_sha256", "share", "priority", "rows_per_second_max", "bytes_per_second_max", "admin"}


def read_tenants(path: Path | None, keys: Collection[str]) -> Tenants:
    """The tenants in a file; none without one. keys: of the pool itself, whose callers belong to no tenant.

    Raises WrongSetting, naming the tenant, for what cannot be read or makes no sense.
    """
    tokens = {key_digest(key): NOBODY for key in keys}
    if path is None:
        return Tenants((), tokens)
    limits = []
    for index, entry in enumerate(read_entries(path, _FIELDS), NOBODY + 1):
        place = f"tenants_file: {path}: tenant {entry.get('name', index)!r}"
        try:
            limits.append(
                TenantLimits(
                    str(entry.get("name", "")), float(entry.get("share", 1.0)), int(entry.get("priority", 0)),
                    int(entry.get("rows_per_second_max", 0)), int(entry.get("bytes_per_second_max", 0)), is_admin(entry, place),
                )
            )  # fmt: skip
        except (InvalidArgument, TypeError, ValueError) as error:
            raise WrongSetting(f"{place}: {error}") from error
        for digest in token_digests(entry, place):
            if digest in tokens:
                raise WrongSetting(f"{place}: its token is another's already")
            tokens[digest] = index
    try:
        return Tenants(limits, tokens)
    except InvalidArgument as error:
        raise WrongSetting(f"tenants_file: {path}: {error}") from error

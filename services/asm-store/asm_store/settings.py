"""Settings of the asm-store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from treadle.chassis.settings import ServerSettings, WrongSetting, split_address
from treadle.contract.lookup_settings import LISTS_PROBED

REDIS_URL_VARIABLE = "TREADLE_REDIS_URL"
ANY_HOST = ("0.0.0.0", "[::]", "::")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
DAY_SECONDS = 86_400


class VerifyOnStart(StrEnum):
    """How closely versions found on disk are looked at before they are served."""

    FULL = "full"
    HEADERS = "headers"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """Publishes and serves dictionaries of attention states."""

    KEY_FILES: ClassVar[tuple[str, ...]] = ("api_key_file", "tenants_file")

    listen: str = "127.0.0.1:7402"
    """Address to listen on, host:port; port 0 takes a free one."""
    metrics_listen: str = "127.0.0.1:7412"
    """Address of /metrics, host:port; port 0 takes a free one."""
    data_dir: Path | None = None
    """Folder of the versions, pointers and tombstones, ours alone: readers map what lies here. None: $TREADLE_HOME/asm, ~/.cache/treadle/asm."""
    file_bytes_max: int = 16 << 30
    """Most bytes of versions; beyond it the least recently used that nobody holds, pins or points to go."""
    versions_max: int = 1024
    """Most versions; beyond it as for bytes."""
    tenant: str = "default"
    """Whose quota a publish counts against where there is no tenants_file, or its caller is none of its tenants."""
    tenant_bytes_max: int = 0
    """Most bytes of a tenant for which tenants_file says none; 0: as many as file_bytes_max."""
    tenants_file: Path | None = None
    """YAML file of the tenants: names, tokens and quotas. With it every caller shows a token of it, or a key of api_key_file."""
    publishes_max: int = 4
    """Most Publish and Extend calls at once; more are refused with RESOURCE_EXHAUSTED."""
    publish_seconds_max: float = 3600.0
    """Longest time of a Publish or Extend, or of a copy from another replica."""
    publish_silence_seconds: float = 30.0
    """Longest time between two messages of a Publish."""
    lookups_max: int = 16
    """Most Lookup calls at once; more are refused with RESOURCE_EXHAUSTED."""
    lists_probed: int = LISTS_PROBED
    """Lists that a two-level lookup scans."""
    pin_seconds_max: float = 30.0 * DAY_SECONDS
    """Longest time for which a version is pinned."""
    watchers_max: int = 1024
    """Most Watch calls at once."""
    holds_max: int = 1024
    """Most Hold calls at once."""
    calls_max: int = 4096
    """Most calls in progress at once, watches and holds included; more are refused with RESOURCE_EXHAUSTED."""
    compute_threads: int = 3
    """Threads for files, checksums, lookups and extending."""
    verify_on_start: VerifyOnStart = VerifyOnStart.HEADERS
    """headers: manifests, sizes and tensor layouts of what is found at start; full: every digest before serving."""
    verify_bytes_per_second: int = 64 << 20
    """How fast the digests of what was found at start are compared in the background, at most; 0: not at all."""
    replica: str = ""
    """Name of this replica among those that share a Redis; empty: one that is made once and kept in data_dir."""
    advertise: str = ""
    """Address at which other replicas reach this one, host:port; none: `listen`."""
    redis_url: str = ""
    """Redis that replicas share, redis://...; none: TREADLE_REDIS_URL. With a password use the variable: flags can be read by all."""
    peer_key_file: Path | None = None
    """File whose first line is the key that is shown to other replicas; none: no key."""
    peer_tls_root_file: Path | None = None
    """PEM roots that vouch for other replicas; none: they are spoken to without TLS."""

    @property
    def folder(self) -> Path:
        """`data_dir`, or where it is by default."""
        if self.data_dir is not None:
            return self.data_dir
        home = os.environ.get("TREADLE_HOME")
        return (Path(home).expanduser() if home else Path.home() / ".cache" / "treadle") / "asm"

    @property
    def redis(self) -> str:
        """URL of the Redis; empty: this replica stands alone."""
        return self.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.file_bytes_max < 1 << 20 or not 0 <= self.tenant_bytes_max <= self.file_bytes_max:
            raise WrongSetting("file_bytes_max is at least 1 MiB, tenant_bytes_max 0 to file_bytes_max")
        for name, low, high in (
            ("versions_max", 1, 4096), ("publishes_max", 1, 256), ("lookups_max", 1, 4096), ("lists_probed", 1, 1 << 16),
            ("watchers_max", 1, 1 << 16), ("holds_max", 1, 1 << 16), ("compute_threads", 2, 256),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                raise WrongSetting(f"{name} is {low} to {high}, got {getattr(self, name)}")
        limits = {"publish_seconds_max": DAY_SECONDS, "publish_silence_seconds": 3600, "pin_seconds_max": 366 * DAY_SECONDS}
        for name, most in limits.items():
            if not 0 < getattr(self, name) <= most:
                raise WrongSetting(f"{name} is above 0 and at most {most}, got {getattr(self, name)}")
        if self.verify_bytes_per_second < 0:
            raise WrongSetting(f"verify_bytes_per_second is >= 0, got {self.verify_bytes_per_second}")
        for name, text in (("tenant", self.tenant), ("replica", self.replica or "r")):
            if not NAME.fullmatch(text):
                raise WrongSetting(f"{name}: 1-64 of a-z 0-9 . _ - that begin with a letter or digit, got {text!r}")
        if self.advertise:
            split_address(self.advertise)
        if self.redis and not self.advertise and split_address(self.listen)[0] in ANY_HOST:
            raise WrongSetting(f"advertise: others cannot reach {self.listen}; say at which host:port they reach this replica")

"""Settings of the engram-pool."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

from treadle.chassis.settings import ServerSettings, WrongSetting, split_address
from treadle.contract import InvalidArgument
from treadle.contract.placement import Spread

SOCKET_NAME = "socket"  # beside the segments: who may read those may connect
RING_NAME = "ring"
USER_ID_MAX = (1 << 32) - 2  # the last number says "no user"


class Storage(StrEnum):
    """Where segments lie."""

    SHM = "shm"
    DAX = "dax"


class Tier(StrEnum):
    """Where rows are read."""

    AUTO = "auto"
    MEMORY = "memory"
    DISK = "disk"


class MooncakeProtocol(StrEnum):
    """What Mooncake moves rows by."""

    TCP = "tcp"
    RDMA = "rdma"


class VerifyOnStart(StrEnum):
    """How closely versions found on disk are looked at before they are served."""

    FULL = "full"
    HEADERS = "headers"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """Keeps Engram tables in memory and gathers their rows."""

    KEY_FILES: ClassVar[tuple[str, ...]] = ("api_key_file", "tenants_file")

    listen: str = "127.0.0.1:7401"
    """Address to listen on, host:port; port 0 takes a free one."""
    metrics_listen: str = "127.0.0.1:7411"
    """Address of /metrics, host:port; port 0 takes a free one."""
    segment_dir: Path = Path(f"/dev/shm/treadle-{os.getuid()}")
    """Folder of the segments: ours alone, on tmpfs for speed. Readers map what lies here."""
    storage: Storage = Storage.SHM
    """shm: files below segment_dir; dax: regions of dax_device, with small files and locks below segment_dir."""
    dax_device: Path | None = None
    """A character device /dev/daxX.Y, or a file of fixed size (fsdax, famfs). The pool takes all of it."""
    dax_bytes: int = 0
    """Bytes of a device whose size sysfs does not tell; 0: sysfs tells it."""
    dax_sysfs_root: Path = Path("/sys")
    """Where kind, size and alignment of a device are looked up."""
    dax_host: str = ""
    """Name of this host in the device's directory; empty: its machine id."""
    dax_shared: bool = False
    """Other hosts read this device: what is removed stays on it until a take-over. Said by the host that loads."""
    dax_take_over: bool = False
    """Make this host the owner of what another one loaded, and reuse what was removed: no other host uses the device any more."""
    numa: str = ""
    """Memory nodes of the tables: local (that of the loading thread), interleave, node:N; empty: as the kernel likes. For storage shm."""
    table_bytes_max: int = 0
    """Most bytes of segments; 0: as much as the file system holds."""
    verify_on_start: VerifyOnStart = VerifyOnStart.HEADERS
    """headers: seals, sizes and manifests of what is found at start, the scrubber does the rest; full: every checksum before serving."""
    scrub_bytes_per_second: int = 64 << 20
    """How fast every checksum is compared in the background, at most; 0: never. A bad chunk takes its version out of service."""
    peers: str = ""
    """Pools that may hold the same versions, host:port, by commas: damaged chunks are repaired from them, and from `owners`, first."""
    peer_key_file: Path | None = None
    """File whose first line is the key that is shown to `peers` and `owners`, and to no other pool that a load names; none: no key."""
    peer_tls_root_file: Path | None = None
    """PEM roots that vouch for peers; none: they are spoken to without TLS."""
    warm_bytes_per_second: int = 0
    """How fast pages of tables are entered in the background after a start or load, at most; 0: as fast as it goes."""
    keep_segments: bool = True
    """Leave segments in memory when the pool stops, for its readers and its next start; false: delete what nobody reads."""
    checkpoint_dir: Path | None = None
    """Load checkpoints and grown folders from below this folder only; none: from wherever the pool may read."""
    versions_kept_max: int = 2
    """Most versions of a model kept beside the current one by loads that keep the previous; beyond it the oldest go."""
    gathers_max: int = 64
    """Most Gather and Lookup calls at once; more are refused with RESOURCE_EXHAUSTED."""
    hint_tokens_max: int = 1 << 18
    """Most tokens told by HintTokens that wait to be brought near, of all tenants together; 0: hints are not taken."""
    gather_seconds_max: float = 30.0
    """Longest time a Gather or Lookup may take, whatever deadline its caller names."""
    watchers_max: int = 64
    """Most WatchModels calls at once."""
    holds_max: int = 1024
    """Most HoldModel calls at once; more are refused with RESOURCE_EXHAUSTED."""
    calls_max: int = 2048
    """Most calls in progress at once, holds included; more are refused with RESOURCE_EXHAUSTED."""
    compute_threads: int = 3
    """Threads for gathers, loads and checksums. A load takes up to two, a verification one."""
    socket_listen: str = "auto"
    """Native socket door: addresses host:port or unix:PATH, comma-separated; auto: a Unix socket in segment_dir; off: none."""
    socket_connections_max: int = 64
    """Most connections at the native socket door, a thread each; more are turned away."""
    socket_reply_bytes_max: int = 1 << 30
    """Most bytes of replies in the works at the native socket door; requests beyond it are refused."""
    door_threads: int = 2
    """Threads that gather for requests at the native doors; a host agent's wait for owners, and it has eight times as many."""
    door_requests_max: int = 1024
    """Most requests at the native doors that wait for a thread; more are refused."""
    door_admission: bool = True
    """Refuse a request at the native doors at once when it would be late, or would make one late that was admitted.
    Not in host-agent mode: there the pools that hold the tables do so."""
    tenants_file: Path | None = None
    """YAML file of the tenants: names, tokens, shares and quotas. With it every caller shows a token of it, or a key of api_key_file."""
    ring_listen: str = "auto"
    """Shared-memory ring for processes of this host: unix:PATH; auto: a Unix socket in segment_dir; off: none."""
    ring_users: str = ""
    """Numeric ids of users that may use the ring beside our own and root, separated by commas; with keys, whoever shows one may."""
    ring_clients_max: int = 64
    """Most processes at the ring; more are refused."""
    ring_arena_bytes_max: int = 64 << 20
    """Most memory that one client of the ring shares with us; its pages are taken as they are touched."""
    tier: Tier = Tier.AUTO
    """memory: rows are gathered from mapped segments; disk: read by position, pages stay evictable; auto: as segment_dir lies."""
    disk_threads: int = 8
    """Threads that wait for the disk, in the tier disk."""
    hot_rows_bytes: int = 0
    """Most memory of hot rows before the disk, shared with the ring's clients, for each size of rows; 0: none."""
    upstream: str = ""
    """Host-agent mode: pools that hold the tables, host:port, separated by commas. This one holds none: it serves theirs by its ring.
    Settings of what it has not (tables, other doors) are refused."""
    reap_interval_seconds: float = 1.0
    """How often replaced and removed versions are looked at and deleted, once no reader holds them."""
    reap_grace_seconds: float = 30.0
    """After a start, how long replaced versions stay without readers: those who held them by HoldModel hold them again."""

    mooncake_listen: str = ""
    """Address of the mooncake door, host:port, the host one by which clients reach this machine; empty: no such door."""
    mooncake_protocol: MooncakeProtocol = MooncakeProtocol.TCP
    """tcp or rdma."""
    mooncake_slots: int = 16
    """Slots of 4 MiB into which rows are gathered for Mooncake to read; when all are lent, callers are told to try again."""
    mooncake_direct: bool = True
    """Register whole tables, so that a few rows are read without asking; over rdma that pins them: needs ulimit -l unlimited."""
    owner: str = "pool"
    """Name of this pool among the owners of a fabric, as in placements."""
    owners: str = ""
    """All owners of the fabric, this one too: name=host:port,... They ask each other; none: this pool stands alone, or Redis tells."""
    advertise: str = ""
    """Address at which others reach this pool, host:port; none: the one in `owners`, else `listen`."""
    redis_url: str = ""
    """Directory of the owners, redis://...; none: TREADLE_REDIS_URL. With a password use the variable: flags can be read by all."""
    owner_watchers_max: int = 1024
    """Most WatchOwners calls at once: every handle of a client that asks several owners has one."""
    leave_seconds_max: float = 5.0
    """Among other owners, how long a pool that stops answers on while clients move away."""

    @property
    def ring_path(self) -> str | None:
        """Path of the ring's socket; None: there is no ring."""
        if self.ring_listen == "off":
            return None
        return str(self.segment_dir / RING_NAME) if self.ring_listen == "auto" else self.ring_listen.removeprefix("unix:")

    @property
    def upstream_list(self) -> tuple[str, ...]:
        """`upstream`, one by one."""
        return tuple(address.strip() for address in self.upstream.split(",") if address.strip())

    @property
    def ring_user_ids(self) -> tuple[int, ...]:
        """`ring_users`, one by one."""
        return tuple(int(user) for user in self.ring_users.split(",") if user.strip())

    @property
    def socket_addresses(self) -> tuple[str, ...]:
        """Where the native socket door listens."""
        asked = tuple(address.strip() for address in self.socket_listen.split(",") if address.strip())
        if asked in ((), ("off",)):
            return ()
        return (f"unix:{self.segment_dir / SOCKET_NAME}",) if asked == ("auto",) else asked

    @property
    def owner_endpoints(self) -> dict[str, str]:
        """`owners` as name -> host:port."""
        entries = [entry.strip() for entry in self.owners.split(",") if entry.strip()]
        pairs = [entry.partition("=") for entry in entries]
        endpoints = {name.strip(): endpoint.strip() for name, _, endpoint in pairs}
        if len(endpoints) != len(entries) or not all(":" in endpoint for endpoint in endpoints.values()):
            raise WrongSetting(f"owners: name=host:port,... with different names, got {self.owners!r}")
        return endpoints

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if not 1 <= self.mooncake_slots <= 1024:
            raise WrongSetting(f"mooncake_slots is 1 to 1024, got {self.mooncake_slots}")
        if self.mooncake_listen:
            self._check_mooncake_listen()
        if self.table_bytes_max < 0:
            raise WrongSetting(f"table_bytes_max is >= 0, got {self.table_bytes_max}")
        if not 0 <= self.versions_kept_max <= 64:
            raise WrongSetting(f"versions_kept_max is 0 to 64, got {self.versions_kept_max}")
        if self.gathers_max < 1 or self.watchers_max < 1 or self.holds_max < 1 or self.compute_threads < 2:
            raise WrongSetting("gathers_max, watchers_max and holds_max are >= 1, compute_threads is >= 2")
        if not 0 <= self.hint_tokens_max <= 1 << 24:
            raise WrongSetting(f"hint_tokens_max is 0 to {1 << 24}, got {self.hint_tokens_max}")
        if self.warm_bytes_per_second < 0 or self.scrub_bytes_per_second < 0:
            raise WrongSetting("warm_bytes_per_second and scrub_bytes_per_second are >= 0")
        if (self.storage is Storage.DAX) != (self.dax_device is not None):
            raise WrongSetting("storage dax and dax_device go together: give both or none")
        if self.numa and self.storage is Storage.DAX:
            raise WrongSetting("numa is for storage shm: a device's memory lies on the device's own node")
        if self.dax_bytes < 0:
            raise WrongSetting(f"dax_bytes is >= 0, got {self.dax_bytes}")
        for peer in self.peer_list:
            if ":" not in peer:
                raise WrongSetting(f"peers: host:port, separated by commas; got {peer!r}")
        if not 1 <= self.socket_connections_max <= 4096 or self.socket_reply_bytes_max < 1 << 20:
            raise WrongSetting("socket_connections_max is 1 to 4096, socket_reply_bytes_max at least 1 MiB")
        for address in self.socket_addresses:
            if not address.startswith("unix:"):
                self.check_callers("socket_listen", address, by_certificate=False)  # it knows no TLS
        if not 1 <= self.door_threads <= 64 or not 1 <= self.door_requests_max <= 1 << 16:
            raise WrongSetting("door_threads is 1 to 64, door_requests_max 1 to 65536")
        self._check_ring_and_tier()
        if not 0 <= self.reap_grace_seconds <= 3600:
            raise WrongSetting(f"reap_grace_seconds is 0 to 3600, got {self.reap_grace_seconds}")
        if not 0 < self.gather_seconds_max <= 3600 or not 0.01 <= self.reap_interval_seconds <= 3600:
            raise WrongSetting("gather_seconds_max is above 0, reap_interval_seconds at least 0.01, both at most 3600")
        if self.owner_watchers_max < 1 or not 0 <= self.leave_seconds_max <= 3600:
            raise WrongSetting("owner_watchers_max is >= 1, leave_seconds_max 0 to 3600")
        self._check_owners()

    def _check_ring_and_tier(self) -> None:
        if self.ring_listen not in ("auto", "off") and not self.ring_listen.startswith("unix:/"):
            raise WrongSetting(f"ring_listen: auto, off or unix:/PATH, got {self.ring_listen!r}")
        users = [user.strip() for user in self.ring_users.split(",") if user.strip()]
        if not all(user.isdecimal() and int(user) <= USER_ID_MAX for user in users):
            raise WrongSetting(f"ring_users: numeric ids up to {USER_ID_MAX}, separated by commas, got {self.ring_users!r}")
        if not all(":" in address for address in self.upstream_list):
            raise WrongSetting(f"upstream: host:port, separated by commas; got {self.upstream!r}")
        if (
            not 1 <= self.ring_clients_max <= 4096
            or not 1 << 16 <= self.ring_arena_bytes_max <= 1 << 34
            or self.ring_arena_bytes_max % 4096
        ):
            raise WrongSetting("ring_clients_max is 1 to 4096, ring_arena_bytes_max a multiple of 4096 from 64 KiB to 16 GiB")
        if not 1 <= self.disk_threads <= 256 or not (self.hot_rows_bytes == 0 or 1 << 16 <= self.hot_rows_bytes <= 1 << 44):
            raise WrongSetting("disk_threads is 1 to 256, hot_rows_bytes 0 or at least 64 KiB")

    @property
    def peer_list(self) -> tuple[str, ...]:
        """`peers`, then the other owners, one by one."""
        others = [endpoint for name, endpoint in self.owner_endpoints.items() if name != self.owner]
        return tuple(dict.fromkeys([*(peer.strip() for peer in self.peers.split(",") if peer.strip()), *others]))

    def _check_owners(self) -> None:
        endpoints = self.owner_endpoints
        try:
            Spread(tuple({*endpoints, self.owner}), 1)
        except InvalidArgument as error:
            raise WrongSetting(f"owner, owners: {error}") from error
        if endpoints and self.owner not in endpoints:
            raise WrongSetting(f"owner: {self.owner!r} is none of `owners`, {sorted(endpoints)}; say which of them this pool is")
        if endpoints and self.redis_url:
            raise WrongSetting("owners and redis_url: the directory is a list or in Redis; give one of them")
        if self.advertise:
            split_address(self.advertise)

    def _check_mooncake_listen(self) -> None:
        host, _ = split_address(self.mooncake_listen)
        if host in ("0.0.0.0", "[::]", "::"):
            raise WrongSetting(f"mooncake_listen: {host} is no address that clients can be told; name one of this machine")
        self.check_callers("mooncake_listen", self.mooncake_listen, by_certificate=False)

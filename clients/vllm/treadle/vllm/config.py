"""What a deployment says once, in `additional_config["treadle"]`, and a request each time, in `extra_args["treadle"]`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from treadle.client.endpoint import Endpoint
from treadle.contract.errors import AccessDenied, InvalidArgument
from treadle.contract.fusion_mode import FusionMode
from treadle.contract.lookup_settings import GUARD_PERCENT, LISTS_PROBED, LookupIndex, LookupSettings
from treadle.contract.policy import Late, TransportChoice, WaitPolicy
from treadle.contract.version import check_name

KEY = "treadle"  # of our part in vLLM's dictionaries
NO_MEMORY = "none"  # what a request chooses that wants none
NAME_CHARACTERS_MAX = 256
MEMORIES_MAX = 1024
OPEN_SECONDS_MAX = 120.0  # vLLM takes a step of 300 s for a dead worker
_REQUEST_KEYS = ("engram", "wait_seconds_max", "late", "each_output", "prefix", "prefix_exact", "begins_anew")
_VERSION = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Choice:
    """A memory by name; `version`: the whole version, or empty: the one that is current."""

    name: str
    version: str = ""

    @classmethod
    def parse(cls, text: str, field_name: str) -> Choice | None:
        """NAME, NAME@VERSION, or `none` and nothing, which are None. Raises InvalidArgument naming the field."""
        if not isinstance(text, str) or len(text) > NAME_CHARACTERS_MAX:
            raise InvalidArgument(f"{field_name}: NAME, NAME@VERSION or none expected, got {_shown(text)}")
        if text in ("", NO_MEMORY):
            return None
        name, at, version = text.partition("@")
        if not name or (at and not _VERSION.fullmatch(version)):
            raise InvalidArgument(f"{field_name}: NAME or NAME@VERSION, the version 64 hex digits, expected; got {_shown(text)}")
        try:
            check_name(name)  # no pool holds another; and what follows, salts to begin with, may count on it
        except InvalidArgument as error:
            raise InvalidArgument(f"{field_name}: {error}") from error
        return cls(name, version)

    def __str__(self) -> str:
        return f"{self.name}@{self.version}" if self.version else self.name


@dataclass(frozen=True, slots=True)
class MemoryConfig:
    """Where the memories are and how rows are waited for: JSON values, so that vLLM can hand them to its processes.

    engram_pool:       host:port or unix:path; empty: there is none, and requests that choose a memory are refused
    key_file:          the pool's key: its first line that is neither empty nor a comment
    tls_root_file, tls_cert_file, tls_key_file: as in Endpoint; empty: none
    transport:         a word of TransportChoice
    default_memory:    NAME or NAME@VERSION of requests that do not choose; empty: none
    fusion:            auto, on or shadow: see FusionMode
    fusion_weights:    name of a memory -> file of weights instead of those that the pool keeps
    wait_seconds_max:  longest wait at one layer; a request that allows more gets this
    late:              mask or fail, for requests that do not say
    memories_max:      versions open at once, and at most as many that are still being opened
    open_seconds_max:  how long a step waits in all for versions that are still being opened
    asm_store:         host:port or unix:path of the store of long prefixes; empty: they are opened from folders alone
    asm_key_file, asm_tls_root_file: as key_file and tls_root_file, of the store
    prefixes_max:      long prefixes held open at once
    prefix_outside_share_max: a prompt with more of its lookups outside the calibration is off its dictionary's task; 1: none is
    prefix_lists_probed: lists that a lookup scans in a dictionary of two levels
    prefix_guard_percent: a lookup is outside that is less like its entry than all but so many per cent of the layer's calibration were
    prefix_index:      scan, or hnsw: a graph of the keys, linked when a prefix is opened: no step runs meanwhile
    """

    engram_pool: str = ""
    key_file: str = ""
    tls_root_file: str = ""
    tls_cert_file: str = ""
    tls_key_file: str = ""
    transport: str = "auto"
    default_memory: str = ""
    fusion: str = "auto"
    fusion_weights: Mapping[str, str] = field(default_factory=dict)
    wait_seconds_max: float = 1.0
    late: str = "mask"
    memories_max: int = 8
    open_seconds_max: float = 30.0
    asm_store: str = ""
    asm_key_file: str = ""
    asm_tls_root_file: str = ""
    prefixes_max: int = 16
    prefix_outside_share_max: float = 0.9
    prefix_lists_probed: int = LISTS_PROBED
    prefix_guard_percent: int = GUARD_PERCENT
    prefix_index: str = LookupIndex.SCAN.value

    def __post_init__(self) -> None:
        _one_of("transport", self.transport, [choice.value for choice in TransportChoice])
        _one_of("fusion", self.fusion, [mode.value for mode in FusionMode])
        _one_of("late", self.late, [late.value for late in Late])
        WaitPolicy(_number("wait_seconds_max", self.wait_seconds_max))  # checks it
        if not isinstance(self.memories_max, int) or not 1 <= self.memories_max <= MEMORIES_MAX:
            raise InvalidArgument(f"{KEY}.memories_max: 1 to {MEMORIES_MAX}, got {self.memories_max!r}")
        if not 0 < _number("open_seconds_max", self.open_seconds_max) <= OPEN_SECONDS_MAX:
            raise InvalidArgument(f"{KEY}.open_seconds_max: above 0, at most {OPEN_SECONDS_MAX}, got {self.open_seconds_max}")
        if not isinstance(self.prefixes_max, int) or not 1 <= self.prefixes_max <= MEMORIES_MAX:
            raise InvalidArgument(f"{KEY}.prefixes_max: 1 to {MEMORIES_MAX}, got {self.prefixes_max!r}")
        if not 0 <= _number("prefix_outside_share_max", self.prefix_outside_share_max) <= 1:
            raise InvalidArgument(f"{KEY}.prefix_outside_share_max: 0 to 1, got {self.prefix_outside_share_max}")
        _ = self.lookup  # checks it
        if self.default is not None and not self.engram_pool:
            raise InvalidArgument(f"{KEY}.default_memory: {self.default_memory!r} without engram_pool, which says where it is")

    @classmethod
    def of(cls, additional_config: object) -> MemoryConfig:
        """Read vLLM's `additional_config`; nothing about treadle in it: no pool. Raises InvalidArgument naming the key."""
        ours = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(ours, Mapping):
            raise InvalidArgument(f"additional_config.{KEY}: an object expected, got {_shown(ours)}")
        known = {one.name: one.default for one in fields(cls)}
        for name, value in ours.items():
            if name not in known:
                raise InvalidArgument(f"{KEY}.{name}: no such setting; there are {', '.join(known)}")
            if isinstance(known[name], str) and not isinstance(value, str):
                raise InvalidArgument(f"{KEY}.{name}: a string expected, got {_shown(value)}")
        weights = ours.get("fusion_weights", {})
        if not isinstance(weights, Mapping) or not all(isinstance(file, str) for file in weights.values()):
            raise InvalidArgument(f"{KEY}.fusion_weights: an object of files by name expected, got {_shown(weights)}")
        return cls(**ours)

    def to_dict(self) -> dict[str, Any]:
        """What stands in `additional_config["treadle"]`; `of` reads it back."""
        return asdict(self) | {"fusion_weights": dict(self.fusion_weights)}

    @property
    def default(self) -> Choice | None:
        """The memory of requests that do not choose."""
        return Choice.parse(self.default_memory, f"{KEY}.default_memory")

    @property
    def lookup(self) -> LookupSettings:
        """How long prefixes are looked up."""
        try:
            return LookupSettings(self.prefix_lists_probed, self.prefix_guard_percent, self.prefix_index)
        except InvalidArgument as error:
            raise InvalidArgument(f"{KEY}.prefix_{error}") from error

    @property
    def mode(self) -> FusionMode:
        """Whether rows are added."""
        return FusionMode(self.fusion)

    @property
    def endpoint(self) -> Endpoint:
        """Of the pool. Raises AccessDenied for a key file that cannot be read, InvalidArgument for an address that is none."""
        return self._endpoint(self.engram_pool, self.key_file, self.tls_root_file)

    @property
    def asm_endpoint(self) -> Endpoint:
        """Of the store of long prefixes. Raises as `endpoint` does."""
        return self._endpoint(self.asm_store, self.asm_key_file, self.asm_tls_root_file)

    def _endpoint(self, address: str, key_file: str, tls_root_file: str) -> Endpoint:
        key = read_key(Path(key_file)) if key_file else None
        root, cert, tls_key = (Path(file) if file else None for file in (tls_root_file, self.tls_cert_file, self.tls_key_file))
        return Endpoint(address, key, root, tls_cert_file=cert, tls_key_file=tls_key)


@dataclass(frozen=True, slots=True)
class RequestChoice:
    """What one request asks for.

    each_output:   its outcome with every output, for who may leave before the last one
    prefix:        the long prefix that it stands behind, with its version
    prefix_exact:  behind the exact KV, not the dictionary
    begins_anew:   where the guard finds the prompt off the dictionary's task and the exact KV is kept, end it: it will be asked again
    """

    memory: Choice | None
    policy: WaitPolicy
    each_output: bool = False
    prefix: Choice | None = None
    prefix_exact: bool = False
    begins_anew: bool = False

    @classmethod
    def of(cls, extra_args: Mapping[str, Any] | None, config: MemoryConfig) -> RequestChoice:
        """Read a request's `extra_args`. Raises InvalidArgument naming the field."""
        ours = _ours(extra_args)
        unknown = [name for name in ours if name not in _REQUEST_KEYS]
        if unknown:
            raise InvalidArgument(f"extra_args.{KEY}: {', '.join(_REQUEST_KEYS)} are known, not {unknown}")
        chosen = config.default if "engram" not in ours else Choice.parse(ours["engram"], f"extra_args.{KEY}.engram")
        if chosen is not None and not config.engram_pool:
            raise InvalidArgument(f"extra_args.{KEY}.engram: this engine has no pool; give additional_config.{KEY}.engram_pool")
        late = ours.get("late", config.late)
        _one_of("late", late, [one.value for one in Late])
        seconds = _number("wait_seconds_max", ours.get("wait_seconds_max", config.wait_seconds_max))
        prefix = Choice.parse(ours.get("prefix", ""), f"extra_args.{KEY}.prefix")
        if prefix is not None and not prefix.version:
            raise InvalidArgument(f"extra_args.{KEY}.prefix: NAME@VERSION expected, as open_treadle_prefix gave it; got {prefix}")
        exact, anew = (_flag(ours, name) for name in ("prefix_exact", "begins_anew"))
        return cls(chosen, WaitPolicy(seconds, Late(late)), ours.get("each_output", False) is True, prefix, exact, anew)


def pinned(extra_args: Mapping[str, Any] | None, choice: Choice) -> dict[str, Any]:
    """A request's `extra_args` with this memory chosen. Raises InvalidArgument as RequestChoice.of does."""
    return dict(extra_args or {}) | {KEY: dict(_ours(extra_args)) | {"engram": str(choice)}}


def read_key(path: Path) -> str:
    """The key in a file: its first line that is neither empty nor a comment. Raises AccessDenied if there is none."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise AccessDenied(f"{KEY}.key_file: cannot read {path}: {error}") from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise AccessDenied(f"{KEY}.key_file: {path} holds no key")
    return keys[0]


def _ours(extra_args: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Our part of a request's arguments: an object, or its JSON text, which is all that vLLM's HTTP server lets through."""
    ours = (extra_args or {}).get(KEY, {})
    if isinstance(ours, str):
        try:
            ours = json.loads(ours)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"extra_args.{KEY}: JSON expected, got {_shown(ours)}") from error
    if not isinstance(ours, Mapping):
        raise InvalidArgument(f"extra_args.{KEY}: an object expected, got {_shown(ours)}")
    return ours


def _one_of(name: str, value: object, words: list[str]) -> None:
    if value not in words:
        raise InvalidArgument(f"{KEY}.{name}: one of {', '.join(words)}, got {_shown(value)}")


def _flag(ours: Mapping[str, Any], name: str) -> bool:
    value = ours.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"extra_args.{KEY}.{name}: true or false, got {_shown(value)}")
    return value


def _number(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidArgument(f"{KEY}.{name}: a number expected, got {_shown(value)}")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidArgument(f"{KEY}.{name}: a number of some hundred digits is too large") from error


def _shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except (RecursionError, ValueError):  # nested or long beyond what can be shown
        return f"a {type(value).__name__} that is too large to be shown"

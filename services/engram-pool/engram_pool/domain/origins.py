"""Where a version's rows came from, remembered beside it: the place to read a damaged chunk again.

Owns the text. Nothing in it is believed: what is read from there is compared with the version's digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from treadle.contract import InvalidArgument

ORIGIN_BYTES_MAX = 256 << 10  # names of the tensors of 64 layers


@dataclass(frozen=True, slots=True)
class CheckpointOrder:
    """A safetensors file or folder on this host, and names by role where they do not match by suffix.

    name, row_dtype: where the manifest is derived: the name to load it under, and what U8 rows hold; empty: as the folder says
    """

    path: Path
    tensors: Mapping[str, str]
    name: str = ""
    row_dtype: str = ""


@dataclass(frozen=True, slots=True)
class RandomOrder:
    """Rows made up from a seed."""

    seed: int


@dataclass(frozen=True, slots=True)
class GrownOrder:
    """A grown folder on this host, and the name to load it under; empty: its manifest's own."""

    path: Path
    name: str


@dataclass(frozen=True, slots=True)
class PeerOrder:
    """Pools that hold a version, whole or in parts; asked in this order. Empty `version`: the first one's current."""

    endpoints: tuple[str, ...]
    model: str
    version: str


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A version in a Mooncake Store, whose master is at host:port; an empty `version` is the one pushed last."""

    master: str
    protocol: str
    model: str
    version: str


Source = CheckpointOrder | RandomOrder | GrownOrder | PeerOrder | StoreOrder


def origin_text(source: Source) -> bytes:
    """As it is kept, JSON. Raises InvalidArgument beyond ORIGIN_BYTES_MAX."""
    match source:
        case CheckpointOrder(path, tensors):  # the version's own manifest says the rest
            origin: dict[str, object] = {"kind": "checkpoint", "path": str(path), "tensors": dict(tensors)}
        case RandomOrder(seed):
            origin = {"kind": "random", "seed": seed}
        case GrownOrder(path, name):
            origin = {"kind": "grown", "path": str(path), "name": name}
        case PeerOrder(endpoints, model, version):
            origin = {"kind": "peers", "endpoints": list(endpoints), "model": model, "version": version}
        case StoreOrder(master, protocol, model, version):
            origin = {"kind": "store", "master": master, "protocol": protocol, "model": model, "version": version}
    text = json.dumps(origin).encode()
    if len(text) > ORIGIN_BYTES_MAX:
        raise InvalidArgument(f"source: its names take {len(text)} bytes, the limit is {ORIGIN_BYTES_MAX}")
    return text


def read_origin(text: bytes) -> Source | None:
    """Back from the text; None if it is not what was written: a version without an origin is repaired from peers only."""
    try:
        origin = json.loads(text)
        match origin["kind"]:
            case "checkpoint":
                tensors = {str(role): str(name) for role, name in origin["tensors"].items()}
                return CheckpointOrder(Path(origin["path"]), tensors)
            case "random":
                return RandomOrder(int(origin["seed"]))
            case "grown":
                return GrownOrder(Path(origin["path"]), str(origin["name"]))
            case "peers":
                return PeerOrder(tuple(map(str, origin["endpoints"])), str(origin["model"]), str(origin["version"]))
            case "store":
                return StoreOrder(*(str(origin[name]) for name in ("master", "protocol", "model", "version")))
            case _:
                return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None

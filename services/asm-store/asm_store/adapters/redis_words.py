"""What replicas write into Redis, and its keys. What is damaged is left out and logged: Redis is never the only copy.

`treadle:asm:replica:NAME`   lease of a replica (treadle.chassis.leases): address, and how often the list of what it keeps has changed
`treadle:asm:kept:NAME`      hash: name/version/when it was published -> record and manifest of what that replica keeps; stays while it is away
`treadle:asm:members`        hash: replica -> when it was last here, seconds since the epoch
`treadle:asm:pointers`       hash: name -> pointer
`treadle:asm:pins`           hash: name/version -> pin
`treadle:asm:deleted`        hash: name/version -> when, seconds since the epoch
`treadle:asm:claim:NAME`     tenant that publishes the first version of a name; goes by itself
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asm_store.domain.ports import Remote
from asm_store.domain.versions import Key, Record, is_seconds
from treadle.contract.checks import expect, is_int, object_fields
from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import InvalidArgument
from treadle.contract.version import check_name, check_version

log = logging.getLogger("asm_store")
KIND = "asm:replica"
KEPT, MEMBERS, POINTERS = "treadle:asm:kept:", "treadle:asm:members", "treadle:asm:pointers"
PINS, DELETED, CLAIM = "treadle:asm:pins", "treadle:asm:deleted", "treadle:asm:claim:"
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Lease:
    """What a replica says of itself. run: another one after each start; kept: how often the list of what it keeps has changed since."""

    address: str
    run: str
    kept: int

    def to_json(self) -> bytes:
        """As text."""
        return json.dumps({"address": self.address, "run": self.run, "kept": self.kept}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Lease:
        """Read it back. Raises InvalidArgument."""
        try:
            fields = object_fields("lease", json.loads(text), {"address", "run", "kept"}, set())
        except ValueError as error:
            raise InvalidArgument(f"lease: damaged: {error}") from error
        expect(isinstance(fields["address"], str) and ":" in fields["address"], f"lease: address: got {fields['address']!r}")
        expect(isinstance(fields["run"], str) and is_int(fields["kept"], 0, 1 << 53), "lease: damaged")
        return cls(**fields)


def key_text(key: Key) -> str:
    """A version as the field of a hash."""
    return f"{key[0]}/{key[1]}"


def read_key(text: str) -> Key:
    """Read it back. Raises InvalidArgument."""
    name, _, version = text.partition("/")
    return check_name(name), check_version(version)


def kept_field(remote: Remote) -> bytes:
    """A version as the field of what a replica keeps. Published again it has another: what stands in a field stays the same."""
    return f"{key_text(remote.record.key)}/{remote.record.published_at_seconds!r}".encode()


def remote_bytes(remote: Remote) -> bytes:
    """What a replica tells of a version."""
    return remote.record.to_json() + b"\n" + remote.manifest_json


def read_remote(text: bytes) -> Remote:
    """Read it back, its version compared with its manifest. Raises InvalidArgument."""
    record_json, _, manifest_json = text.partition(b"\n")
    record, dictionary = Record.from_json(record_json), Dictionary.from_json(manifest_json)
    expect(record.key == (dictionary.name, dictionary.version), f"record: {record.key} with the manifest of {dictionary.name}")
    return Remote(record, manifest_json)


def read_seconds(text: bytes) -> float:
    """A time since the epoch. Raises InvalidArgument."""
    try:
        seconds = float(text)
    except ValueError as error:
        raise InvalidArgument(f"a time: {error}") from error
    expect(is_seconds(seconds), f"a time: got {seconds!r}")
    return seconds


def read_hash(what: str, found: Mapping[Any, bytes | str], read: Callable[[bytes], Value]) -> dict[str, Value]:
    """The values of a hash that can be read, by field."""
    values = {}
    for field, value in found.items():
        name = field.decode("utf-8", "replace") if isinstance(field, bytes) else field
        try:
            values[name] = read(value if isinstance(value, bytes) else value.encode())
        except InvalidArgument as error:
            log.error("an entry in Redis is none: left out", extra={"what": what, "field": name[:200], "reason": str(error)})
    return values


def read_keys(values: Mapping[str, Value]) -> dict[Key, Value]:
    """A hash by version; what names none is left out."""
    found = {}
    for text, value in values.items():
        try:
            found[read_key(text)] = value
        except InvalidArgument as error:
            log.error("an entry in Redis is none: left out", extra={"field": text[:200], "reason": str(error)})
    return found

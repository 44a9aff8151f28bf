"""What an inference worker tells of itself in a directory, so that gateways find it; JSON of a few fields."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from treadle.contract.errors import InvalidArgument

KIND = "inference:worker"  # of the leases: `treadle:inference:worker:NAME`
ENTRY_BYTES_MAX = 4096
TEXT_MAX = 512  # characters of a field


@dataclass(frozen=True, slots=True)
class WorkerEntry:
    """One worker.

    name:     stable, and its own among all workers
    address:  where gateways reach it: host:port or unix:path
    model:    name under which it serves
    epoch:    nanoseconds of its process's start: of two entries with one name the higher is the newer process
    draining: it takes no new requests
    """

    name: str
    address: str
    model: str
    epoch: int
    draining: bool = False

    def __post_init__(self) -> None:
        texts = {"name": self.name, "address": self.address, "model": self.model}
        for field, text in texts.items():
            if not (isinstance(text, str) and 0 < len(text) <= TEXT_MAX and text.isprintable()):
                raise InvalidArgument(f"worker entry: {field}: 1 to {TEXT_MAX} printable characters, got {str(text)[:80]!r}")
        if ":" not in self.address:
            raise InvalidArgument(f"worker entry: address: host:port or unix:path, got {self.address[:80]!r}")
        if not (type(self.epoch) is int and 0 <= self.epoch < 1 << 63 and type(self.draining) is bool):
            raise InvalidArgument("worker entry: epoch is a number and draining true or false")


def entry_bytes(entry: WorkerEntry) -> bytes:
    """Write one."""
    return json.dumps(asdict(entry), separators=(",", ":")).encode()


def entry_from_bytes(data: bytes) -> WorkerEntry:
    """Read one; fields that it does not know are passed over. Raises InvalidArgument for what is no entry."""
    if len(data) > ENTRY_BYTES_MAX:
        raise InvalidArgument(f"worker entry: at most {ENTRY_BYTES_MAX} bytes, got {len(data)}")
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("worker entry: it is not JSON") from error
    if not isinstance(fields, dict):
        raise InvalidArgument("worker entry: it is not an object")
    try:
        return WorkerEntry(fields["name"], fields["address"], fields["model"], fields["epoch"], fields.get("draining", False))
    except KeyError as error:
        raise InvalidArgument(f"worker entry: {error.args[0]} is missing") from error

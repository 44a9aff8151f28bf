"""The other half of a Mooncake lookup: asking an owner to gather rows into a slot, and saying when they are read.

Owns one connection to a pool's mooncake door, which holds one version while it is open. Does not move rows (`mooncake_landing`).
`StagingControl` is what another carrier of these messages has to offer.
"""

from __future__ import annotations

import hashlib
import select
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle.client.engram import mooncake_wire as wire
from treadle.client.engram.mooncake_wire import Frame, Kind, Staged
from treadle.client.engram.pool_types import windows_message
from treadle.contract import DataLoss, Deadline, FingerprintMismatch, ProtocolMismatch, Unavailable, Windows
from treadle.engram.v1 import engram_pool_pb2 as pb

CONNECT_SECONDS_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Registered:
    """A table that may be read directly: `rows` of `row_bytes` from `address` on."""

    address: int
    rows: int
    row_bytes: int


@dataclass(frozen=True, slots=True)
class Owner:
    """What an owner said when a version was opened.

    engine:           name of its Mooncake engine, host:port; another one after each start
    slot_bytes:       the most that one request can gather
    lease_seconds:    how long rows stay in a slot, at most
    tables:           by layer; empty where tables are not registered
    identity_address: where `identity` stands in its memory as long as `tables` are true
    """

    engine: str
    protocol: str
    slot_bytes: int
    lease_seconds: float
    tables: Mapping[int, Registered]
    identity_address: int
    identity: bytes


class StagingControl(Protocol):
    """One open version of one owner. Not thread-safe: a request and its answer at a time."""

    owner: Owner

    def gather(self, layer: int, ids: NDArray[np.int64], deadline: Deadline) -> Staged:
        """Have rows gathered by id. Raises RowOutOfRange, ResourceExhausted when all slots are lent, DeadlineExceeded, Unavailable."""

    def lookup(self, layers: Sequence[int], windows: Windows, deadline: Deadline) -> Staged:
        """Have the rows of all `layers` hashed and gathered, layer after layer. Errors as in `gather`."""

    def release(self, staged: Staged) -> None:
        """The rows are read: the owner may use the slot again."""

    def alive(self) -> bool:
        """False once the owner has closed it; then its tables are no longer held."""

    def host(self) -> str:
        """This end's address, by which the owner can reach us."""

    def close(self) -> None:
        """Let go of the version; the owner takes back its slots."""


class SocketControl:
    """A StagingControl over TCP."""

    def __init__(self, address: str, model: str, version: str, key: str | None, deadline: Deadline) -> None:
        """Connect and open. Raises AccessDenied, NotFound, FingerprintMismatch, ResourceExhausted, ProtocolMismatch, Unavailable."""
        host, _, port = address.rpartition(":")
        self._address, self._ref = address, pb.ModelRef(model=model, version=version)
        seconds = min(CONNECT_SECONDS_MAX, max(1e-3, deadline.remaining_seconds()))
        try:
            self._socket = socket.create_connection((host.strip("[]"), int(port)), seconds)
        except (OSError, ValueError) as error:
            raise Unavailable(f"{address} (mooncake) does not answer: {error}") from error
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.owner = self._open(model, version, key, deadline)
        except BaseException:
            self._socket.close()
            raise

    def gather(self, layer: int, ids: NDArray[np.int64], deadline: Deadline) -> Staged:
        """See StagingControl."""
        request = pb.GatherRequest(ref=self._ref, layer=layer, rows=ids.astype("<i8", copy=False).tobytes())
        return self._stage(Kind.GATHER, request.SerializeToString(), deadline)

    def lookup(self, layers: Sequence[int], windows: Windows, deadline: Deadline) -> Staged:
        """See StagingControl."""
        request = pb.LookupRequest(ref=self._ref, layers=layers, windows=windows_message(windows))
        return self._stage(Kind.LOOKUP, request.SerializeToString(), deadline)

    def release(self, staged: Staged) -> None:
        """See StagingControl."""
        self._send(Frame(Kind.RELEASE, wire.release_body(staged.slot, staged.generation)))

    def alive(self) -> bool:
        """See StagingControl: between answers the owner says nothing, so anything to read is its end."""
        waiting = select.poll()  # not select(), which takes no descriptor above 1,023
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def host(self) -> str:
        """See StagingControl."""
        return str(self._socket.getsockname()[0])

    def close(self) -> None:
        """See StagingControl."""
        self._socket.close()

    def _open(self, model: str, version: str, key: str | None, deadline: Deadline) -> Owner:
        nonce = self._receive(Kind.CHALLENGE, deadline).body
        request = {"protocol": wire.PROTOCOL, "model": model, "version": version, "proof": _proof(key, nonce)}
        self._send(Frame(Kind.OPEN, wire.json_body(request), deadline.remaining_seconds()))
        said = wire.read_json(self._receive(Kind.OPENED, deadline).body)
        if said.get("version") != version:
            raise FingerprintMismatch("version", version, said.get("version"))
        try:
            tables = {int(layer): Registered(*map(int, table)) for layer, table in said["tables"].items()}
            return Owner(
                str(said["engine"]), str(said["protocol"]), int(said["slot_bytes"]), float(said["lease_seconds"]), tables,
                int(said["identity_address"]), wire.identity(bytes.fromhex(said["instance"]), version, int(said["generation"])),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ProtocolMismatch(f"{self._address} (mooncake) opened a version without saying {error!r}") from error

    def _stage(self, kind: Kind, body: bytes, deadline: Deadline) -> Staged:
        deadline.check(before="the rows were asked for")
        self._send(Frame(kind, body, deadline.remaining_seconds()))
        staged = wire.read_staged(self._receive(Kind.STAGED, deadline).body)
        if staged.version != self._ref.version:
            raise DataLoss(f"{self._address} (mooncake) answered rows of version {staged.version}, asked for {self._ref.version}")
        return staged

    def _send(self, frame: Frame) -> None:
        try:
            self._socket.settimeout(CONNECT_SECONDS_MAX)
            wire.send(self._socket, frame)
        except OSError as error:
            raise Unavailable(f"{self._address} (mooncake) does not answer: {error}") from error

    def _receive(self, kind: Kind, deadline: Deadline) -> Frame:
        frame = wire.receive(self._socket, deadline)
        if frame.kind is Kind.REFUSED:
            raise wire.read_refusal(frame.body)
        if frame.kind is not kind:
            raise ProtocolMismatch(f"{self._address} (mooncake) sent {frame.kind.name}, {kind.name} expected")
        return frame


def _proof(key: str | None, nonce: bytes) -> str:
    return wire.proof(hashlib.sha256(key.encode()).digest(), nonce) if key else ""

"""What a client of the mooncake door and the door say to each other before and after Mooncake moves the rows.

A connection opens one version and holds it. Frames: `TDLM`, kind, size of the body, seconds left (a request's; else 0). Bodies
are the messages of the gRPC door (`GatherRequest`, `LookupRequest`, with the version in each), JSON where time does not matter,
and fixed structures. Little-endian. Does not know who listens (the pool's door) or who asks (`mooncake_control`).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from treadle.client.errors import InternalError
from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, ProtocolMismatch, TreadleError, Unavailable
from treadle.contract import errors as contract_errors

PROTOCOL = 1
BODY_BYTES_MAX = 16 << 20  # a million tokens with their look-back
BODY_SECONDS_MAX = 10.0
ERROR_TEXT_MAX = 4096
NONCE_BYTES = 32
IDENTITY_BYTES = 64
_MAGIC = b"TDLM"
_HEADER = struct.Struct("<4sB3xId")
_STAGED = struct.Struct("<IQQQI32s")
_RELEASE = struct.Struct("<IQ")
_IDENTITY = struct.Struct("<8s16s32sQ")


class Kind(IntEnum):
    """What a frame is."""

    CHALLENGE = 1  # door: a nonce
    OPEN = 2  # client: which version, and the proof that it knows a key
    OPENED = 3  # door: where its engine is
    GATHER = 4  # client: GatherRequest
    LOOKUP = 5  # client: LookupRequest
    STAGED = 6  # door: where the rows lie, for a while
    RELEASE = 7  # client: they are read; no answer
    REFUSED = 8  # door: an error


@dataclass(frozen=True, slots=True)
class Frame:
    """One message. `seconds_left`: of a request's deadline."""

    kind: Kind
    body: bytes
    seconds_left: float = 0.0


@dataclass(frozen=True, slots=True)
class Staged:
    """Rows that wait in a slot of the owner: `length` bytes at `address` until the lease ends. `crc32c`: of these bytes."""

    slot: int
    generation: int
    address: int
    length: int
    crc32c: int
    version: str


def send(connection: socket.socket, frame: Frame) -> None:
    """Send one frame. Raises InvalidArgument for a body beyond BODY_BYTES_MAX, OSError as the socket does."""
    if len(frame.body) > BODY_BYTES_MAX:
        raise InvalidArgument(f"a request of {len(frame.body)} bytes, the limit is {BODY_BYTES_MAX}")
    connection.sendall(_HEADER.pack(_MAGIC, frame.kind, len(frame.body), frame.seconds_left) + frame.body)


def receive(connection: socket.socket, deadline: Deadline | None = None) -> Frame:
    """The next frame; its size is checked before anything is allocated.

    deadline: None: it may begin whenever it likes, and then has BODY_SECONDS_MAX to arrive
    Raises Unavailable when the other end has gone, DeadlineExceeded, ProtocolMismatch for what is no frame.
    """
    magic, kind, size, seconds_left = _HEADER.unpack(_exactly(connection, _HEADER.size, deadline))
    if magic != _MAGIC or kind not in set(Kind) or size > BODY_BYTES_MAX or not math.isfinite(seconds_left):
        raise ProtocolMismatch("what came is no frame of the mooncake door: is the address right?")
    return Frame(Kind(kind), _exactly(connection, size, deadline or Deadline.after(BODY_SECONDS_MAX)), seconds_left)


def _exactly(connection: socket.socket, size: int, deadline: Deadline | None) -> bytes:
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        connection.settimeout(None if deadline is None else max(1e-4, deadline.remaining_seconds()))
        try:
            count = connection.recv_into(view[done:])
        except TimeoutError as error:
            raise DeadlineExceeded(f"{done} of {size} bytes came in time") from error
        except OSError as error:
            raise Unavailable(f"the connection failed: {error}") from error
        if not count:
            raise Unavailable("the other end closed the connection")
        done += count
    return bytes(data)


# -- bodies -----------------------------------------------------------------------------------------------------------------


def proof(key_digest: bytes, nonce: bytes) -> str:
    """What shows that a client knows a key without sending it: HMAC-SHA256 by the key's sha256 over the door's nonce, hexadecimal."""
    return hmac.new(key_digest, nonce, hashlib.sha256).hexdigest()


def json_body(values: Mapping[str, Any]) -> bytes:
    """JSON as a body."""
    return json.dumps(values, separators=(",", ":")).encode()


def read_json(body: bytes) -> dict[str, Any]:
    """The object in a body. Raises ProtocolMismatch."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolMismatch("a body that is not JSON") from error
    if not isinstance(values, dict):
        raise ProtocolMismatch("a body that is no JSON object")
    return values


def staged_body(staged: Staged) -> bytes:
    """Write one."""
    return _STAGED.pack(staged.slot, staged.generation, staged.address, staged.length, staged.crc32c, bytes.fromhex(staged.version))


def read_staged(body: bytes) -> Staged:
    """Read one. Raises ProtocolMismatch."""
    try:
        slot, generation, address, length, crc, version = _STAGED.unpack(body)
    except struct.error as error:
        raise ProtocolMismatch("a staged answer of another size") from error
    return Staged(slot, generation, address, length, crc, version.hex())


def release_body(slot: int, generation: int) -> bytes:
    """Write one."""
    return _RELEASE.pack(slot, generation)


def read_release(body: bytes) -> tuple[int, int]:
    """Slot and generation. Raises ProtocolMismatch."""
    try:
        slot, generation = _RELEASE.unpack(body)
    except struct.error as error:
        raise ProtocolMismatch("a release of another size") from error
    return slot, generation


def identity(instance: bytes, version: str, generation: int) -> bytes:
    """What stands in the owner's memory beside tables that may be read directly, IDENTITY_BYTES: read with every row."""
    return _IDENTITY.pack(b"TDLTABLE", instance, bytes.fromhex(version), generation)


def refusal(error: TreadleError) -> bytes:
    """An error as a body."""
    values: dict[str, Any] = {"error": type(error).__name__, "text": str(error)[:ERROR_TEXT_MAX]}
    if isinstance(error, contract_errors.ResourceExhausted):
        values["retry_after_seconds"] = error.retry_after_seconds
    if isinstance(error, contract_errors.FingerprintMismatch):
        values["field"] = error.field
    return json_body(values)


def read_refusal(body: bytes) -> TreadleError:
    """The error in a body, its name there as `origin`; InternalError for what is none of the contract."""
    values = read_json(body)
    error = _mirrored(str(values.get("error")), str(values.get("text")), values)
    error.origin = str(values.get("error"))
    return error


def _mirrored(name: str, text: str, values: Mapping[str, Any]) -> TreadleError:
    kind = getattr(contract_errors, name, None)
    if kind is contract_errors.FingerprintMismatch:
        mismatch = contract_errors.FingerprintMismatch(str(values.get("field")), None, None)
        mismatch.args = (text,)  # the door's words hold the values
        return mismatch
    if kind is contract_errors.ResourceExhausted:
        after = values.get("retry_after_seconds")
        return contract_errors.ResourceExhausted(text, float(after) if isinstance(after, int | float) else None)
    if isinstance(kind, type) and issubclass(kind, TreadleError):
        return kind(text)
    return InternalError(text)

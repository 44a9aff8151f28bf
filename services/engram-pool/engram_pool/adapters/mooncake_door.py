"""The mooncake door: clients ask for rows, the pool gathers them into a registered slot, Mooncake moves them in one read.

Owns the listener for the messages around a read (`treadle.client.engram.mooncake_wire`): keys, limits, deadlines, and one thread
for each connection, so that the pool's event loop is not on the path. Slots and versions are next door. Mooncake's own listeners,
which the engine opens on all addresses, know no keys: the operator's network rule guards them.
"""

from __future__ import annotations

import logging
import mmap
import secrets
import socket
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engram_pool.adapters.mooncake_callers import Callers
from engram_pool.adapters.mooncake_metrics import MooncakeMeters
from engram_pool.adapters.mooncake_requests import Work, read_work
from engram_pool.adapters.mooncake_slots import SlotRing
from engram_pool.adapters.mooncake_tables import IDENTITY_PAGE_BYTES, HeldVersion, HeldVersions
from treadle.client.engram import mooncake_wire as wire
from treadle.client.engram.mooncake_engine import Engine
from treadle.client.engram.mooncake_wire import Frame, Kind
from treadle.contract import (
    Deadline,
    InvalidArgument,
    ProtocolMismatch,
    ResourceExhausted,
    TreadleError,
    Unavailable,
)
from treadle.kernels import crc32c

log = logging.getLogger("engram_pool.mooncake")
SLOT_BYTES = 4 << 20
LEASE_SECONDS = 5.0  # a client that neither reads nor dies: its slot is lent again after that
CONNECTIONS_MAX = 256  # one for each lookup in flight of each client
HANDSHAKE_SECONDS_MAX = 5.0
REQUEST_SECONDS_MAX = 30.0
CLOSE_SECONDS_MAX = 5.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # a lost host is noticed in 25 s


def staging_memory(slots: int, slot_bytes: int = SLOT_BYTES) -> NDArray[np.uint8]:
    """The identity page and the slots behind it, page-aligned, for a door's life."""
    return np.frombuffer(mmap.mmap(-1, IDENTITY_PAGE_BYTES + slots * slot_bytes), dtype=np.uint8)


class MooncakeDoor:
    """Listens until `close`. Its engine and memory live as long as the process."""

    def __init__(
        self, engine: Engine, versions: HeldVersions, slots: SlotRing, meters: MooncakeMeters, *, host: str, port: int,
        callers: Callers, lease_seconds: float = LEASE_SECONDS, connections_max: int = CONNECTIONS_MAX,
    ) -> None:  # fmt: skip
        """host, port: of the listener; 0 takes a free one. Raises OSError."""
        self._engine, self._versions, self._slots, self._meters = engine, versions, slots, meters
        self._callers, self._lease_seconds, self._connections_max = callers, lease_seconds, connections_max
        self._listener = socket.create_server((host, port))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._open: dict[socket.socket, threading.Thread] = {}
        self._accepting = threading.Thread(target=self._accept, name="engram-pool-mooncake", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """End every connection and let go of every version, within CLOSE_SECONDS_MAX. Not on the pool's event loop."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the accepting thread
        self._listener.close()
        deadline = Deadline.after(CLOSE_SECONDS_MAX)
        self._accepting.join(deadline.remaining_seconds())
        with self._lock:
            connections = dict(self._open)
        for connection in connections:
            _end(connection)
        for thread in connections.values():
            thread.join(deadline.remaining_seconds())
            if thread.is_alive():
                log.error("a mooncake connection does not end", extra={"thread": thread.name})

    # -- connections ----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.wait(0.05):  # out of descriptors, say: those who are here go on, and it passes
                    log.error("a mooncake connection was not accepted", extra={"reason": str(error)})
                continue
            with self._lock:
                full = len(self._open) >= self._connections_max
                if not full:
                    thread = threading.Thread(
                        target=self._serve, args=(connection,), name="engram-pool-mooncake-client", daemon=True
                    )
                    self._open[connection] = thread
                    self._meters.connections.set(len(self._open))
            if full:
                _refuse(connection, ResourceExhausted(f"{self._connections_max} connections are open, the limit", 1.0))
                connection.close()
            else:
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
            self._greet(connection)
        except TreadleError as error:
            _refuse(connection, error)
        except (OSError, CancelledError) as error:  # the client, or the pool, has gone
            log.debug("mooncake connection ended", extra={"reason": str(error)})
        except Exception:
            log.exception("bug on a mooncake connection")
        finally:
            connection.close()
            with self._lock:
                del self._open[connection]
                self._meters.connections.set(len(self._open))

    def _greet(self, connection: socket.socket) -> None:
        """Let a client in that knows a key, and serve it with the version that it names."""
        deadline, nonce = Deadline.after(HANDSHAKE_SECONDS_MAX), secrets.token_bytes(wire.NONCE_BYTES)
        wire.send(connection, Frame(Kind.CHALLENGE, nonce))
        frame = wire.receive(connection, deadline)
        if frame.kind is not Kind.OPEN:
            raise ProtocolMismatch(f"{frame.kind.name} before OPEN")
        asked = wire.read_json(frame.body)
        if asked.get("protocol") != wire.PROTOCOL:
            raise ProtocolMismatch(f"the door speaks protocol {wire.PROTOCOL}, the client {asked.get('protocol')!r}")
        caller = _Caller(self._callers, self._callers.find(str(asked.get("proof")), nonce))
        on_end = _Ending(connection)
        held = self._versions.open(str(asked.get("model")), str(asked.get("version")), on_end)
        client = _Client(connection, held, caller, self._slots, self._meters, self._lease_seconds)
        left_first = False
        try:
            wire.send(connection, Frame(Kind.OPENED, self._opened(held)))
            left_first = client.serve()
        finally:
            client.give_back()
            connection.close()  # from here on the client learns that its tables are no longer held
            self._versions.let_go(held, on_end, wait=None if left_first else self._closing)

    def _opened(self, held: HeldVersion) -> bytes:
        versions, row_bytes = self._versions, held.resident.model.row.bytes
        tables = {layer: (versions.address(held, layer), len(held.tables[layer]), row_bytes) for layer in held.registered}
        return wire.json_body({
            "version": held.resident.version, "engine": self._engine.name, "protocol": self._engine.protocol,
            "slot_bytes": self._slots.slot_bytes, "lease_seconds": self._lease_seconds, "tables": tables,
            "identity_address": versions.identity_address(held), "instance": versions.instance.hex(), "generation": held.generation,
        })  # fmt: skip


class _Ending:
    """Ends a connection from another thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def __call__(self) -> None:
        _end(self._connection)


@dataclass(frozen=True, slots=True)
class _Caller:
    """Whose connection it is."""

    callers: Callers
    tenant: int


class _Client:
    """One connection with its version and the slots lent to it."""

    def __init__(
        self, connection: socket.socket, held: HeldVersion, caller: _Caller, slots: SlotRing, meters: MooncakeMeters, lease_seconds: float
    ) -> None:  # fmt: skip
        self._connection, self._held, self._caller, self._slots, self._meters = connection, held, caller, slots, meters
        self._lease_seconds = lease_seconds
        self._lent: dict[int, int] = {}  # slot -> generation

    def serve(self) -> bool:
        """Answer requests until one end leaves; True if it was the client."""
        while self._held.ended is None:
            try:
                frame = wire.receive(self._connection)
            except Unavailable:
                return self._held.ended is None
            if frame.kind is Kind.RELEASE:
                slot, generation = wire.read_release(frame.body)
                if self._lent.get(slot) == generation:
                    del self._lent[slot]
                    self._slots.release(slot, generation)
            else:
                self._answer(frame)
        _refuse(self._connection, self._held.ended)
        return False

    def give_back(self) -> None:
        """The client has gone, and does not believe what it may still be reading."""
        for slot, generation in self._lent.items():
            self._slots.release(slot, generation)
        self._lent.clear()

    def _answer(self, frame: Frame) -> None:
        begun, rows, outcome = time.monotonic(), 0, "failed"
        try:
            work = read_work(self._held, frame)
            rows = work.rows
            wire.send(self._connection, Frame(Kind.STAGED, wire.staged_body(self._stage(work, frame.seconds_left))))
            outcome = "ok"
        except TreadleError as error:
            outcome = type(error).__name__
            if not _refuse(self._connection, error):
                raise Unavailable("the client has gone") from error
        finally:
            self._meters.request_ended(outcome, rows, time.monotonic() - begun)

    def _stage(self, work: Work, seconds_left: float) -> wire.Staged:
        deadline = Deadline.after(min(max(0.0, seconds_left), REQUEST_SECONDS_MAX))
        deadline.check(before="gathering")
        if self._held.ended is not None:
            raise self._held.ended
        length = work.rows * work.row_bytes
        if length > self._slots.slot_bytes:
            raise InvalidArgument(f"{length} bytes of rows in one request, a slot takes {self._slots.slot_bytes}")
        slot = self._slots.take()
        try:
            self._caller.callers.admit(self._caller.tenant, work.rows, work.row_bytes, deadline)
            data = self._slots.view(slot, length)
            work.fill(data.reshape(-1, work.row_bytes))
            crc = crc32c(data)
            deadline.check(before="the rows were lent")
        except BaseException:
            self._slots.give_back(slot)
            raise
        generation = self._slots.lend(slot, self._lease_seconds)
        self._lent[slot] = generation
        self._caller.callers.served(self._caller.tenant, work.rows, work.row_bytes, deadline)
        return wire.Staged(slot, generation, self._slots.address(slot), data.nbytes, crc, self._held.resident.version)


def _refuse(connection: socket.socket, error: TreadleError) -> bool:
    """Tell the client why; False where it is not there any more."""
    try:
        connection.settimeout(HANDSHAKE_SECONDS_MAX)
        wire.send(connection, Frame(Kind.REFUSED, wire.refusal(error)))
    except OSError:
        return False
    return True


def _end(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)

"""Both sides of the ring: a server in the pool's process, clients in processes of the same host.

Owns checks, limits and errors; memory, threads and protocol are native. A client may be of another user and need not be able to
map the tables. Who may connect is for the server: its own user, root, users it was told, or whoever holds a token.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, ResourceExhausted, TreadleError, Unavailable, Windows
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import admission as rule
from treadle.dataplane.extension import native_module
from treadle.dataplane.faults import Fault, error_of
from treadle.dataplane.queue import DeadlineQueue
from treadle.dataplane.versions import Versions
from treadle.kernels.arguments import row_out_of_range

SLOTS = 64  # requests in flight of one client, one for each layer; the same number stands in ring.hpp
TOKENS_MAX = 1 << 16  # of one lookup; in ring.hpp too
CLIENTS_MAX = 4096
ARENA_BYTES_MAX = 1 << 34
ARENA_BYTES = 64 << 20  # of a client that asks for nothing else: two layers of 4,096 tokens of DeepSeek-V4.1
NO_TOKEN = bytes(32)
RETRY_SECONDS = 0.001  # a slot or buffer is free again after about so long

Rows = NDArray[np.uint8]


class RingRefused(Exception):
    """What the native side raises when a server says no: (fault, most bytes of an arena)."""


class RingServer:
    """Serves `versions` to processes of this host, on the threads of `queue`. Close it before the queue.

    Where the tenants of `queue` have tokens, a client needs one of them, whoever it is.

    path:            of a Unix socket; one that a dead process left there is replaced
    clients_max:     connections at once
    arena_bytes_max: most memory of one client; its pages are taken as they are touched
    users:           ids that may connect beside our own user and root, where there are no tokens

    Raises InvalidArgument for limits, Unavailable where the path cannot be bound or the native extension was not built.
    """

    def __init__(
        self, path: str, queue: DeadlineQueue, versions: Versions, *, clients_max: int = 64, arena_bytes_max: int = ARENA_BYTES,
        users: Sequence[int] = (),
    ) -> None:  # fmt: skip
        if not 1 <= clients_max <= CLIENTS_MAX:
            raise InvalidArgument(f"clients_max: 1 to {CLIENTS_MAX}, got {clients_max}")
        if not 4096 <= arena_bytes_max <= ARENA_BYTES_MAX or arena_bytes_max % 4096:
            raise InvalidArgument(f"arena_bytes_max: a multiple of 4096 up to {ARENA_BYTES_MAX}, got {arena_bytes_max}")
        self.path = path
        try:
            self._native: Any = native_module().RingServer(
                queue.native_engine(), versions.native, path, clients_max, arena_bytes_max, list(users),
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(
                f"ring {path}: {error.strerror}; is the path short, its folder there, and no other pool at it?"
            ) from error
        self._closing = weakref.finalize(self, _close_in, os.getpid(), self._native)

    def add_hot_rows(self, descriptor: int) -> None:
        """Let clients that come from now on map a cache (`HotRows.descriptor`), read-only. Raises ResourceExhausted beyond 8."""
        if not self._native.add_hot_rows(descriptor):
            raise ResourceExhausted(f"ring {self.path}: 8 caches are known already, or no descriptor is left")

    def stats(self) -> dict[str, int]:
        """clients, and totals since the start: requests_total, rows_total, refused_total, failed_total."""
        stats: dict[str, int] = self._native.stats()
        return stats

    def close(self) -> None:
        """Stop what clients have in flight, hang up, remove the path. Nothing is written to their memory afterwards."""
        self._closing()


class RingCall:
    """A request in flight. Made by `RingClient`; `out` belongs to it until it has ended."""

    __slots__ = ("_client", "_native", "_row_count", "deadline")

    def __init__(self, client: RingClient, native: Any, deadline: Deadline, row_count: int) -> None:
        self._client, self._native, self.deadline, self._row_count = client, native, deadline, row_count

    @property
    def submitted_ns(self) -> int:
        """When it was put into the ring (time.monotonic_ns())."""
        return int(self._native.submitted_ns)

    @property
    def started_ns(self) -> int:
        """When the pool began with it, known once it has ended; 0: not yet."""
        return int(self._native.started_ns)

    @property
    def finished_ns(self) -> int:
        """When its last row was there, or it ended otherwise; 0: not yet."""
        return int(self._native.finished_ns)

    @property
    def done(self) -> bool:
        """Nothing more is written to `out`."""
        return bool(self._native.ended)

    def wait(self, seconds: float) -> bool:
        """True once all rows are there; False after `seconds`, or once cancelled. Other Python threads run meanwhile.

        Raises the error of a pool that refused, failed or went away: ResourceExhausted, RowOutOfRange, NotFound, DataLoss, Unavailable.
        """
        if not 0 <= seconds <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"seconds: 0 to {WAIT_SECONDS_MAX}, got {seconds}")
        came = bool(self._native.wait(seconds))
        if not came and self._native.fault:
            raise self._error()
        return came

    def cancel(self) -> NDArray[np.bool_]:
        """Stop it; bool [rows] of those that are there.

        Where `out` is ordinary memory, a pool that does not answer within a millisecond brings none. Where it is a buffer of the
        arena, into which the pool may be writing, one that does not answer for 5 s loses the connection.
        """
        there = np.zeros(self._row_count, np.bool_)
        there[: self._native.cancel()] = True
        return there

    def fileno(self) -> int:
        """An eventfd, readable once it has ended; made on first use, closed by `close()`."""
        try:
            return int(self._native.fileno())
        except OSError as error:
            raise ResourceExhausted(f"fileno: the system grants no eventfd: {error}") from error

    def close(self) -> None:
        """Give the eventfd back."""
        self._native.close()

    def _error(self) -> TreadleError:
        what = f"ring {self._client.path}"
        predicted_ns, retry_ns, reason = self._native.refusal()
        if self._native.fault in (Fault.REFUSED, Fault.LATE) and reason:
            verdict = rule.Verdict(self._native.fault, predicted_ns, retry_ns, reason)
            return rule.refusal(verdict, what, self.submitted_ns, self.deadline.at_ns)
        return error_of(self._native.fault, what)


class RingClient:
    """A connection to the pool of this host. A context manager; close it in the end.

    token:       sha256 of the caller's token, 32 bytes; zeros: none
    arena_bytes: memory shared with the pool; 0: as much as the pool gives

    Raises Unavailable if nobody answers within `seconds`, AccessDenied for a user or token that may not, InvalidArgument for an
    arena that the pool does not give. Not for use in a forked child.
    """

    def __init__(self, path: str, *, token: bytes = NO_TOKEN, arena_bytes: int = 0, seconds: float = 5.0) -> None:
        self.path, self._process_id = path, os.getpid()
        try:
            self._native: Any = native_module().RingClient(path, token, arena_bytes, seconds)
        except OSError as error:
            raise Unavailable(f"ring {path}: {error.strerror}; does the pool run, and may this user reach the path?") from error
        except RingRefused as refused:
            fault, arena_bytes_max = refused.args
            raise _refusal(path, fault, arena_bytes_max, arena_bytes) from refused
        self._closing = weakref.finalize(self, _close_in, self._process_id, self._native)

    @property
    def lost(self) -> bool:
        """The pool has gone, or this client was closed: connect anew."""
        return bool(self._native.lost)

    @property
    def arena_bytes(self) -> int:
        """Memory shared with the pool."""
        return int(self._native.arena_bytes)

    @property
    def arena_taken_bytes(self) -> int:
        """Of this, what buffers and requests in flight hold."""
        return int(self._native.arena_taken_bytes)

    @property
    def hot_rows(self) -> list[int]:
        """Descriptors of the pool's hot-row caches, this client's, one for each size of rows."""
        return list(self._native.hot_rows)

    def buffer(self, shape: tuple[int, ...]) -> Rows:
        """An `out` in shared memory, which rows go into without a copy. Its memory is free again with the last array over it.

        Raises ResourceExhausted when the arena has no such stretch left.
        """
        size = int(np.prod(shape, dtype=np.int64))
        try:
            flat: Rows = self._native.buffer(size)
        except OSError as error:
            raise self._no_room(size) from error
        return flat.reshape(shape)

    def gather(self, version: bytes, layer: int, row_count: int, rows: NDArray[np.int64], out: Rows, deadline: Deadline) -> None:
        """Gather by id, now; rows and out as in `submit_gather`, of a table of `row_count` rows.

        Raises RowOutOfRange with `out` untouched, DeadlineExceeded, and what `submit_gather` and `RingCall.wait` raise.
        """
        self._check_process()
        try:
            ended = self._native.gather(version, layer, row_count, deadline.at_ns, rows, out)
        except OSError as error:
            raise self._submission_error(error, out.nbytes + rows.nbytes) from error
        if ended is None:
            return
        if isinstance(ended, int):
            raise row_out_of_range(rows, ended, row_count)
        call = RingCall(self, ended, deadline, rows.size)
        if not call.wait(0):  # raises what the pool said
            raise DeadlineExceeded(f"ring {self.path}: the time was over before all rows were there")

    def submit_gather(self, version: bytes, layer: int, rows: NDArray[np.int64], out: Rows, deadline: Deadline) -> RingCall:
        """Start a gather. rows: [...] int64, copied; out: [..., row_bytes] uint8, C-contiguous, in the arena or anywhere.

        Raises ResourceExhausted beyond SLOTS requests or while the arena is taken, InvalidArgument for what it could never hold,
        Unavailable on a lost connection.
        """
        self._check_process()
        try:
            native = self._native.submit_gather(version, layer, deadline.at_ns, rows, out)
        except OSError as error:
            raise self._submission_error(error, out.nbytes + rows.nbytes) from error
        return RingCall(self, native, deadline, rows.size)

    def submit_lookup(
        self, version: bytes, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline]
    ) -> dict[int, RingCall]:
        """Start a lookup of the layers in `deadlines`, all or none. outs: by layer, [T, C, row_bytes]. Errors as `submit_gather`."""
        self._check_process()
        if windows.token_count > TOKENS_MAX:
            raise InvalidArgument(
                f"ring {self.path}: {TOKENS_MAX} tokens at once, got {windows.token_count}; cut the step by tokens"
            )
        layers = [(layer, deadline.at_ns, outs[layer]) for layer, deadline in deadlines.items()]
        try:
            calls = self._native.submit_lookup(version, layers, windows)
        except OSError as error:
            raise self._submission_error(error, sum(out.nbytes for _, _, out in layers)) from error
        return {
            layer: RingCall(self, call, deadlines[layer], out.shape[0] * out.shape[1])
            for (layer, _, out), call in zip(layers, calls, strict=True)
        }

    def close(self) -> None:
        """Hang up. Requests in flight end as Unavailable; buffers stay readable."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise InvalidArgument(
                f"ring: opened in process {self._process_id}, used in its fork {os.getpid()}; start processes with spawn"
            )

    def _submission_error(self, error: OSError, size: int) -> TreadleError:
        if self.lost:
            return Unavailable(f"ring {self.path}: the pool has gone, or has hung up; connect again")
        if error.strerror is not None and error.errno == _BUSY:
            return ResourceExhausted(f"ring {self.path}: {SLOTS} requests are in flight, the limit of one client", RETRY_SECONDS)
        if size > self.arena_bytes:
            return InvalidArgument(
                f"ring {self.path}: {size} bytes never fit into the {self.arena_bytes} that the pool shares (its setting"
                " ring_arena_bytes_max); ask for fewer tokens or layers at once, or another transport"
            )
        return self._no_room(size)

    def _no_room(self, size: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"ring {self.path}: no stretch of {size} bytes is free in the arena of {self.arena_bytes}, {self.arena_taken_bytes} are"
            " taken; let go of buffers, or ask for a larger arena",
            RETRY_SECONDS,
        )


_BUSY = 16  # EBUSY


def _refusal(path: str, fault: int, arena_bytes_max: int, arena_bytes: int) -> TreadleError:
    if fault == Fault.REFUSED and arena_bytes > arena_bytes_max > 0:
        return InvalidArgument(f"ring {path}: an arena of {arena_bytes} bytes was asked for, the pool gives {arena_bytes_max}")
    if fault == Fault.REFUSED:
        return ResourceExhausted(f"ring {path}: the pool has as many clients as it takes", 1.0)
    if fault == Fault.INVALID:
        return InvalidArgument(f"ring {path}: the pool's clock is another one; leave the time namespace, or use another transport")
    return error_of(fault, f"ring {path}")


def _close_in(process_id: int, native: Any) -> None:
    if os.getpid() == process_id:  # a forked child has no thread to join
        native.close()

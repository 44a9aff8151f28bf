"""Rows by the native socket door of a pool: one request carries all layers, native threads do everything that waits.

Owns the choice of a door and the hold that keeps the version from being freed. Moving rows is `treadle.dataplane.remote`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.client.endpoint import Endpoint
from treadle.client.engram.hold import Hold
from treadle.client.engram.pool_types import OpenedModel
from treadle.client.engram.ticket import LayerTicket, Rows
from treadle.contract import DataLoss, Deadline, EngramModel, NotFound, Transport, TreadleError, Unavailable, Windows
from treadle.contract.policy import WAIT_SECONDS_MAX, WaitPolicy
from treadle.dataplane import DeadlineQueue, RemoteLayer, RemoteRows
from treadle.dataplane.socket import fetch_token_map, ping
from treadle.kernels import HashPlan

PATIENCE_SECONDS = WaitPolicy().wait_seconds_max  # rows that are late by less than that are still taken by most callers
_UNSPECIFIED = ("0.0.0.0", "[::]", "::")  # what a listener on all interfaces calls itself


class SocketSource:
    """Rows of one version at the socket doors that `rows` knows. `hold`: kept while this is open; None: the caller has one."""

    def __init__(self, rows: RemoteRows, *, timeout_seconds: float, hold: Hold | None = None) -> None:
        self.transport = Transport.SOCKET
        self.remote = rows
        self._timeout_seconds, self._hold = timeout_seconds, hold
        self._holding = threading.Lock()

    def gather(self, layer: int, rows: NDArray[np.int64], out: Rows) -> None:
        """See RowSource."""
        self._keep_hold()
        until = Deadline.after(self._timeout_seconds)
        _whole(self.remote.submit_gather(layer, np.ascontiguousarray(rows), out, until, until), until)

    def lookup(self, layers: Sequence[int], windows: Windows, outs: Mapping[int, Rows]) -> None:
        """See RowSource."""
        self._keep_hold()
        until = Deadline.after(self._timeout_seconds)
        tickets = self.remote.submit_lookup(windows, outs, dict.fromkeys(layers, until), until)
        try:
            for ticket in tickets.values():
                _whole(ticket, until)
        except TreadleError:
            for ticket in tickets.values():
                ticket.cancel()  # `outs` are the caller's again
            raise

    def submit(
        self, windows: Windows, outs: Mapping[int, Rows], deadlines: Mapping[int, Deadline], queue: DeadlineQueue | None = None
    ) -> dict[int, LayerTicket]:
        """See RowSource. Nothing is gathered here, so no queue is needed."""
        self._keep_hold()
        give_up = Deadline.after(WAIT_SECONDS_MAX)
        return dict(self.remote.submit_lookup(windows, outs, deadlines, give_up, patience_seconds=PATIENCE_SECONDS))

    def page_bytes(self) -> int:
        """See RowSource: the tables are elsewhere."""
        return 0

    def close(self) -> None:
        """See RowSource."""
        self.remote.close()
        if self._hold is not None:
            self._hold.close()

    def _keep_hold(self) -> None:
        """A pool that has restarted is asked to hold again, beside the lookup: rows do not wait for it."""
        if self._hold is not None and not self._hold.stands and self._holding.acquire(blocking=False):
            threading.Thread(target=self._hold_again, name="treadle-hold", daemon=True).start()

    def _hold_again(self) -> None:
        try:
            assert self._hold is not None
            self._hold.ensure()
        except TreadleError:  # the pool is away, or the version: lookups say so themselves
            pass
        finally:
            self._holding.release()


def socket_source(endpoint: Endpoint, opened: OpenedModel, *, here: bool) -> SocketSource:
    """Open a pool's socket door. here: the pool is on this host.

    Raises NotFound where it has none that can be reached from here, Unavailable if none answers, AccessDenied.
    """
    model, address = opened.resident.model, _door(endpoint, opened, here=here)
    hold = Hold(endpoint, model.name, opened.resident.version)
    try:
        hold.ensure()
        rows = RemoteRows(opened.resident.version, model.fingerprint.digest, remote_layers(model), token=endpoint.key)
        rows.add_owner(address)
    except TreadleError:
        hold.close()
        raise
    return SocketSource(rows, timeout_seconds=endpoint.timeout_seconds, hold=hold)


def remote_layers(model: EngramModel, plans: Mapping[int, HashPlan] | None = None) -> list[RemoteLayer]:
    """The tables of a model as owners hold them. plans: to hash here, which a table that is spread over owners needs."""
    return [
        RemoteLayer(layer, model.table(layer).rows, model.row.bytes, model.columns, (plans or {}).get(layer))
        for layer in model.layers
    ]


def hash_plans(model: EngramModel, address: str, *, token: str | None, timeout_seconds: float) -> dict[int, HashPlan]:
    """How tokens become rows, by layer, with the token map of the owner at `address`.

    Raises DataLoss for a map that is not the manifest's, and the errors of `fetch_token_map`.
    """
    token_map = None
    if model.token_map is not None:
        token_map = fetch_token_map(
            address, model.version, model.fingerprint.digest, model.layers[0], token=token, timeout_seconds=timeout_seconds
        )
        digest = None if token_map is None else hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()
        if digest != model.token_map:
            raise DataLoss(f"{address} hashes with another token map than {model.name} {model.version}")
    return {layer: HashPlan.from_model(model, layer, token_map) for layer in model.layers}


def _door(endpoint: Endpoint, opened: OpenedModel, *, here: bool) -> str:
    """The first door that answers."""
    failure: TreadleError | None = None
    for address in [door.address for door in opened.doors if door.transport == Transport.SOCKET]:
        if address.startswith("unix:") and not (here and Path(address.removeprefix("unix:")).exists()):
            continue
        reached = _reached(address, endpoint)
        try:
            ping(reached, token=endpoint.key, timeout_seconds=endpoint.timeout_seconds)
        except Unavailable as error:
            failure = error
            continue
        return reached
    raise failure or NotFound(f"{endpoint.address} has no socket door that can be reached from here; see its setting socket_listen")


def _reached(address: str, endpoint: Endpoint) -> str:
    """A door on all interfaces is reached where the pool is."""
    host, _, port = address.rpartition(":")
    return f"{endpoint.address.rpartition(':')[0]}:{port}" if host in _UNSPECIFIED else address


def _whole(ticket: LayerTicket, until: Deadline) -> None:
    """Wait for it. Raises what ended it, DeadlineExceeded when the time was over."""
    while not ticket.wait(min(WAIT_SECONDS_MAX, until.remaining_seconds() + 0.05)):  # it ends by itself at `until`
        if until.remaining_seconds() == 0:
            ticket.cancel()
            until.check(before="all rows were there")

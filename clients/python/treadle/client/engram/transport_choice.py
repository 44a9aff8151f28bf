"""Which way the rows of an opened version come: the one that is asked for, or the fastest that this process can have."""

from __future__ import annotations

import logging
import socket

from treadle.client.endpoint import Endpoint
from treadle.client.engram import pool_types as types
from treadle.client.engram.mooncake_source import mooncake_source
from treadle.client.engram.ring_source import ring_source
from treadle.client.engram.rpc_source import RpcSource
from treadle.client.engram.socket_source import socket_source
from treadle.client.engram.sources import RowSource, local_source, mapped_source
from treadle.client.engram.spread import owners_told_by, spread_source
from treadle.contract import AccessDenied, InvalidArgument, NotFound, ResourceExhausted, Transport, TransportChoice, Unavailable

log = logging.getLogger("treadle.client")


def row_source(endpoint: Endpoint, opened: types.OpenedModel, transport: str, workers: int) -> RowSource:
    """Where the rows of an opened version come from. transport: as in `EngramPool.open`. Raises InvalidArgument, Unavailable."""
    here = _on_this_host(endpoint.address)
    if transport == TransportChoice.AUTO:
        return _best_source(endpoint, opened, workers, here=here)
    if transport == Transport.MAPPED:
        return mapped_source(opened, workers=workers)
    if transport == Transport.LOCAL:
        return local_source(opened, workers=workers)
    if transport == Transport.SOCKET:
        return _remote_source(endpoint, opened, here=here)
    if transport == Transport.RING:
        return ring_source(endpoint, opened)
    if transport == Transport.RPC:
        return _rpc(endpoint, opened)
    if transport == Transport.MOONCAKE:
        return mooncake_source(endpoint, opened)
    raise InvalidArgument(f"transport: {', '.join(TransportChoice)}, got {transport!r}")


def _best_source(endpoint: Endpoint, opened: types.OpenedModel, workers: int, *, here: bool) -> RowSource:
    """On this host mapped, else by ring; else by the pool's socket door; else by gRPC."""
    extra = {"model": opened.resident.model.name, "pool": endpoint.address}
    if here and not any(place.held for place in opened.segments):
        try:
            return mapped_source(opened, workers=workers)
        except (NotFound, PermissionError) as error:  # it runs here but in another container, or as another user
            log.warning("the table cannot be mapped, its rows come by another way", extra={**extra, "reason": str(error)})
        try:
            return ring_source(endpoint, opened)
        except (NotFound, Unavailable, AccessDenied, ResourceExhausted) as error:
            log.info("no ring to this pool", extra={**extra, "reason": str(error)})
    try:
        return _remote_source(endpoint, opened, here=here)
    except (NotFound, Unavailable, PermissionError, ResourceExhausted) as error:
        log.warning("rows come by rpc: there is no native door", extra={**extra, "reason": str(error)})
    return _rpc(endpoint, opened)


def _remote_source(endpoint: Endpoint, opened: types.OpenedModel, *, here: bool) -> RowSource:
    """The pool's own socket door; where it is one owner among others, all of them."""
    listed = owners_told_by(endpoint, opened.resident.model)
    if len(listed.owners) > 1:
        return spread_source(endpoint, opened.resident.model, listed)
    return socket_source(endpoint, opened, here=here)


def _rpc(endpoint: Endpoint, opened: types.OpenedModel) -> RpcSource:
    return RpcSource(endpoint, opened.resident.model, opened.resident.version)


def _on_this_host(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    return address.startswith("unix:") or host in ("localhost", "::1", socket.gethostname()) or host.startswith("127.")

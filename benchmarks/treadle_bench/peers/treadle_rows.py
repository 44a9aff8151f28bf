"""treadle's own transports over the same table, from the SDK: those that this pool offers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import Transport
from treadle_bench.peers.peer import Call, Fetcher, Held, Peer, pages_of

CALL_SECONDS_MAX = 30.0


def _peer_by(transport: Transport) -> Peer:
    @contextmanager
    def opened(held: Held) -> Iterator[Sequence[Fetcher]]:
        with ExitStack() as stack:
            pool = stack.enter_context(EngramPool(Endpoint(held.pool_address, timeout_seconds=CALL_SECONDS_MAX)))
            handle = stack.enter_context(pool.open(held.pool_model, transport=str(transport)))

            def gather(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
                handle.gather(0, ids, out)

            yield [Call(str(transport), held, gather, pages_of(handle.page_bytes()), handle.buffer)]

    return Peer(str(transport), "a pool with that door: see its README", opened, in_process=True)


# Mooncake listens on all addresses, so its rows are measured in a network of their own: `treadle bench remote`.
PEERS = tuple(_peer_by(transport) for transport in Transport if transport not in (Transport.FAKE, Transport.MOONCAKE))

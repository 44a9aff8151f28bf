"""numpy over the mapped table: `take` into a buffer, and plain indexing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from treadle_bench.peers.peer import Call, Fetcher, Held, Peer

TAKE = "np.take"


def take(held: Held) -> Call:
    """The baseline of every figure."""

    def gather(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        np.take(held.table, ids, axis=0, out=out, mode="clip")

    return Call(TAKE, held, gather)


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    yield [Call("np fancy", held, lambda ids, _: held.table[ids])]


PEER = Peer("numpy", "pip install numpy", _opened, in_process=True)

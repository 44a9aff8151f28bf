"""Listing 1 of the CXL paper (arXiv 2603.10087) over the mapped table, one thread: what its figures call local DRAM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Unavailable
from treadle_bench.peers.peer import Call, Fetcher, Held, Peer


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    try:
        from treadle_bench import _baselines
    except ImportError as error:
        raise Unavailable(f"the baselines were not built ({error})") from error
    row_bytes = held.layout.row.bytes

    def gather(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        _baselines.listing1(held.table, ids * row_bytes, row_bytes, out, 1)

    yield [Call("listing1", held, gather)]


PEER = Peer("listing1", "install a C++20 compiler with OpenMP, then this package again", _opened, in_process=True)

"""engramdb-python: its Store over the file of the same table, in a process and an environment of its own.

Its fetch takes a list of ids and returns bytes; the list is given to it ready, and only the fetch is timed. The rows that it knows
begin at the start of the file, where ours begin after a header: it reads other bytes than we do, at as many places.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from treadle_bench.own_venv import interpreter_with
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import process_fetcher

REQUIREMENT = "engramdb-python==0.3.0"


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    whole: NDArray[np.uint8] = np.memmap(held.path, dtype=np.uint8, mode="r")
    width, rows = held.layout.row.bytes, len(held.table)
    truth = whole[: whole.size // width * width].reshape(-1, width)
    with process_fetcher(
        "engramdb", "engramdb_fetch.py", interpreter_with(REQUIREMENT), held, ids=held.id_sets(rows), rows=rows, truth=truth
    ) as fetcher:
        yield [fetcher]


PEER = Peer("engramdb", f"pip install {REQUIREMENT} (done in an environment of its own where pip reaches an index)", _opened)

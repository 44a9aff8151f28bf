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
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import ProcessFetcher, TableFile, process_fetcher

REQUIREMENT = "engramdb-python==0.3.0"


@contextmanager
def engramdb_fetcher(table: TableFile, ids: IdSets) -> Iterator[ProcessFetcher]:
    """engramdb over a file of rows, from its first byte. Raises Unavailable where it cannot be installed or run."""
    whole: NDArray[np.uint8] = np.memmap(table.path, dtype=np.uint8, mode="r")
    truth = whole[: whole.size // table.row_bytes * table.row_bytes].reshape(-1, table.row_bytes)
    with process_fetcher("engramdb", "engramdb_fetch.py", interpreter_with(REQUIREMENT), table, ids=ids, truth=truth) as fetcher:
        yield fetcher


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    rows = len(held.table)
    with engramdb_fetcher(TableFile(held.path, 0, rows, held.layout.row.bytes), held.id_sets(rows)) as fetcher:
        yield [fetcher]


PEER = Peer("engramdb", f"pip install {REQUIREMENT} (done in an environment of its own where pip reaches an index)", _opened)

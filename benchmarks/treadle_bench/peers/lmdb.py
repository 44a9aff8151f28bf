"""LMDB in memory: a get for each row in one read transaction, keys made beforehand. Its getmulti is slower than that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle_bench.own_venv import interpreter_with
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import copying_fetcher

REQUIREMENT = "lmdb==3.0.0"


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    with copying_fetcher("lmdb get", "lmdb_get.py", interpreter_with(REQUIREMENT), held) as fetcher:
        yield [fetcher]


PEER = Peer("lmdb", f"pip install {REQUIREMENT} (done in an environment of its own where pip reaches an index)", _opened)

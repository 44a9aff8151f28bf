"""Redis: one MGET for all rows over a Unix socket, by redis-py with hiredis, keys made beforehand, from a real redis-server."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle.contract import Unavailable
from treadle_bench.own_venv import interpreter_with
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import copying_fetcher

REQUIREMENT = "redis[hiredis]==8.1.0"


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    server = shutil.which("redis-server")
    if server is None:
        raise Unavailable("no redis-server is on PATH")
    python = interpreter_with(REQUIREMENT)
    with copying_fetcher("redis MGET", "redis_mget.py", python, held, more={"server": server}) as fetcher:
        yield [fetcher]


PEER = Peer("redis", "apt-get install redis-server", _opened)

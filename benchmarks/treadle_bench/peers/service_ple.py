"""service-ple: its server asked by its own client library over TCP, both as published, in a network of their own.

The server keeps the table in anonymous memory with transparent huge pages, which the mapped table here does not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from treadle_bench.own_venv import interpreter_with
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import copying_fetcher

SERVER, CLIENT = "service-ple==0.2.2", "vllm-service-ple==0.2.2"


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    python = interpreter_with(SERVER, CLIENT)
    with copying_fetcher("service-ple", "service_ple_rows.py", python, held, own_network=True) as fetcher:
        yield [fetcher]


PEER = Peer("service-ple", f"pip install {SERVER} {CLIENT} (done in an environment of its own where pip reaches an index)", _opened)

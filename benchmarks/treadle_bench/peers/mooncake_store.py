"""Mooncake's `EngramStore.lookup` over TCP: a head in each object, the store node in a process of its own, all in a network of their own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from treadle.contract import Unavailable
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.peers.process import SAID_MAX, copying_fetcher

REQUIREMENT = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
IMPORT_SECONDS_MAX = 60


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    tried = subprocess.run(  # not here: it brings threads and a signal handler with it
        [sys.executable, "-c", "from mooncake.store import EngramStore"], capture_output=True, text=True, timeout=IMPORT_SECONDS_MAX, check=False
    )  # fmt: skip
    if tried.returncode:
        raise Unavailable(f"mooncake.store has no EngramStore here: {tried.stderr.strip()[-SAID_MAX:] or tried.returncode}")
    with copying_fetcher("EngramStore.lookup", "mooncake_lookup.py", Path(sys.executable), held, own_network=True) as fetcher:
        yield [fetcher]


PEER = Peer("mooncake-store", f"apt-get install libibverbs1; pip install {REQUIREMENT}", _opened)

"""Leases in a real Redis."""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from treadle.chassis.leases import Leases
from treadle.contract.errors import Unavailable

REDIS = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(REDIS is None, reason="no redis-server here: apt-get install redis-server")


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    assert REDIS is not None
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [REDIS, "--port", str(port), "--save", "", "--appendonly", "no", "--dir", str(tmp_path)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 10
        while not listens(port):
            assert time.monotonic() < until, "redis-server does not listen"
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        child.kill()
        child.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@needs_redis
async def test_whoever_renews_can_be_cancelled_at_any_moment(url: str) -> None:
    async def renew(leases: Leases) -> None:
        while True:
            with suppress(Unavailable):  # a Redis that is late for once
                await leases.put("a", b"x", news=True)

    for moment in range(200):
        leases = Leases(url, "test:thing")
        renewing = asyncio.create_task(renew(leases))
        await asyncio.sleep(0.006 * moment / 200)
        renewing.cancel()
        _, running = await asyncio.wait({renewing}, timeout=5)
        assert not running, f"the cancellation was lost after {0.006 * moment / 200:.4f} s"
        assert renewing.cancelled()
        await leases.close()

"""Hosts by network namespaces, for real: root and the tools are needed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from treadle.contract import Unavailable
from treadle_loadtests.hosts import Host, hosts, why_not

needs_hosts = pytest.mark.skipif((reason := why_not()) is not None, reason=reason or "")
SERVE = (
    "import socket,sys\n"
    "s=socket.create_server((sys.argv[1],0)); print(s.getsockname()[1],flush=True)\n"
    "while True:\n c,_=s.accept(); c.sendall(b'x'*int(sys.argv[2])); c.close()\n"
)
ASK = (
    "import socket,sys,time,json\n"
    "t=time.monotonic(); n=0\n"
    "try:\n"
    " c=socket.create_connection((sys.argv[1],int(sys.argv[2])),timeout=float(sys.argv[3]))\n"
    " while (d:=c.recv(65536)): n+=len(d)\n"
    " e=''\n"
    "except OSError as x: e=type(x).__name__\n"
    "print(json.dumps([n,time.monotonic()-t,e]))\n"
)


@contextmanager
def serving(host: Host, size: int) -> Iterator[int]:
    child = subprocess.Popen(host.command(sys.executable, "-c", SERVE, host.address, str(size)), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


def ask(host: Host, other: Host, port: int, seconds: float = 20.0) -> tuple[int, float, str]:
    count, took, error = json.loads(host.run(sys.executable, "-c", ASK, other.address, str(port), str(seconds)))
    return count, took, error


@needs_hosts
def test_hosts_reach_each_other_until_a_link_is_cut_swallows_or_is_slow() -> None:
    with hosts(3) as (a, b, c), serving(a, 100_000) as port:
        for other in (b, c):
            assert ask(other, a, port)[0] == 100_000
        with a.cut_off():
            assert ask(b, a, port, 1.0)[2]
            assert ask(c, b, 1)[2] == "ConnectionRefusedError"  # the others still reach each other
        with a.swallowed(port):
            count, took, error = ask(b, a, port, 0.5)
            assert (count, error) == (0, "TimeoutError")
            assert took >= 0.5
        with a.slow(4_000_000):
            assert ask(b, a, port)[1] > 0.1  # 100 kB at 4 Mbit/s: 0.2 s, less the burst
        assert ask(b, a, port)[0] == 100_000
        names = [host.name for host in (a, b, c)]
    assert not set(names) & set(subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout.split())


@needs_hosts
def test_a_host_is_apart_from_this_one() -> None:
    with hosts(1) as (a,), serving(a, 1) as port, pytest.raises(OSError):
        socket.create_connection((a.address, port), timeout=0.3)


@needs_hosts
def test_hosts_go_also_where_their_user_fails() -> None:
    def fail() -> None:
        with hosts(2) as made:
            kept.extend(made)
            raise RuntimeError("as a test may")

    kept: list[Host] = []
    with pytest.raises(RuntimeError):
        fail()
    listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert kept
    assert not any(host.name in listed for host in kept)


def test_where_hosts_cannot_be_made_the_reason_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(Unavailable, match="root"), hosts(1):
        pass


def test_their_number_is_bounded() -> None:
    with pytest.raises(ValueError, match="1 to 16"), hosts(17):
        pass

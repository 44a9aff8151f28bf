"""Several hosts on this one, by network namespaces: each has its own loopback and one address on a bridge between them.

Links go down, swallow packets or become slow on command. Needs root, `ip` and `tc` (iproute2), `iptables` for `swallow`. The kernel,
the clock and shared memory are one: this shows what a network does to the fabric, not what other hardware does.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from treadle.contract import Unavailable

HOSTS_MAX = 16
NETWORK = "10.77"  # 10.77.<set>.<host>: private, and told apart by a random third number
COMMAND_SECONDS = 10.0


def why_not() -> str | None:
    """Why hosts cannot be made here, and what would help; None: they can."""
    if os.geteuid() != 0:
        return "hosts by network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "iptables") if shutil.which(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; apt-get install iproute2 iptables"
    probe = f"th-probe-{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if made.returncode:
        return f"this kernel or container grants no network namespaces: {made.stderr.strip()}"
    _run("ip", "netns", "del", probe)
    return None


class Host:
    """One of them. `address`: where the others reach it."""

    def __init__(self, name: str, address: str, link: str) -> None:
        self.name, self.address, self._link = name, address, link

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` there."""
        return ["ip", "netns", "exec", self.name, *words]

    def run(self, *words: str) -> str:
        """Run a short command there; what it printed. Raises Unavailable with what it said if it fails."""
        return _run(*self.command(*words))

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """The link is down: who sends is told at once, or soon."""
        _run("ip", "-n", self.name, "link", "set", self._link, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self.name, "link", "set", self._link, "up")

    @contextmanager
    def swallowed(self, port: int | None = None) -> Iterator[None]:
        """Packets that come in, to `port` or at all, vanish without a word: a black hole."""
        rule = ["-i", self._link, *(["-p", "tcp", "--dport", str(port)] if port else []), "-j", "DROP"]
        self.run("iptables", "-A", "INPUT", *rule)
        try:
            yield
        finally:
            self.run("iptables", "-D", "INPUT", *rule)

    @contextmanager
    def slow(self, bits_per_second: int) -> Iterator[None]:
        """What it sends leaves at this rate at most."""
        rate = ["rate", f"{bits_per_second}bit", "burst", "32kbit", "latency", "400ms"]
        _run("tc", "-n", self.name, "qdisc", "add", "dev", self._link, "root", "tbf", *rate)
        try:
            yield
        finally:
            _run("tc", "-n", self.name, "qdisc", "del", "dev", self._link, "root")


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """`count` hosts on one bridge; all of it goes at the end, whatever happened. Raises Unavailable where `why_not` says so.

    Processes that run there are the caller's to stop, before the hosts go.
    """
    if not 1 <= count <= HOSTS_MAX:
        raise ValueError(f"hosts: 1 to {HOSTS_MAX}, got {count}")
    if (reason := why_not()) is not None:
        raise Unavailable(reason)
    tag, third = secrets.token_hex(3), secrets.randbelow(250) + 1
    switch = f"th{tag}-sw"
    names = [f"th{tag}-{number}" for number in range(count)]
    try:
        _make_switch(switch)
        yield [_make_host(name, switch, f"{NETWORK}.{third}.{number + 1}", number) for number, name in enumerate(names)]
    finally:
        for name in [*names, switch]:  # veth pairs and the bridge go with their namespaces
            with suppress(Unavailable):
                _run("ip", "netns", "del", name)


def _make_switch(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "add", "br0", "type", "bridge")
    _run("ip", "-n", name, "link", "set", "br0", "up")


def _make_host(name: str, switch: str, address: str, number: int) -> Host:
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", f"port{number}", "netns", switch)
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for link in ("lo", "eth0"):
        _run("ip", "-n", name, "link", "set", link, "up")
    _run("ip", "-n", switch, "link", "set", f"port{number}", "master", "br0", "up")
    return Host(name, address, "eth0")


def _run(*words: str) -> str:
    run = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    if run.returncode:
        raise Unavailable(f"{' '.join(words)}: {run.stderr.strip() or run.stdout.strip() or f'exit code {run.returncode}'}")
    return run.stdout

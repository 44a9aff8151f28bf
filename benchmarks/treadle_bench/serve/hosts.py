"""The other hosts of the benchmark: network namespaces, one of which a redirection through `delay` moves farther away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from treadle_bench.answers import Lines
from treadle_bench.remote import other_host
from treadle_bench.serve.delay import MARK
from treadle_bench.serve.processes import Place

START_SECONDS_MAX = 20.0


def why_not() -> str | None:
    """Why there is no second host here, and what would help; None: there is."""
    if os.geteuid() != 0:
        return "a second host (network namespace) needs root"
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}; apt-get install iproute2 iptables" if missing else None


@contextmanager
def three_hosts() -> Iterator[tuple[Place, Place, Place]]:
    """This host by an address that the others reach, and two others."""
    with other_host(0) as (first, inside_first), other_host(1) as (second, inside_second):
        near = f"{first.rpartition('.')[0]}.1"
        yield Place(near), Place(first, inside_first), Place(second, inside_second)


@contextmanager
def farther(host: Place, address: str, seconds: float) -> Iterator[None]:
    """What `host` sends to `address` (host:port) over new connections, and what comes back, takes `seconds` longer: for as long as the
    host is there."""
    target, _, port = address.rpartition(":")
    argv = [*host.inside, sys.executable, "-m", "treadle_bench.serve.delay", target, port, f"{seconds:g}"]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    try:
        line = Lines(child.stdout).within(START_SECONDS_MAX)
        if line is None:
            raise RuntimeError("the delaying forwarder did not start")
        rule = ["-p", "tcp", "-d", target, "--dport", port, "-m", "mark", "!", "--mark", str(MARK)]
        rule += ["-j", "REDIRECT", "--to-ports", str(json.loads(line)["port"])]
        subprocess.run([*host.inside, "iptables", "-t", "nat", "-A", "OUTPUT", *rule], check=True, capture_output=True)
        yield
    finally:
        child.stdin.close()
        child.wait(START_SECONDS_MAX)

"""The network rule of docs/operations.md, loaded as it stands there: hosts of the fabric get through, strangers do not."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import EngramModel

if TYPE_CHECKING:
    from tests.conftest import Process, StartPool

HERE, FRIEND, STRANGER = "10.77.1.1", "10.77.1.2", "10.77.2.2"
KEY = "a-key-of-the-pool"
pytestmark = pytest.mark.skipif(
    shutil.which("nft") is None and os.geteuid() == 0, reason="needs nft: apt-get install nftables"
)  # the rule is nftables'


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Two more namespaces, each joined to this one by a cable: address -> namespace."""
    names = {FRIEND: f"treadle-friend-{os.getpid()}", STRANGER: f"treadle-stranger-{os.getpid()}"}
    try:
        for number, (address, name) in enumerate(names.items(), 1):
            here = address.rpartition(".")[0] + ".1"
            for command in (
                f"ip netns add {name}", f"ip link add tr{number} type veth peer name tr netns {name}", f"ip addr add {here}/24 dev tr{number}",
                f"ip link set tr{number} up", f"ip -n {name} addr add {address}/24 dev tr", f"ip -n {name} link set tr up",
                f"ip -n {name} route add default via {here}",
            ):  # fmt: skip
                subprocess.run(command.split(), check=True)
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
def process(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32], hosts: dict[str, str]
) -> Iterator[Process]:
    keys = tmp_path / "keys"
    keys.write_text(KEY)
    with start_pool(tmp_path / "s", "--mooncake-listen", f"{HERE}:7421", "--api-key-file", str(keys)) as process:
        yield process


def listeners(pid: int) -> set[int]:
    """Ports on which a process listens on all addresses."""
    inodes = {os.readlink(path).strip("socket:[]") for path in Path(f"/proc/{pid}/fd").iterdir() if "socket" in os.readlink(path)}
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, _, port = fields[1].partition(":")
            if fields[3] == "0A" and set(address) == {"0"} and fields[9] in inodes:
                found.add(int(port, 16))
    return found


def reached(namespace: str, ports: set[int]) -> set[int]:
    """Which of these ports of HERE a process in the namespace can connect to."""
    program = "import socket,sys\nfor port in sys.argv[2:]:\n try: socket.create_connection((sys.argv[1], int(port)), 0.5); print(port)\n except OSError: pass"
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", program, HERE, *map(str, sorted(ports))]
    return set(map(int, subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.split()))


def documented_rule() -> str:
    text = (Path(__file__).parents[4] / "docs/operations.md").read_text()
    (rule,) = re.findall(r"```nft\n(.*?)```", text, re.DOTALL)
    return str(rule)


def test_the_documented_rule_keeps_strangers_from_mooncakes_listeners_and_lets_the_fabric_through(
    process: Process, hosts: dict[str, str]
) -> None:
    ports = listeners(process.child.pid)
    assert len(ports) == 2, "an engine is expected to listen twice, on all addresses"
    assert all(12001 <= port <= 17000 for port in ports), "the rule names these ports"
    everything = ports | {7421}
    assert reached(hosts[STRANGER], everything) == everything  # this is what the rule is for
    rule = documented_rule().replace("10.0.7.0/24", f"{FRIEND}/32")
    subprocess.run(["nft", "-f", "-"], input=rule, text=True, check=True)
    try:
        assert reached(hosts[STRANGER], everything) == set()
        assert reached(hosts[FRIEND], everything) == everything
        assert process.fabric.engram._endpoint.address.startswith("127.0.0.1:")
        with socket.create_connection((HERE, 7421), 1):
            pass  # and this host itself
    finally:
        subprocess.run(["nft", "delete", "table", "inet", "treadle_mooncake"], check=True)

"""Queues of both kinds, C++ programs under sanitizers, and owners in processes of their own."""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from treadle.dataplane import IMPLEMENTATION, DeadlineQueue

PATIENCE_SECONDS = 30.0
BUILD_SECONDS_MAX = 240.0  # on a busy machine
sys.path.append(str(Path(__file__).parent))  # owner_process.py is a program and what tests know of its rows; waiting.py


@pytest.fixture(params=["native", "python"])
def make_queue(request: pytest.FixtureRequest) -> Iterator[Callable[..., DeadlineQueue]]:
    """`make_queue(**options)`: native, then of Python threads; closed with the test."""
    if request.param == "native" and IMPLEMENTATION != "native":
        pytest.skip("the native extension was not built")
    made: list[DeadlineQueue] = []

    def make(**options: Any) -> DeadlineQueue:
        made.append(DeadlineQueue(implementation=request.param, **options))
        return made[-1]

    yield make
    for queue in made:
        queue.close()


@pytest.fixture
def run_sanitized(tmp_path: Path) -> Callable[[str, str], None]:
    """`run_sanitized(name, sanitizer)`: build name.cpp beside this file and run it; it says `ok` and nothing is found."""
    return partial(_run_sanitized, tmp_path)


def _run_sanitized(folder: Path, name: str, sanitizer: str) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler: install g++")
    program, kernels = folder / name, Path(__file__).parents[2] / "kernels" / "include"
    flags = [
        "-std=c++20", "-O1", "-g", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-pthread",
        f"-I{kernels}",
    ]  # fmt: skip
    built = subprocess.run(
        [compiler, *flags, str(Path(__file__).with_name(f"{name}.cpp")), "-o", str(program)],
        capture_output=True, text=True, timeout=BUILD_SECONDS_MAX, check=False,
    )  # fmt: skip
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"this compiler comes without the {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr


@dataclass
class Owner:
    """A running owner."""

    address: str
    child: subprocess.Popen[str]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait(PATIENCE_SECONDS)


StartOwner = Callable[..., Owner]


@pytest.fixture
def start_owner() -> Iterator[StartOwner]:
    """`start_owner(address="127.0.0.1:0", held="", before=())`: a process of owner_process.py, ended with the test."""
    if IMPLEMENTATION != "native":
        pytest.skip("the native extension was not built: install a C++20 compiler, then `python setup.py build_ext --inplace`")
    with ExitStack() as stack:
        yield lambda address="127.0.0.1:0", held="", before=(): _start(stack, address, held, before)


def _start(stack: ExitStack, address: str, held: str, before: Sequence[str]) -> Owner:
    script = str(Path(__file__).with_name("owner_process.py"))
    command = [*before, sys.executable, script, address, *([held] if held else [])]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    stack.callback(child.stdout.close)
    stack.callback(child.wait, PATIENCE_SECONDS)
    stack.callback(child.kill)
    stack.callback(child.stdin.close)
    readable, _, _ = select.select([child.stdout], [], [], PATIENCE_SECONDS)
    line = child.stdout.readline().strip() if readable else ""
    assert line, f"the owner did not start: exit code {child.poll()}"
    return Owner(line, child)


@dataclass(frozen=True)
class Hosts:
    """Two other hosts, each a network namespace with an address that this one reaches."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def inside(self, host: int) -> tuple[str, ...]:
        """What goes before a command that is to run there."""
        return ("ip", "netns", "exec", self.names[host])

    def run(self, host: int, *command: str) -> None:
        subprocess.run([*self.inside(host), *command], check=True, capture_output=True, timeout=PATIENCE_SECONDS)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    """Two network namespaces; needs root, iproute2 and iptables."""
    missing = [tool for tool in ("ip", "iptables") if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(f"hosts are network namespaces: run as root{', and apt-get install iproute2 iptables' if missing else ''}")
    names = (f"trd{os.getpid()}a", f"trd{os.getpid()}b")
    net = 100 + os.getpid() % 100  # 10.x.0/1.0/30, so that runs beside each other do not meet
    with ExitStack() as stack:
        for index, name in enumerate(names):
            link = f"v{os.getpid()}{index}"
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False, capture_output=True)
            stack.callback(subprocess.run, ["ip", "link", "del", link], check=False, capture_output=True)
            near, far = f"10.{net}.{index}.1", f"10.{net}.{index}.2"
            for words in (
                f"netns add {name}", f"link add {link} type veth peer name eth0 netns {name}", f"addr add {near}/30 dev {link}",
                f"link set {link} up", f"-n {name} addr add {far}/30 dev eth0", f"-n {name} link set eth0 up", f"-n {name} link set lo up",
            ):  # fmt: skip
                done = subprocess.run(["ip", *words.split()], check=False, capture_output=True, text=True)
                if done.returncode != 0:
                    pytest.skip(f"hosts are network namespaces, and this system grants none: ip {words}: {done.stderr.strip()}")
        yield Hosts(names, (f"10.{net}.0.2", f"10.{net}.1.2"))

"""Tests here run with the real Mooncake, in a network namespace of their own with nothing but loopback.

Mooncake listens on all addresses and knows no keys, so it must not run where others can reach it. The tests of a file run in one
pytest inside the namespace; outside, each test reports what its twin inside did. Without root, `ip` or the library they are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

INSIDE = "TREADLE_TEST_NAMESPACE"
FILE_SECONDS_MAX = 540  # a test may take 600: the first one of a file runs all of it


@dataclass
class Twins:
    """What the tests of each file did inside, by name."""

    outcomes: dict[Path, dict[str, tuple[str, str]]] = field(default_factory=dict)


_TWINS = pytest.StashKey[Twins]()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Outside the namespace, a test is its twin's outcome."""
    if os.environ.get(INSIDE):
        return None
    if (missing := _missing()) is not None:
        pytest.skip(missing)
    twins = pyfuncitem.session.config.stash.setdefault(_TWINS, Twins())
    if pyfuncitem.path not in twins.outcomes:
        names = [item.nodeid for item in pyfuncitem.session.items if item.path == pyfuncitem.path]
        twins.outcomes[pyfuncitem.path] = _run_inside(names, pyfuncitem.config.rootpath)
    outcome, text = twins.outcomes[pyfuncitem.path].get(pyfuncitem.name, ("failed", "it did not run in the namespace"))
    if outcome == "skipped":
        pytest.skip(text)
    assert outcome == "passed", text
    return True


def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> object | None:
    """Outside, nothing is set up."""
    if os.environ.get(INSIDE) or fixturedef.argname == "request":
        return None
    fixturedef.cached_result = (None, fixturedef.cache_key(request), None)  # type: ignore[arg-type]
    return True


@functools.cache
def _missing() -> str | None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and `ip` (apt-get install iproute2): Mooncake runs in a network namespace of its own"
    if importlib.util.find_spec("mooncake") is None:
        return "needs Mooncake: pip install 'treadle-engram-pool[mooncake]'"
    loads = subprocess.run([sys.executable, "-c", "import mooncake.engine"], capture_output=True, text=True, timeout=60)
    if loads.returncode:
        return f"Mooncake does not load ({loads.stderr.strip().splitlines()[-1]}): apt-get install libibverbs1"
    return None


def _run_inside(names: list[str], root: Path) -> dict[str, tuple[str, str]]:
    """Run these tests in a new namespace; outcome and text by name."""
    namespace, report = f"treadle-test-{os.getpid()}", Path(f"/tmp/treadle-test-{os.getpid()}.xml")
    subprocess.run(["ip", "netns", "add", namespace], check=True)
    try:
        subprocess.run(["ip", "-n", namespace, "link", "set", "lo", "up"], check=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *names]
        ran = subprocess.run(
            ["ip", "netns", "exec", namespace, *command], cwd=root, env=os.environ | {INSIDE: namespace}, capture_output=True,
            text=True, timeout=FILE_SECONDS_MAX,
        )  # fmt: skip
        assert report.exists(), ran.stdout + ran.stderr
        return {case.attrib["name"]: _outcome(case, ran.stderr) for case in ElementTree.parse(report).iter("testcase")}
    finally:
        report.unlink(missing_ok=True)
        subprocess.run(["ip", "netns", "del", namespace], check=True)


def _outcome(case: ElementTree.Element, stderr: str) -> tuple[str, str]:
    for child in case:
        if child.tag in ("failure", "error"):
            return "failed", f"{child.text}\n{stderr[-2000:]}"
        if child.tag == "skipped":
            return "skipped", str(child.attrib.get("message"))
    return "passed", ""


@pytest.fixture
def free_port() -> int:
    """A port that nobody else in the namespace takes: below the ephemeral range, a new one for each test."""
    return next(_ports)


_ports = iter(range(21500, 22500))

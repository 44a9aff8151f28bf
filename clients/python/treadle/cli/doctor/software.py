"""Software: which loops run (native or numpy), what could be built, which versions fit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

from treadle.cli.doctor.finding import PROGRAM_SECONDS, Finding, Host, Level
from treadle.cli.version import package_versions

ENGINE = ("torch", "transformers", "tokenizers", "safetensors")
PLUMBING = ("grpcio", "protobuf", "numpy", "openai")
COMPILERS = ("c++", "g++", "clang++")
# In a process of its own: native code that does not fit this CPU must not take the doctor down with it.
PROBE = "import {module} as m; print(m.IMPLEMENTATION)"


def compiler(host: Host) -> Finding:
    """A C++20 compiler, for those who install from source."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        said = host.program(name, "--version")
        if said:
            return Finding("C++ compiler", said.splitlines()[0], "An install from source gets native loops.")
    advice = "apt install g++ (12 or later), before pip install from source. Wheels need none."
    return Finding("C++ compiler", "none", "An install from source falls back to numpy.", advice, Level.INFO)


def loops(host: Host) -> list[Finding]:
    """Which implementation the kernels and the data plane have loaded."""
    kernels, dataplane = implementation("treadle.kernels"), implementation("treadle.dataplane")
    rebuild = "Install a compiler, then pip install --force-reinstall --no-deps {}; see also TREADLE_KERNELS and TREADLE_DATAPLANE."
    return [
        Finding("Kernels", kernels, "Hash and gather run in C++.")
        if kernels == "native"
        else Finding("Kernels", kernels, "Hash and gather take several times longer.", rebuild.format("treadle-kernels"), Level.WARN),
        Finding("Data plane", dataplane, "Prefetch runs on native threads.")
        if dataplane == "native"
        else Finding(
            "Data plane", dataplane, "A prefetch can start milliseconds late beside busy Python code.",
            rebuild.format("treadle-dataplane"), Level.WARN,
        ),
    ]  # fmt: skip


def mooncake(host: Host) -> Finding:
    """Whether Mooncake, which moves rows and versions between hosts, can be loaded."""
    from treadle.client.engram.mooncake_engine import INSTALL

    said = _printed("import mooncake.engine, mooncake.store; print('loads')")
    if said.endswith("loads"):
        return Finding(
            "Mooncake", _version("mooncake-transfer-engine-non-cuda") or "loads", "Its transport and its store can be used."
        )
    means = "No `mooncake` transport and no `treadle pool push` here; sockets carry other hosts' rows."
    return Finding("Mooncake", said, means, f"If they are wanted: {INSTALL}.", Level.INFO)


def implementation(module: str) -> str:
    """`native`, `numpy` or `python`, as the module says of itself; or why it does not load."""
    return _printed(PROBE.format(module=module))


def _printed(program: str) -> str:
    """What a Python program of our environment prints, or why it ended without."""
    try:
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return "does not load in time"
    if run.returncode:
        words = run.stderr.strip().splitlines()
        return f"does not load: {words[-1] if words else f'exit code {run.returncode}'}"
    return run.stdout.strip()


def packages(host: Host) -> list[Finding]:
    """Versions of our packages, and of those that have to fit together."""
    ours = package_versions()
    found = ", ".join(f"{name} {number}" for name, number in ours.items()) or "none"
    numbers = set(ours.values())
    findings = [
        Finding("Python", f"{platform.python_version()}, {platform.system()} {platform.release()}", "3.11 or later on Linux."),
        Finding("treadle", found, "All of one version.")
        if len(numbers) == 1
        else Finding(
            "treadle", found, "Packages of different versions may not fit.", "pip install -U 'treadle[fabric]'", Level.WARN
        ),
    ]
    for name, group, without in (("Engine", ENGINE, "the embedded worker"), ("Plumbing", PLUMBING, "`treadle up` and `chat`")):
        there = {package: _version(package) for package in group}
        missing = [package for package, number in there.items() if number is None]
        listed = ", ".join(f"{package} {number}" for package, number in there.items() if number)
        if missing:
            means = f"Not there: {', '.join(missing)}; needed for {without}."
            findings.append(Finding(name, listed or "none", means, "pip install 'treadle[fabric]'", Level.WARN))
        else:
            findings.append(Finding(name, listed, f"All that {without} need{'s' if name == 'Engine' else ''}."))
    return findings


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

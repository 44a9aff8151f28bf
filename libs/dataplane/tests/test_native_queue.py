"""What only the native queue promises: it needs no GIL, and its C++ is free of data races."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from treadle.contract import Deadline
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue

SECONDS = 20.0


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built")
def test_a_ticket_starts_and_ends_while_a_busy_python_thread_keeps_the_gil() -> None:
    table, rows = np.ones((100, 64), np.uint8), np.arange(100)
    out = np.zeros((100, 64), np.uint8)
    let_in: list[int] = []
    go = threading.Event()
    switch_seconds = sys.getswitchinterval()
    with DeadlineQueue() as queue:
        witness = threading.Thread(target=lambda: let_in.append(go.wait(SECONDS)))  # any Python thread that gets the GIL
        witness.start()
        sys.setswitchinterval(SECONDS)  # from here on nobody takes the GIL from this thread: it computes, and never waits
        try:
            go.set()
            ticket = queue.submit_gather(table, rows, out, Deadline(0))
            until = time.monotonic() + SECONDS / 2
            while ticket.finished_ns == 0 and time.monotonic() < until:
                pass
            finished_ns, others = ticket.finished_ns, len(let_in)
        finally:
            sys.setswitchinterval(switch_seconds)
        witness.join(SECONDS)
    assert finished_ns > 0
    assert others == 0
    assert (out == 1).all()
    assert let_in == [True]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("stress", ["queue_stress", pytest.param("socket_stress", marks=pytest.mark.slow)])
def test_native_threads_run_clean_under(sanitizer: str, stress: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    source, program = Path(__file__).with_name(f"{stress}.cpp"), tmp_path / stress
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-fsanitize={sanitizer}",
        "-fno-sanitize-recover=all",
        "-pthread",
        f"-I{Path(__file__).parents[2] / 'kernels' / 'include'}",
    ]
    built = subprocess.run(
        [compiler, *flags, str(source), "-o", str(program)], capture_output=True, text=True, timeout=240, check=False
    )
    if built.returncode != 0 and "san" in built.stderr and "cannot find" in built.stderr:
        pytest.skip(f"this compiler comes without the {sanitizer} sanitizer")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(program)], capture_output=True, text=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout) == (0, "ok\n"), ran.stderr

"""What only the native queue promises: it needs no GIL, and its C++ is free of data races."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

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
        sys.setswitchinterval(SECONDS)  # nobody takes the GIL from a thread that computes
        try:
            witness.start()  # it keeps the GIL until it waits, and this thread from there on
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
def test_native_threads_run_clean_under(sanitizer: str, stress: str, run_sanitized: Callable[[str, str], None]) -> None:
    run_sanitized(stress, sanitizer)

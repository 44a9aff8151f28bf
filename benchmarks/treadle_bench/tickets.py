"""`treadle bench ticket`: how long a ticket waits for a thread while a Python thread is busy, native against Python threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from treadle import dataplane
from treadle.contract import Deadline
from treadle.dataplane import DeadlineQueue
from treadle_bench.report import Goal, Row, interleave, rows_of

ROWS, ROW_BYTES, TABLE_ROWS = 256, 320, 100_000  # sixteen tokens of a table of 32 MB
ROUNDS, ROUNDS_QUICK = 2000, 100
START_GOAL_US = 100.0


def measure(*, quick: bool) -> tuple[list[Row], list[Goal]]:
    """Microseconds from submission to the first row's turn."""
    table = np.zeros((TABLE_ROWS, ROW_BYTES), dtype=np.uint8)
    ids = np.random.default_rng(0).integers(0, TABLE_ROWS, size=ROWS, dtype=np.int64)
    out = np.zeros((ROWS, ROW_BYTES), dtype=np.uint8)
    with ExitStack() as stack:
        queues = {"python": stack.enter_context(DeadlineQueue(implementation="python"))}
        if dataplane.IMPLEMENTATION == "native":
            queues["native"] = stack.enter_context(DeadlineQueue(implementation="native"))

        def start_of(queue: DeadlineQueue) -> Callable[[int], float]:
            def run(_: int) -> float:
                ticket = queue.submit_gather(table, ids, out, Deadline.after(0.01))
                ticket.wait(10)
                return (ticket.started_ns - ticket.submitted_ns) / 1e3

            return run

        stack.enter_context(_busy_python_thread())
        samples = interleave({name: start_of(queue) for name, queue in queues.items()}, ROUNDS_QUICK if quick else ROUNDS)
    rows = rows_of(samples, {"beside": "one busy Python thread"}, "us", "python")
    started = {row.name: row.median for row in rows}
    return rows, [Goal("native: median start of a ticket, us", started.get("native", float("inf")), START_GOAL_US)]


@contextmanager
def _busy_python_thread() -> Iterator[None]:
    over = threading.Event()

    def count() -> None:
        number = 0
        while not over.is_set():
            for _ in range(10_000):
                number += 1

    thread = threading.Thread(target=count)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

"""How queues end: by close, forgotten, at the interpreter's exit, in a fork. Never with a hang, a crash or a thread left."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from treadle.contract import Deadline, Unavailable
from treadle.contract.policy import WAIT_SECONDS_MAX
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, Implementation, Ticket

if TYPE_CHECKING:
    from tests.waiting import wait_for
else:
    from waiting import wait_for

SECONDS = 20.0
TABLE = np.ones((4, 4096), np.uint8)
ROWS = np.zeros(1 << 12, np.int64)

PREPARE = """
import os, sys, threading, numpy as np
from treadle.contract import Deadline, InvalidArgument
from treadle.dataplane import DeadlineQueue
table, rows = np.ones((4, 4096), np.uint8), np.zeros(1 << 12, np.int64)
outs = [np.zeros((rows.size, 4096), np.uint8) for _ in range(8)]
queue = DeadlineQueue(implementation=sys.argv[1], workers=2, piece_rows=16)
tickets = [queue.submit_gather(table, rows, out, Deadline(i)) for i, out in enumerate(outs)]
"""


@pytest.fixture(params=["native", "python"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "native" and IMPLEMENTATION != "native":
        pytest.skip("the native extension was not built")
    return "native" if request.param == "native" else "python"


def run_script(implementation: Implementation, script: str) -> str:
    """What a fresh interpreter prints. Fails if it does not exit with 0, in time and without a word on stderr."""
    done = subprocess.run(
        [sys.executable, "-c", PREPARE + script, implementation], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def queue_threads() -> int:
    """Worker threads of all queues in this process."""
    native = sum(thread_name(task) == "treadle-edf" for task in Path("/proc/self/task").iterdir())
    return native + sum(thread.name.startswith("treadle-edf") for thread in threading.enumerate())


def thread_name(task: Path) -> str | None:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):  # it has just ended
        return None


def submit_many(queue: DeadlineQueue, count: int) -> list[Ticket]:
    return [queue.submit_gather(TABLE, ROWS, np.zeros((ROWS.size, 4096), np.uint8), Deadline(at)) for at in range(count)]


def test_close_cancels_what_is_queued_and_wakes_who_waits(implementation: Implementation) -> None:
    queue = DeadlineQueue(implementation=implementation, piece_rows=16)
    out = np.zeros((ROWS.size, 4096), np.uint8)
    tickets = [queue.submit_gather(TABLE, ROWS, out, Deadline(at)) for at in range(1000)]  # 17 GB: seconds, whoever is kept waiting
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(tickets[-1].wait(WAIT_SECONDS_MAX)))
    waiting.start()
    queue.close()
    waiting.join(SECONDS)
    assert all(ticket.done for ticket in tickets)
    assert [ticket.wait(0) for ticket in tickets] == [not ticket.cancelled for ticket in tickets]
    assert tickets[-1].cancelled
    assert answers == [False]
    assert queue.stats()["queued"] == 0
    with pytest.raises(Unavailable, match="closed"):
        submit_many(queue, 1)
    queue.close()


def test_many_queues_live_in_one_process_and_leave_no_thread(implementation: Implementation) -> None:
    for _ in range(3):
        queues = [DeadlineQueue(implementation=implementation, workers=2) for _ in range(20)]
        tickets = [ticket for queue in queues for ticket in submit_many(queue, 1)]
        wait_for(lambda: queue_threads() == 40)
        assert all(ticket.wait(SECONDS) for ticket in tickets)
        for queue in queues:
            with queue:
                pass
    wait_for(lambda: queue_threads() == 0)


def test_a_forgotten_queue_ends_its_threads_when_its_last_ticket_is_forgotten(implementation: Implementation) -> None:
    wait_for(lambda: queue_threads() == 0)
    tickets = submit_many(DeadlineQueue(implementation=implementation), 3)
    gc.collect()
    assert all(ticket.wait(SECONDS) for ticket in tickets)
    assert queue_threads() == 1
    del tickets
    gc.collect()
    wait_for(lambda: queue_threads() == 0)


def test_an_exit_without_close_neither_hangs_nor_crashes(implementation: Implementation) -> None:
    assert run_script(implementation, "print('end')") == "end"


def test_an_exit_while_daemon_threads_wait_neither_hangs_nor_crashes(implementation: Implementation) -> None:
    script = """
def wait_on_and_on():
    while True:
        tickets[-1].wait(30)
for _ in range(4):
    threading.Thread(target=wait_on_and_on, daemon=True).start()
print('end')
"""
    for _ in range(5):
        assert run_script(implementation, script) == "end"


def test_a_fork_is_told_that_it_has_no_threads(implementation: Implementation) -> None:
    script = """
child = os.fork()
if child == 0:
    refused = 0
    for use in (lambda: queue.submit_gather(table, rows, outs[0], Deadline(0)), lambda: tickets[0].wait(1), tickets[-1].cancel,
                tickets[0].fileno, tickets[0].close, queue.stats):
        try:
            use()
        except InvalidArgument as error:
            refused += 'spawn' in str(error)
    queue.close()
    del queue, tickets
    sys.exit(refused)  # as any program ends, exit hooks included
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), all(ticket.wait(30) for ticket in tickets))
"""
    assert run_script(implementation, script) == "6 True"

"""A table truncated under the native workers: its tickets end as data loss, the process and the queue go on."""

import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "treadle.dataplane._native", reason="the extension was not built: Python threads have no guard", exc_type=ImportError
)
pytest.importorskip(
    "treadle.kernels._native", reason="the extension was not built: the numpy form has no guard", exc_type=ImportError
)

SCRIPT = """
import mmap, os
import numpy as np
from treadle.contract import DataLoss, Deadline
from treadle.dataplane import DeadlineQueue
from treadle.kernels import gather_rows

file = os.memfd_create("table")
os.ftruncate(file, 64 * mmap.PAGESIZE)
table = np.frombuffer(mmap.mmap(file, 64 * mmap.PAGESIZE, prot=mmap.PROT_READ), dtype=np.uint8).reshape(-1, 256)
everywhere, first = np.arange(len(table)), np.zeros(16, dtype=np.int64)

def gathered(queue, rows):
    out = np.zeros((len(rows), 256), dtype=np.uint8)
    ticket = queue.submit_gather(table, rows, out, Deadline.after(10))
    try:
        return ticket.wait(10)
    except DataLoss as error:
        return str(error)

with DeadlineQueue(workers=2, piece_rows=64, implementation="native") as queue:
    assert gathered(queue, everywhere) is True
    os.ftruncate(file, mmap.PAGESIZE)
    for _ in range(20):
        assert "truncated" in str(gathered(queue, everywhere))
        assert gathered(queue, first) is True
    try:
        gather_rows(table, everywhere, np.zeros((len(table), 256), dtype=np.uint8))
    except DataLoss:
        print("both guards hold")
"""


def test_a_table_truncated_under_the_workers_is_data_loss_for_its_tickets_alone() -> None:
    environment = os.environ | {"TREADLE_DATAPLANE": "native", "TREADLE_KERNELS": "native"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.stdout == "both guards hold\n", done.stderr

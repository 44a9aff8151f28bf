"""A table whose file is truncated under its reader is an error in our loops, and stays what it was everywhere else."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "treadle.kernels.native", reason="the extension was not built: the numpy form has no guard", exc_type=ImportError
)

PAGES = 16
SETUP = f"""
import mmap, os, signal, sys, threading
import numpy as np
from treadle.contract import DataLoss
from treadle.kernels import crc32c, gather_rows

size = {PAGES} * mmap.PAGESIZE
file = os.memfd_create("table")
os.ftruncate(file, size)
table = np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), dtype=np.uint8).reshape(-1, 256)
first, last = np.zeros(3, dtype=np.int64), np.array([0, len(table) - 1], dtype=np.int64)

def gather(ids):
    gather_rows(table, ids, np.zeros((len(ids), 256), dtype=np.uint8))

def lost(act):
    try:
        act()
    except DataLoss as error:
        return "truncated" in str(error)
    return False

gather(last)
os.ftruncate(file, mmap.PAGESIZE)
"""


def ran(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TREADLE_KERNELS": "native"}
    return subprocess.run(
        [sys.executable, *options, "-c", SETUP + script], capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def test_a_truncated_table_is_data_loss_and_the_process_goes_on() -> None:
    done = ran(
        "for _ in range(3):\n"
        "    assert lost(lambda: gather(last)) and lost(lambda: crc32c(table)) and not lost(lambda: gather(first))\n"
        "print('alive')"
    )
    assert done.stdout == "alive\n", done.stderr


def test_every_thread_is_guarded_also_one_that_blocks_all_signals() -> None:
    done = ran(
        "found = []\n"
        "def reader():\n"
        "    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())\n"
        "    found.append(lost(lambda: gather(last)))\n"
        "threads = [threading.Thread(target=reader) for _ in range(8)]\n"
        "[thread.start() for thread in threads], [thread.join(30) for thread in threads]\n"
        "print(found.count(True))"
    )
    assert done.stdout == "8\n", done.stderr


@pytest.mark.parametrize("before", ["", "assert lost(lambda: gather(last))\n"])
def test_a_bus_error_elsewhere_still_ends_the_process(before: str) -> None:
    done = ran(before + "print('reading', flush=True)\ntable[-1].tobytes()\nprint('never')")
    assert done.returncode == -signal.SIGBUS
    assert done.stdout == "reading\n"


def test_the_handler_that_was_there_before_gets_what_is_not_ours() -> None:
    done = ran("assert lost(lambda: gather(last))\ntable[-1].tobytes()", "-X", "faulthandler")
    assert done.returncode == -signal.SIGBUS
    assert "Fatal Python error: Bus error" in done.stderr


def test_a_bus_error_sent_by_kill_reaches_a_handler_of_pythons_or_ends_the_process() -> None:
    sent = "gather(first)\nos.kill(os.getpid(), signal.SIGBUS)\nprint('after')"
    assert ran(sent).returncode == -signal.SIGBUS
    handled = SETUP.replace("gather(last)\n", "signal.signal(signal.SIGBUS, lambda *_: print('handled'))\ngather(last)\n", 1)
    done = subprocess.run([sys.executable, "-c", handled + sent], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "handled\nafter\n", done.stderr


LOOKUP = """
import hashlib
from treadle.contract import RowLayout, Windows
from treadle.contract.families import qwen_ple_model
from treadle.kernels import HashPlan, lookup
from treadle.kernels.segment import Segment, SegmentWriter

model = qwen_ple_model("small", eos_id=5, vocabulary=1_000, prime_base=2_000, row=RowLayout(160, 160, "fp8_e4m3"))
plan = HashPlan.from_model(model, 0, None)
with SegmentWriter(path, rows=plan.rows_hashed, row_bytes=160) as writer:
    writer.append(np.zeros((plan.rows_hashed, 160), dtype=np.uint8))
    writer.publish({"schema": "treadle.segment/1"})
segment = Segment(path)
windows = Windows(np.arange(500), np.array([0, 500], dtype=np.int32), np.full((1, 2), -1))
out = np.zeros((500, plan.columns, 160), dtype=np.uint8)
lookup(plan, segment.rows, windows, out)
segment.verify()
os.truncate(path, segment.rows_offset_bytes + 8192)
assert lost(lambda: lookup(plan, segment.rows, windows, out)) and lost(segment.verify)
print("alive")
"""


def test_a_lookup_and_a_verification_over_a_truncated_segment_are_data_loss(tmp_path: Path) -> None:
    done = ran(f"from pathlib import Path\npath = Path({str(tmp_path / 'table.safetensors')!r})\n{LOOKUP}")
    assert done.stdout == "alive\n", done.stderr

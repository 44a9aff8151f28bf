"""One core kept busy by a process that does nothing else, as on a machine that has other work to do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from treadle.contract import Unavailable

SECONDS_MAX = 60.0  # it ends by itself, whatever becomes of us
_SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("busy", flush=True)
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    pass
"""


@contextmanager
def busy_core() -> Iterator[int]:
    """The number of a core that is busy while the block runs. Raises Unavailable where there is no second core to work on."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise Unavailable("one core busy: this process may use one core only, and that is the one it measures on")
    core = cores[-1]
    with subprocess.Popen(
        [sys.executable, "-c", _SPIN, str(core), str(SECONDS_MAX)], stdout=subprocess.PIPE, text=True
    ) as spinning:
        try:
            assert spinning.stdout is not None
            if spinning.stdout.readline() != "busy\n":
                raise Unavailable(f"one core busy: the process that was to spin ended with {spinning.wait()}")
            yield core
        finally:
            spinning.kill()

"""The demo's own fabric: a home for one run, what runs in it, and that nothing is left of it afterwards.

Owns bringing up and taking down. Does not know what is shown (demo).
"""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from treadle.cli.background import BackgroundFabric
from treadle.cli.fabric_options import FabricOptions
from treadle.cli.process_group import shared_memory_of
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord
from treadle.cli.supervisor import StartFailed, StopRequested
from treadle.cli.terminal import StepView, stderr


@contextmanager
def temporary_home(failures: list[str]) -> Iterator[Path]:
    """A home for this run alone; kept for its logs if `failures` holds any at the end."""
    home = Path(tempfile.mkdtemp(prefix="treadle-demo-"))
    kept = True
    try:
        yield home
        kept = bool(failures)
    except (KeyboardInterrupt, StopRequested):
        kept = False
        raise
    finally:
        if kept:
            stderr().print(f"logs are kept in {home / 'run' / 'logs'}", soft_wrap=True)
        else:
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM drains as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def demo_fabric(options: FabricOptions, home: Path, view: StepView, failures: list[str]) -> Iterator[FabricState]:
    """The fabric, up; afterwards drained, and that nothing is left of it is checked. What went wrong then is added to `failures`."""
    background = BackgroundFabric(options, RunFolder(home), tether=True)
    state = None
    try:
        state = background.wait_up(view)
        yield state
    finally:
        services = state.services if state is not None else ()
        shared = shared_memory_of(record.process.pid for record in services if record.process)
        code = background.stop()
        if code:
            failures.append(f"the fabric ended with exit code {code}")
        if state is not None:
            left = _left_behind(state, shared)
            failures += left
            if not left:
                stderr().print("the fabric is down; no process and nothing in shared memory is left")


def _left_behind(state: FabricState, shared: frozenset[Path]) -> list[str]:
    """shared: what the services' processes had mapped of /dev/shm just before they were stopped"""
    left = [
        f"{record.service} still runs (pid {record.process.pid})"
        for record in state.services
        if record.process and record.process.alive()
    ]
    if Path(state.segment_dir).exists():
        left.append(f"{state.segment_dir} is still there")
    left += [f"{file} is still there" for file in sorted(shared) if file.exists()]
    return left


def record_of(state: FabricState, service: str) -> ServiceRecord:
    """What is known of a service. Raises StartFailed where the fabric has none of that name."""
    record = state.service(service)
    if record is None:
        raise StartFailed(f"the fabric has no {service}")
    return record

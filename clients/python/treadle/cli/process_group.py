"""The processes of a session that we made: what they share, and killing all of them.

Owns finding them in /proc. Does not know services (supervisor) or pipes (child).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from treadle.cli.process_mark import ProcessMark

# Python's own helper (multiprocessing): it unlinks the named shared memory of processes that were killed, once they are gone.
TRACKER = b"multiprocessing.resource_tracker"
TRACKER_SECONDS_MAX = 2.0  # it has a few files to unlink; seen: 20 ms on a busy machine
ROUND_SECONDS = 0.25  # that trackers get before /proc is read again, for a process that was forked while it was read


def kill_group(leader: int) -> None:
    """SIGKILL to every process of `leader`'s group; its resource trackers get up to TRACKER_SECONDS_MAX to finish first.

    Killed with the rest they would leave what the others shared in /dev/shm: 168 MB for each engine of vLLM.
    leader: not reaped yet, so that its number still means the group.
    """
    ends = time.monotonic() + TRACKER_SECONDS_MAX
    while time.monotonic() < ends:
        members = _members(leader)
        trackers = [pid for pid in members if _is_tracker(pid)]
        if not trackers:
            break
        for pid in members:
            if pid not in trackers:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        _wait_gone(trackers, min(ends, time.monotonic() + ROUND_SECONDS))
    with suppress(ProcessLookupError):  # nobody is left in it
        os.killpg(leader, signal.SIGKILL)


def shared_memory_of(pids: Iterable[int]) -> frozenset[Path]:
    """The files of /dev/shm that these processes and what they started have mapped now."""
    files: set[Path] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                files |= _mapped(each.pid)
    return frozenset(files)


def _members(leader: int) -> list[int]:
    """Zombies are none: they hold nothing, and wait for their parent."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getpgid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                members.append(pid)
    return members


def _wait_gone(pids: Iterable[int], ends: float) -> None:
    """Until all of them are gone, or the monotonic clock says `ends`."""
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            ProcessMark.of(pid).wait_gone(max(0.0, ends - time.monotonic()))


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):  # gone meanwhile
        return TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _mapped(pid: int) -> set[Path]:
    with suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        shared = [line for line in maps.splitlines() if "/dev/shm/" in line and not line.endswith("(deleted)")]
        return {Path("/" + line.split("/", 1)[1]) for line in shared}
    return set()

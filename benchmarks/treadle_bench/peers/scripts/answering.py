"""What every peer's script does: fetch the rows that a line names, and say how long it took. The standard library alone.

A script is started with one argument, a JSON object: table, offset_bytes, rows, row_bytes (rows of a file, for those who copy them),
columns, ids (a file of int64 row ids), folder (the script's own), and what the peer needs besides. It prints `ready` when it is. A
line on standard input is `first count`, ids of that file; the answer is one line: microseconds, and the SHA-256 of the rows where the
line ends in "?". It ends when standard input does.
"""

from __future__ import annotations

import array
import hashlib
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

READY = "ready"
END_SECONDS_MAX = 10
Ids = TypeVar("Ids")


def task() -> dict[str, Any]:
    """What this script was asked to do."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    return asked


def answer(asked: dict[str, Any], form: Callable[[list[int]], Ids], fetch: Callable[[Ids], Any]) -> None:
    """Answer until standard input ends. form: ids as the peer takes them, not timed; fetch: to something that has the rows' bytes."""
    ids = array.array("q", Path(asked["ids"]).read_bytes())
    _say(READY)
    for line in sys.stdin:
        first, count = map(int, line.rstrip("?\n").split())
        wanted = form(ids[first : first + count].tolist())
        begun = time.perf_counter_ns()
        rows = fetch(wanted)
        took = (time.perf_counter_ns() - begun) / 1e3
        digest = f" {hashlib.sha256(rows).hexdigest()}" if line.endswith("?\n") else ""
        _say(f"{took}{digest}")


def rows_of(asked: dict[str, Any]) -> Iterator[bytes]:
    """The rows of the table, one after the other."""
    width, at = asked["row_bytes"], asked["offset_bytes"]
    with open(asked["table"], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as table:
        for _ in range(asked["rows"]):
            yield table[at : at + width]
            at += width


def started(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """A server of the peer's, whose output goes to `log`; the caller ends it with `ended`."""
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def ended(process: subprocess.Popen[bytes]) -> None:
    """End a server that was started here."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, seconds: float = 30.0) -> None:
    """Until a server is ready. Ends this script with the server's last words if it died or takes too long."""
    until = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            sys.exit(f"{os.path.basename(str(process.args[0]))} did not start: {log.read_text(errors='replace')[-600:]}")  # type: ignore[index]
        time.sleep(0.02)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

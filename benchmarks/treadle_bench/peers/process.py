"""A peer in a process of its own, asked over pipes; see `scripts/answering.py` for what is said.

Owns that process: it ends with the peer, and by itself when this process ends, as its standard input does.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Unavailable
from treadle_bench.answers import Lines
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.peer import Held
from treadle_bench.peers.scripts.answering import READY

READY_SECONDS_MAX, ANSWER_SECONDS_MAX, END_SECONDS_MAX = 60.0, 30.0, 15.0
SCRIPTS = Path(__file__).with_name("scripts")
SAID_MAX = 600  # characters of what a process says at its end
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class TableFile:
    """Rows as they lie in a file: `rows` of `row_bytes` from `offset_bytes` on."""

    path: Path
    offset_bytes: int
    rows: int
    row_bytes: int


class ProcessFetcher:
    """A running peer; made by `process_fetcher`."""

    def __init__(self, name: str, table_rows: int, truth: NDArray[np.uint8], process: subprocess.Popen[str], log: IO[str]) -> None:
        """truth: u8 [rows, row_bytes], what it must answer with, by row id"""
        self.name, self.table_rows, self.pages = name, table_rows, ""
        self._truth, self._process, self._log, self._lines = truth, process, log, Lines(process.stdout)

    def microseconds(self, ids: IdSets, first: int, tokens: int) -> float:
        return float(self._ask(ids, first, tokens, "")[0])

    def fetches_rightly(self, ids: IdSets, first: int, tokens: int) -> bool:
        expected = hashlib.sha256(self._truth[ids.rows(first, tokens)].tobytes()).hexdigest()
        return self._ask(ids, first, tokens, "?")[1] == expected

    def read_line(self, seconds: float) -> list[str]:
        """The words of one line from it. Raises Unavailable if it died or says nothing."""
        state = f"gave no answer within {seconds:.0f} s"
        try:
            line = self._lines.within(seconds)
        except EOFError:
            line, state = None, "ended"
        if line is None:
            self._log.seek(0)
            raise Unavailable(f"its process {state}: {self._log.read().strip()[-SAID_MAX:] or 'without a word'}")
        return line.split()

    def _ask(self, ids: IdSets, first: int, tokens: int, mark: str) -> list[str]:
        columns = ids.ids.shape[1]
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{first * columns} {tokens * columns}{mark}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # reading says why
        return self.read_line(ANSWER_SECONDS_MAX)


@contextmanager
def process_fetcher(
    name: str, script: str, python: Path, table: TableFile, *, ids: IdSets, truth: NDArray[np.uint8],
    own_network: bool = False, more: Mapping[str, Any] | None = None,
) -> Iterator[ProcessFetcher]:  # fmt: skip
    """Start `script` by an interpreter and wait until it is ready.

    ids: below the table's rows; truth: as of ProcessFetcher
    own_network: it sees a loopback of its own alone, and nobody sees it; for servers that listen on all addresses without a key
    Raises Unavailable with its last words.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-bench-peer-", dir=MEMORY) as folder, Path(folder, "log").open("w+") as log:
        wanted = Path(folder, "ids.bin")
        ids.ids.tofile(wanted)
        asked = {
            "table": str(table.path), "offset_bytes": table.offset_bytes, "rows": table.rows, "row_bytes": table.row_bytes,
            "columns": ids.ids.shape[1], "ids": str(wanted), "folder": folder, **(more or {}),
        }  # fmt: skip
        command = [str(python), str(SCRIPTS / script), json.dumps(asked)]
        with subprocess.Popen(
            [*(_alone() if own_network else ()), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            start_new_session=True, env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        ) as process:  # fmt: skip
            try:
                fetcher = ProcessFetcher(name, table.rows, truth, process, log)
                if fetcher.read_line(READY_SECONDS_MAX) != [READY]:
                    raise Unavailable("its process says other things than that it is ready")
                yield fetcher
            finally:
                _end(process)


@contextmanager
def copying_fetcher(
    name: str, script: str, python: Path, held: Held, *, own_network: bool = False, more: Mapping[str, Any] | None = None
) -> Iterator[ProcessFetcher]:
    """`process_fetcher` for a peer that keeps a table in a form of its own: it gets the first `held.copied_rows` rows."""
    rows = held.copied_rows
    table = TableFile(held.path, held.offset_bytes, rows, held.layout.row.bytes)
    with process_fetcher(
        name, script, python, table, ids=held.id_sets(rows), truth=held.table[:rows], own_network=own_network, more=more
    ) as fetcher:
        yield fetcher


def _alone() -> Sequence[str]:
    """What to put before a command to run it in a network of its own, which goes when it ends."""
    tools = [shutil.which(tool) for tool in ("unshare", "ip", "sh")]
    if None in tools:
        raise Unavailable(
            "it listens on all addresses without a key, so it runs in a network of its own only: apt-get install iproute2"
        )
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    prefix = ["unshare", *as_root, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=END_SECONDS_MAX, check=False)
    if tried.returncode:
        raise Unavailable(
            "it listens on all addresses without a key, so it runs in a network of its own only, which needs root or user "
            f"namespaces: {tried.stderr.strip()}"
        )
    return prefix


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    try:
        process.stdin.close()  # it ends its servers, then itself
        process.wait(END_SECONDS_MAX)
    except (BrokenPipeError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)  # its servers too: the session is its own

"""engramdb-python beside us: the rows of the same file, fetched by its Store in a process and an environment of its own.

Owns that process. Its fetch takes a list of ids and returns bytes; both are given to it ready, and only the fetch is timed.
"""

from __future__ import annotations

import hashlib
import select
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.contract import DataLoss, Unavailable
from treadle_bench.own_venv import interpreter_with

REQUIREMENT = "engramdb-python==0.3.0"
ANSWER_SECONDS_MAX = 30.0


class EngramdbPeer:
    """A running peer; made by `engramdb_peer`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def microseconds(self, number: int) -> float:
        """What its fetch of a set of ids took."""
        return float(self.answer(f"{number}")[0])

    def answer(self, line: str) -> list[str]:
        """One line to it, the words of one line from it. Raises Unavailable if it died or says nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
            readable, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS_MAX)
            said = self._process.stdout.readline().split() if readable else []
        except BrokenPipeError:
            said = []
        if not said:
            raise Unavailable(f"engramdb: no answer within {ANSWER_SECONDS_MAX:.0f} s (exit code {self._process.poll()})")
        return said


@contextmanager
def engramdb_peer(table: Path, row_bytes: int, ids: NDArray[np.int64]) -> Iterator[EngramdbPeer]:
    """A peer over the file of a table, ready and warm; its first answer is checked against the file.

    Its rows begin at the start of the file, where ours begin after a header: it reads other bytes than we do, at as many places.
    ids: [sets, ids of a set] int64, below the number of our rows. Raises Unavailable where it cannot be installed or run, DataLoss
    if its bytes are not those of the file.
    """
    with tempfile.TemporaryDirectory(prefix="treadle-bench-engramdb-") as folder:
        Path(folder, "shard_000.bin").symlink_to(table)
        sets = Path(folder, "ids.bin")
        ids.tofile(sets)
        script = Path(__file__).with_name("engramdb_script.py")
        arguments = [folder, table.stat().st_size // row_bytes, row_bytes, sets, ids.shape[1]]
        with subprocess.Popen(
            [interpreter_with(REQUIREMENT), script, *map(str, arguments)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            try:
                peer = EngramdbPeer(process)
                if peer.answer("0?")[1] != _digest(table, row_bytes, ids[0]):
                    raise DataLoss("engramdb: its rows are not those of the file")
                yield peer
            finally:
                process.kill()


def _digest(table: Path, row_bytes: int, ids: NDArray[np.int64]) -> str:
    whole: NDArray[np.uint8] = np.memmap(table, dtype=np.uint8, mode="r")
    rows = whole[: whole.size // row_bytes * row_bytes].reshape(-1, row_bytes)
    return hashlib.sha256(rows[ids].tobytes()).hexdigest()

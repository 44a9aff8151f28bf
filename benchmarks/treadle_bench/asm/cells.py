"""What was measured, one JSON file for each cell: a method on a task with the prefix of one seed. Tables are made of these alone.

Owns the record's form and its file. A cell is written whole or not at all, so that a run that was cut short goes on with the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import DataLoss
from treadle_bench.asm.tasks import Task

SCHEMA = "treadle.asm-cell/1"
DIGITS = 5  # of a log-probability on disk


@dataclass(frozen=True, slots=True)
class Cell:
    """One method on one task and seed.

    log_probs: [questions][labels], normalised over the labels
    digest:    of prefix, questions and labels: cells of other ones are never compared
    made:      what the method was asked for in full, so that a cell of other settings is not taken for this one
    storage, traffic: numbers kept for the prefix, and read of it for one token, in per cent of the whole prefix's KV
    nbytes:    as it lies at rest; 0 where nothing is kept
    notes:     what else was counted or timed
    """

    task: str
    seed: int
    method: str
    log_probs: tuple[tuple[float, ...], ...]
    answers: tuple[int, ...]
    digest: str
    made: str
    storage: float
    traffic: float
    nbytes: int = 0
    notes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file, without ending."""
        return cell_name(self.task, self.seed, self.method)

    @property
    def scores(self) -> NDArray[np.float64]:
        """log_probs as an array."""
        return np.asarray(self.log_probs)


class Cells:
    """The cells of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, cell: Cell) -> None:
        """Keep a cell in place of an earlier one of that name."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(cell.name)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"schema": SCHEMA} | asdict(cell)) + "\n", encoding="utf-8")
        partial.rename(path)

    def has(self, task: Task, method: str, made: str) -> bool:
        """True if that was measured, made the same way, with the same prefix and the same questions."""
        path = self._path(cell_name(task.name, task.seed, method))
        if not path.is_file():
            return False
        cell = _read(path)
        return cell.digest == digest_of(task) and cell.made == made

    def get(self, task: str, seed: int, method: str) -> Cell:
        """One cell. Raises DataLoss where it is torn, FileNotFoundError where it is not there."""
        return _read(self._path(cell_name(task, seed, method)))

    def __iter__(self) -> Iterator[Cell]:
        for path in sorted(self.folder.glob("*.json")):
            yield _read(path)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


def cell_name(task: str, seed: int, method: str) -> str:
    """Name of a cell's file, without ending."""
    return f"{task}.s{seed}.{method}"


def digest_of(task: Task) -> str:
    """sha256 of what is asked and of what prefix."""
    return hashlib.sha256(json.dumps([task.prefix, task.questions, task.labels, task.answers]).encode()).hexdigest()


def cell_of(
    task: Task,
    method: str,
    made: str,
    log_probs: NDArray[np.float64],
    cost: tuple[float, float, int],
    notes: Mapping[str, Any] | None = None,
) -> Cell:
    """A cell. cost: storage and traffic in per cent, bytes at rest."""
    rows: Sequence[tuple[float, ...]] = [tuple(round(float(value), DIGITS) for value in row) for row in log_probs]
    return Cell(task.name, task.seed, method, tuple(rows), task.answers, digest_of(task), made, *cost, notes or {})


def _read(path: Path) -> Cell:
    values = json.loads(path.read_text(encoding="utf-8"))
    try:
        if values.pop("schema") != SCHEMA:
            raise DataLoss(f"{path}: not a {SCHEMA}; made by another version, so measure again")
        log_probs = tuple(tuple(row) for row in values.pop("log_probs"))
        return Cell(**values | {"log_probs": log_probs, "answers": tuple(values["answers"])})
    except (KeyError, TypeError, AttributeError) as error:
        raise DataLoss(f"{path}: not a whole cell ({error!r}); delete it to measure again") from error

"""Figures on disk: one JSON file for each measurement, from which alone every table is made.

Owns the form of a record, and the work folder's layout:

    records/    one file a measurement, written whole or not at all
    training/   half-grown memories by run, so that a run which was cut short goes on
    scratch/    what can be computed again
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import DataLoss
from treadle_bench.grow.runs import Kind

SCHEMA = "treadle.grow-record/1"
ON = "on"


@dataclass(frozen=True, slots=True)
class Scores:
    """Negative log-likelihood of blocks of one set. blocks: their numbers; nats: summed over the predicted tokens of each."""

    blocks: tuple[int, ...]
    nats: tuple[float, ...]

    def only(self, numbers: Container[int]) -> Scores:
        """Those of the blocks with these numbers."""
        kept = [(block, nats) for block, nats in zip(self.blocks, self.nats, strict=True) if block in numbers]
        return Scores(tuple(block for block, _ in kept), tuple(nats for _, nats in kept))


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement of one state of one run.

    mark:            tokens seen as planned, 0: all of the domain
    state:           "on", or what was done to it: shuffled, random, gate-fixed, bf16, fp8, int4, …
    sets:            by name of the set
    tokens_a_block:  predicted tokens of a block
    tokens_seen:     of the domain, in training
    cpu_seconds:     of training until then (time.process_time of the one thread)
    file_bytes:      of what would be shipped
    digest:          of the domain's texts and splits
    """

    domain: str
    kind: Kind
    seed: int
    mark: int
    state: str
    sets: Mapping[str, Scores]
    tokens_a_block: int
    tokens_seen: int = 0
    cpu_seconds: float = 0.0
    file_bytes: int = 0
    digest: str = ""
    notes: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of its file, without ending."""
        return f"{self.domain}.{self.kind}.s{self.seed}.{self.mark or 'all'}.{self.state}"


class Store:
    """The records of one work folder."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.records_folder = work / "records"

    def put(self, record: Record) -> Path:
        """Keep a record in place of an earlier one of that name."""
        self.records_folder.mkdir(parents=True, exist_ok=True)
        path = self._path(record.name)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        partial.write_text(json.dumps({"schema": SCHEMA} | asdict(record), sort_keys=True) + "\n", encoding="utf-8")
        partial.rename(path)
        return path

    def has(self, domain: str, kind: Kind, seed: int, mark: int, state: str = ON) -> bool:
        """True if that measurement was made."""
        return self._path(f"{domain}.{kind}.s{seed}.{mark or 'all'}.{state}").is_file()

    def get(self, domain: str, kind: Kind, seed: int, mark: int, state: str = ON) -> Record:
        """One record. Raises DataLoss where it is torn, FileNotFoundError where it is not there (ask `has`)."""
        return _read(self._path(f"{domain}.{kind}.s{seed}.{mark or 'all'}.{state}"))

    def __iter__(self) -> Iterator[Record]:
        for path in sorted(self.records_folder.glob("*.json")):
            yield _read(path)

    def scratch(self, name: str) -> Path:
        """Place for something that can be computed again."""
        (self.work / "scratch").mkdir(parents=True, exist_ok=True)
        return self.work / "scratch" / name

    def training(self, run_key: str) -> Path:
        """Folder of a run's half-grown memories."""
        folder = self.work / "training" / run_key
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _path(self, name: str) -> Path:
        return self.records_folder / f"{name}.json"


def scores_of(blocks: NDArray[np.int64], nats: NDArray[np.float64]) -> Scores:
    """Scores of blocks by number, both [n]."""
    return Scores(tuple(int(number) for number in blocks), tuple(float(value) for value in nats))


def _read(path: Path) -> Record:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("schema") != SCHEMA:
            raise DataLoss(f"{path}: not a {SCHEMA}; made by another version, so measure again")
        sets = {name: Scores(tuple(each["blocks"]), tuple(each["nats"])) for name, each in values.pop("sets").items()}
        return Record(**values | {"kind": Kind(values["kind"]), "sets": sets})
    except (ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{path}: not a whole record ({error!r}); delete it to measure again") from error

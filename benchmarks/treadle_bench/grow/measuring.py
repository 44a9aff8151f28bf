"""From blocks to records: how many blocks each figure takes, the frozen model's losses, and sizes of files.

Owns which blocks a figure is measured on; the same for every run, so that any two runs pair block by block.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_pool.growing.evaluation import BLOCKS_AT_ONCE, hidden_after, score, targets_of
from engram_pool.growing.memory import Memory
from treadle.contract import EngramModel
from treadle.contract.errors import FingerprintMismatch
from treadle.contract.row_layout import row_layout
from treadle.nn.frozen import FrozenLM
from treadle_bench.grow.domains import Split
from treadle_bench.grow.material import BLOCK_TOKENS, MEASURED, Blocks, Material, some_blocks
from treadle_bench.grow.other_texts import OTHERS
from treadle_bench.grow.runs import Kind, Run
from treadle_bench.grow.store import ON, Record, Scores, Store, scores_of
from treadle_bench.report import machine

TOKENS_A_BLOCK = BLOCK_TOKENS - 1  # the first token of a block is not predicted
OVERLAP_NOTE = "overlap"  # of the frozen model's record
SHIPPED_PRECISION = "int4"  # rivals get the bytes that this takes


@dataclass(frozen=True, slots=True)
class Sample:
    """Blocks of each set that a figure takes; of the validation set as many as of held-out parts."""

    held_parts: int
    held_wholes: int
    other: int

    def numbers(self, name: str, blocks: Blocks) -> NDArray[np.int64]:
        """Numbers of the blocks of set `name`: some of those that WHOLE takes, so that a smaller sample pairs with the baseline."""
        whole = some_blocks(blocks, WHOLE.limit(name))
        return whole[some_blocks(whole, self.limit(name))]

    def limit(self, name: str) -> int:
        """The most blocks of set `name`."""
        limits = {Split.HELD_WHOLES.value: self.held_wholes} | dict.fromkeys(OTHERS, self.other)
        return limits.get(name, self.held_parts)

    def blocks_of(self, name: str, blocks: Blocks) -> Blocks:
        """Those blocks."""
        return blocks[self.numbers(name, blocks)]


WHOLE = Sample(128, 96, 32)  # the figures that goals are about: all of the King James sets
MARK = Sample(64, 48, 12)  # on the way there: curves, and the toy table
STATE = Sample(40, 20, 8)  # what spoilt, fixed or rounded rows do
QUICK = Sample(6, 4, 2)


def measure(
    model: FrozenLM, material: Material, sample: Sample, memory: Memory | None, *, gate: float | None = None
) -> dict[str, Scores]:
    """Scores on every set, with a memory or without."""
    found = {}
    for name in MEASURED:
        numbers = sample.numbers(name, material.sets[name])
        found[name] = scores_of(numbers, score(model, material.sets[name][numbers], memory, gate=gate).nats)
    return found


def token_losses(model: FrozenLM, blocks: Blocks) -> NDArray[np.float32]:
    """The frozen model's negative log-likelihood of every token but each block's first, [n, TOKENS_A_BLOCK]."""
    out = np.empty((len(blocks), TOKENS_A_BLOCK), dtype=np.float32)
    for at in range(0, len(blocks), BLOCKS_AT_ONCE):
        some = blocks[at : at + BLOCKS_AT_ONCE]
        losses = model.losses(hidden_after(model, some, None), targets_of(some)).view(some.shape)
        out[at : at + len(some)] = losses[:, :-1].numpy()
    return out


def record(
    run: Run, mark: int, state: str, sets: Mapping[str, Scores], material: Material, *, tokens_seen: int = 0,
    cpu_seconds: float = 0.0, file_bytes: int = 0, notes: Mapping[str, Any] | None = None,
) -> Record:  # fmt: skip
    """A record of a run on a material, with the machine that made it."""
    about = machine() | {"torch": torch.__version__, "measured_unix_seconds": round(time.time())}
    return Record(
        run.domain, run.kind, run.seed, mark, state, sets, TOKENS_A_BLOCK, tokens_seen, round(cpu_seconds, 1), file_bytes,
        material.domain_digest, notes or {}, about,
    )  # fmt: skip


def file_bytes(template: EngramModel, hidden: int, vocabulary: int, precision: str = SHIPPED_PRECISION) -> int:
    """What a memory takes as files: rows and their token map, projections and norms in bf16."""
    row = row_layout(precision, template.row.dim).bytes
    rows = sum(template.rows_hashed(layer) for layer in template.layers)
    projections = len(template.layers) * (2 * hidden * template.columns * template.row.dim + 2 * hidden)
    return rows * row + 4 * vocabulary + 2 * projections


def measure_frozen(
    run: Run, material: Material, model: FrozenLM, store: Store, sample: Sample, overlaps: Mapping[str, Any]
) -> None:
    """The baseline: the model as it is on every block that any figure takes, and its loss of each token for mixtures.

    overlaps: what `material.overlaps_of` found, kept with the record
    """
    numbers = {name: sample.numbers(name, material.sets[name]) for name in material.sets}
    began = time.process_time()
    losses = {name: token_losses(model, material.sets[name][chosen]) for name, chosen in numbers.items()}
    arrays: dict[str, Any] = {f"{name}.losses": values for name, values in losses.items()}
    arrays |= {f"{name}.blocks": chosen for name, chosen in numbers.items()}
    np.savez(frozen_losses_path(store, run.domain), **arrays)
    sets = {name: scores_of(numbers[name], losses[name].sum(1, dtype=np.float64)) for name in losses}
    notes = {"measuring_cpu_seconds": round(time.process_time() - began, 1), OVERLAP_NOTE: overlaps}
    store.put(record(run, 0, ON, sets, material, notes=notes))


def note_overlaps(store: Store, material: Material, overlaps: Mapping[str, Any]) -> bool:
    """Add overlaps to a baseline that is there; False where it is not, or its losses are not. Raises FingerprintMismatch."""
    if not (store.has(material.domain, Kind.FROZEN, 0, 0) and frozen_losses_path(store, material.domain).is_file()):
        return False
    require_same_texts(store, material)
    frozen = store.get(material.domain, Kind.FROZEN, 0, 0)
    store.put(replace(frozen, notes={**frozen.notes, OVERLAP_NOTE: overlaps}))
    return True


def frozen_losses_path(store: Store, domain: str) -> Path:
    """Where the frozen model's losses of single tokens are."""
    return store.scratch(f"frozen-{domain}.npz")


def require_same_texts(store: Store, material: Material) -> None:
    """Raise FingerprintMismatch if the baseline in the store was measured on other texts than `material`."""
    frozen = store.get(material.domain, Kind.FROZEN, 0, 0)
    if frozen.digest != material.domain_digest:
        raise FingerprintMismatch(f"texts of {material.domain}", frozen.digest, material.domain_digest)

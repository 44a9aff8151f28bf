"""Grows a memory (or the toy table) through its marks, resumably, and measures it at each.

Owns marks, snapshots and which states are measured. Growing itself is `engram_pool.growing`'s.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram_pool.growing import checkpoint
from engram_pool.growing.evaluation import in_precision, randomised, shuffled
from engram_pool.growing.grower import Grower, spread_of
from engram_pool.growing.memory import Memory
from engram_pool.growing.recipe import Recipe
from treadle.contract.errors import FingerprintMismatch
from treadle.contract.row_layout import PRECISIONS
from treadle.nn.frozen import FrozenLM
from treadle.nn.token_map import compressed_token_map
from treadle_bench.grow import measuring
from treadle_bench.grow.material import Material
from treadle_bench.grow.measuring import Sample
from treadle_bench.grow.runs import ALL, SEEDS, TOY_PRIME_BASE, Kind, Run, marks_of
from treadle_bench.grow.store import ON, Store

PAD_ID = 2  # of SmolLM2's tokenizer
SAVE_STEPS = 30  # a run that is killed loses at most so many steps, about three minutes
GATE_FIXED = 0.5

STATES: dict[str, Callable[[Memory], Memory]] = {
    "shuffled": shuffled,
    "random": randomised,
    "bf16": lambda memory: in_precision(memory, "bf16"),
    "fp8": lambda memory: in_precision(memory, "fp8"),
    "int4": lambda memory: in_precision(memory, "int4"),
}
GATE_STATE = "gate-fixed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A memory at a mark: `path` without ending of its tensors and of its JSON (tokens seen, CPU seconds)."""

    mark: int
    path: Path
    tokens: int
    cpu_seconds: float


def recipe_of(run: Run) -> Recipe:
    """The default recipe, for the run's tokens and seed."""
    if run.kind is Kind.TOY:
        return Recipe(tokens_max=run.tokens, seed=run.seed, prime_base=TOY_PRIME_BASE)
    return Recipe(tokens_max=run.tokens, seed=run.seed)


def measure_memory(run: Run, material: Material, model: FrozenLM, folder: Path, store: Store, sample: Sample | None) -> None:
    """Grow, and measure at every mark; at the last mark of a memory also every state. `folder`: of the language model."""
    measuring.require_same_texts(store, material)
    token_map, compressed = compressed_token_map(folder / "tokenizer.json")
    recipe = recipe_of(run)
    spread = spread_of(model, material.corpus.train, recipe.layers)
    memory = Memory.begin(run.domain, recipe, token_map, compressed, PAD_ID, model.config.hidden, spread)
    sizes = {
        precision: measuring.file_bytes(memory.template, model.config.hidden, len(token_map), precision) for precision in PRECISIONS
    }
    marks = marks_of(run)
    for snapshot in snapshots(Grower(model, memory, material.corpus, recipe), store.training(run.key), marks):
        grown = _grown(memory, snapshot, material)
        whole = run.kind is Kind.MEMORY and snapshot.mark == marks[-1] and not run.stop_at
        for state in states_of(run, snapshot.mark):
            if store.has(run.domain, run.kind, run.seed, snapshot.mark, state):
                continue
            spoilt = STATES[state](grown) if state in STATES else grown
            gate = GATE_FIXED if state == GATE_STATE else None
            chosen = measuring.STATE if state != ON else measuring.WHOLE if whole else measuring.MARK
            sets = measuring.measure(model, material, sample or chosen, spoilt, gate=gate)
            store.put(
                measuring.record(
                    run, snapshot.mark, state, sets, material, tokens_seen=snapshot.tokens, cpu_seconds=snapshot.cpu_seconds,
                    file_bytes=sizes.get(state, sizes[measuring.SHIPPED_PRECISION]), notes={"recipe": recipe.to_json(), "planned_tokens": run.tokens},
                )
            )  # fmt: skip


def _grown(memory: Memory, snapshot: Snapshot, material: Material) -> Memory:
    """The memory at a snapshot. Raises FingerprintMismatch where it was learnt from another text or with other tables."""
    path = snapshot.path.with_suffix(".safetensors")
    grown = memory.with_layers(checkpoint.layers_of(checkpoint.load(path, {"digest": material.corpus.digest})))
    for layer, part in grown.layers.items():
        if part.rows.shape != memory.layers[layer].rows.shape:
            raise FingerprintMismatch(
                f"{path}: rows of layer {layer}", list(memory.layers[layer].rows.shape), list(part.rows.shape)
            )
    return grown


def states_of(run: Run, mark: int) -> tuple[str, ...]:
    """What is measured at a mark; rows spoilt, rounded or a fixed gate only at the last one of the first seed's memory."""
    if run.kind is not Kind.MEMORY or run.seed != SEEDS[0] or mark != marks_of(run)[-1] or mark == ALL:
        return (ON,)
    return (ON, *STATES, GATE_STATE)


def snapshots(grower: Grower, folder: Path, marks: tuple[int, ...]) -> list[Snapshot]:
    """Train until the last mark, from the newest state in `folder`; returns every mark's snapshot, those of earlier calls too.

    A mark's snapshot is `<tokens>.safetensors` with `<tokens>.json`, the first step's end at or behind the mark.
    """
    identity = {"digest": grower.corpus.digest, "recipe": json.dumps(grower.recipe.to_json(), sort_keys=True)}
    reached = _kept(folder)
    if _next_mark(marks, reached) is None:
        return [_snapshot(mark, reached) for mark in marks]
    began = time.process_time() - _resume(grower, folder, identity)
    for report in grower.run():
        mark, last = _next_mark(marks, reached), report.step == report.steps
        if mark is None:
            break
        at_mark = last or (mark != ALL and report.tokens >= mark)
        if at_mark or report.step % SAVE_STEPS == 0:
            name = str(report.tokens) if at_mark else "latest"
            checkpoint.save(folder / f"{name}.safetensors", grower.state(), identity)
            about = {"tokens": report.tokens, "step": report.step, "cpu_seconds": time.process_time() - began, "last": last}
            (folder / f"{name}.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
            reached = _kept(folder)
        if _next_mark(marks, reached) is None:
            break
    return [_snapshot(mark, reached) for mark in marks]


def _kept(folder: Path) -> dict[int, tuple[Path, float, bool]]:
    """Snapshots in a folder by tokens seen: path, CPU seconds, whether it is the end of the plan."""
    found = {}
    for path in folder.glob("*.json"):
        if path.stem.isdigit() and path.with_suffix(".safetensors").is_file():
            about = json.loads(path.read_text(encoding="utf-8"))
            found[int(path.stem)] = (
                path.with_suffix(""),
                float(about["cpu_seconds"]),
                bool(about.get("last", about["step"] == about.get("steps"))),
            )
    return found


def _resume(grower: Grower, folder: Path, identity: dict[str, str]) -> float:
    """Go on from the newest state; returns the CPU seconds that are behind it."""
    newest = max(
        (json.loads(path.read_text(encoding="utf-8")) | {"path": path} for path in folder.glob("*.json")),
        key=lambda about: int(about["step"]), default=None,
    )  # fmt: skip
    if newest is None:
        return 0.0
    grower.restore(checkpoint.load(newest["path"].with_suffix(".safetensors"), identity))
    return float(newest["cpu_seconds"])


def _next_mark(marks: tuple[int, ...], reached: dict[int, tuple[Path, float, bool]]) -> int | None:
    """The first mark without a snapshot."""
    ended = any(last for _, _, last in reached.values())
    for mark in marks:
        if not ended and not (mark != ALL and any(tokens >= mark for tokens in reached)):
            return mark
    return None


def _snapshot(mark: int, reached: dict[int, tuple[Path, float, bool]]) -> Snapshot:
    behind = [tokens for tokens in reached if mark != ALL and tokens >= mark]
    tokens = min(behind) if behind else max(reached)
    path, cpu_seconds, _ = reached[tokens]
    return Snapshot(mark, path, tokens, cpu_seconds)

"""The memory that comes with treadle, alone: frozen, on, with shuffled rows, with random rows, within ten minutes.

Owns what is measured of it. The folder is read as a pool would load it (4-bit rows, bf16 projections), so these are figures of
the artifact. Where the books are not on this machine, the held-out chapters that ship beside the memory are measured alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from engram_pool.growing.corpus import blocks_of, digest_of, read_text, tokenise
from engram_pool.growing.evaluation import randomised, score, shuffled
from engram_pool.growing.folder import Grown, read
from engram_pool.growing.memory import Memory
from treadle.contract.errors import NotFound
from treadle.nn.frozen import FrozenLM
from treadle_bench.grow import figures
from treadle_bench.grow.domains import Split
from treadle_bench.grow.goals import OTHER_RATIO_MAX, PARTS_RATIO_MAX, WHOLES_RATIO_MAX, WRONG_ROWS_CHANGE_MAX
from treadle_bench.grow.intervals import paired, perplexity, ratio, tail_perplexity
from treadle_bench.grow.material import BLOCK_TOKENS, MEASURED, Blocks, material_of
from treadle_bench.grow.measuring import TOKENS_A_BLOCK, Sample
from treadle_bench.grow.other_texts import OTHERS, load_domain, texts_folder
from treadle_bench.grow.store import Scores, scores_of
from treadle_bench.report import Goal, Row, progress

NAME, HELD_OUT_FILE = "kjv", "kjv-held-out.txt.xz"
SAMPLE, SAMPLE_QUICK = Sample(48, 24, 12), Sample(8, 4, 2)  # 108 blocks, four states: six minutes on one core without AMX
FROZEN = "frozen"


def shipped_folder() -> Path:
    """Where the package keeps its memories. Raises NotFound in an installation without them."""
    folder = Path(str(files("engram_pool"))) / "shipped"
    if not (folder / NAME).is_dir():
        raise NotFound(f"{folder / NAME}: this installation of engram_pool ships no memory; `treadle engram grow` makes one")
    return folder


def measure(model_folder: Path, texts: Path | None, *, quick: bool) -> tuple[list[Row], list[Goal], dict[str, Any]]:
    """Rows, goals and what was measured of the shipped memory. texts: the folder of books; None: looked for."""
    place = shipped_folder()
    grown = read(place / NAME)
    sets, digest = _sets(place, texts, model_folder)
    sample, model = SAMPLE_QUICK if quick else SAMPLE, FrozenLM.load(model_folder)
    states: dict[str, Memory | None] = {
        FROZEN: None, "on": grown.memory, "shuffled": shuffled(grown.memory), "random": randomised(grown.memory)
    }  # fmt: skip
    scores: dict[tuple[str, str], Scores] = {}
    steps = [(state, name) for state in states for name in sets]
    for state, name in progress(steps, len(steps), "measuring"):
        numbers = sample.numbers(name, sets[name])
        scores[state, name] = scores_of(numbers, score(model, sets[name][numbers], states[state]).nats)
    extra = {
        "memory": {"name": grown.model.name, "version": grown.model.version, "precision": grown.model.row.dtype, "card": grown.card},
        "sets_missing": [name for name in MEASURED if name not in sets],
        "held_out_of_its_text": grown.card["text"]["digest"] == digest,
    }  # fmt: skip
    return _rows(scores, grown), _goals(scores), extra


def _sets(place: Path, texts: Path | None, model_folder: Path) -> tuple[Mapping[str, Blocks], str]:
    """Blocks of each set, and the digest that the card of a memory has which held them out."""
    tokenizer = model_folder / "tokenizer.json"
    try:
        folder = texts_folder(texts)
    except NotFound:
        if texts is not None:
            raise
        train, held = tokenise(tokenizer, [(name, read_text(place / name)) for name in (f"{NAME}.txt.xz", HELD_OUT_FILE)])
        return {Split.HELD_PARTS.value: blocks_of(held.tokens, BLOCK_TOKENS)}, digest_of([train, held])
    domain = load_domain(NAME, folder)
    learnt = tokenise(tokenizer, [(split.value, domain.text(split)) for split in (Split.TRAIN, Split.HELD_PARTS)])
    sets = material_of(domain, folder, tokenizer).sets
    return {name: sets[name] for name in MEASURED}, digest_of(learnt)


def _rows(scores: Mapping[tuple[str, str], Scores], grown: Grown) -> list[Row]:
    rows = []
    for (state, name), mine in scores.items():
        params = {"set": name, "blocks": len(mine.blocks), "version": grown.model.version[:12]}
        found, worst_block = perplexity([mine], TOKENS_A_BLOCK), tail_perplexity([mine], TOKENS_A_BLOCK)
        row = Row(state, params, "perplexity", found, worst_block, len(mine.blocks))
        if state != FROZEN:
            of_frozen = ratio(paired([mine], [scores[FROZEN, name]], TOKENS_A_BLOCK))
            row = Row(
                state, params, "perplexity", found, worst_block, len(mine.blocks), baseline=FROZEN, ratio=of_frozen.value,
                ratio_ci95=of_frozen.interval,
            )  # fmt: skip
        rows.append(row)
    return rows


def _goals(scores: Mapping[tuple[str, str], Scores]) -> list[Goal]:
    limits = {figures.PARTS: PARTS_RATIO_MAX, figures.WHOLES: WHOLES_RATIO_MAX}
    limits |= dict.fromkeys(OTHERS, OTHER_RATIO_MAX)
    goals = []
    for name, limit in limits.items():
        if ("on", name) in scores:
            on = ratio(paired([scores["on", name]], [scores[FROZEN, name]], TOKENS_A_BLOCK)).value
            goals.append(Goal(f"shipped, {name}: of the frozen perplexity", on, limit))
    for state in ("shuffled", "random"):
        wrong = ratio(paired([scores[state, figures.PARTS]], [scores[FROZEN, figures.PARTS]], TOKENS_A_BLOCK)).value
        text = f"shipped, {figures.PARTS}, {state} rows: change from the frozen perplexity"
        goals.append(Goal(text, abs(wrong - 1), WRONG_ROWS_CHANGE_MAX))
    return goals

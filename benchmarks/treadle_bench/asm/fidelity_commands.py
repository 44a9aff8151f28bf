"""`treadle bench asm eval | sweep | chunks | heatmap | build | operate`: command lines alone; what they do is `command`, `building`, `operating`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle_bench.asm.tasks import Split
from treadle_bench.flags import Json, Quick, Strict, exit_unless_met

Data = Annotated[Path, typer.Option(help="Folder with clinc150, banking77 and rulearena_nba; nothing is fetched.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder that keeps a file for each figure, so that a run goes on; default: in the cache.")
]
ModelDir = Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")]
Tasks = Annotated[list[str] | None, typer.Option("--task", help="clinc20, clinc20-permuted, banking77 or nba; may be repeated.")]
Seeds = Annotated[list[int] | None, typer.Option("--seed", help="Which prefixes; may be repeated.")]
Only = Annotated[
    list[str] | None, typer.Option(help="Only methods whose name begins so, such as asm or kvzip-193; may be repeated.")
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="A setting of the dictionaries, such as heads_joined=3; may be repeated.")
]
Report = Annotated[bool, typer.Option("--report", help="Measure nothing: the table of what the folder holds.")]
SEEDS = (0, 1, 2)


def eval_(
    data: Data, out: Out = None, model_dir: ModelDir = None, task: Tasks = None, seed: Seeds = None, only: Only = None, set_: Set = None,
    split: Annotated[Split, typer.Option(help="val: to choose settings by; test: to report.")] = Split.TEST, report: Report = False,
    quick: Quick = False, json: Json = False, strict: Strict = False,
) -> None:  # fmt: skip
    """Dictionaries beside the whole, the truncated and no prefix, KVzip, SnapKV and Attention Matching (hours; goes on where it stopped)."""
    _run("compare", data, out, model_dir, task, seed, only, set_, split, report, quick, json, strict)


def sweep(
    data: Data, out: Out = None, model_dir: ModelDir = None, task: Tasks = None, seed: Seeds = None, only: Only = None, set_: Set = None,
    split: Split = Split.VAL, report: Report = False, quick: Quick = False, json: Json = False,
) -> None:  # fmt: skip
    """Keys, whitening, grouping, aggregation and dtype of dictionaries, on validation questions."""
    _run("sweep", data, out, model_dir, task, seed or [0], only, set_, split, report, quick, json)


def chunks(
    data: Data, out: Out = None, model_dir: ModelDir = None, task: Tasks = None, seed: Seeds = None, only: Only = None, set_: Set = None,
    split: Split = Split.TEST, report: Report = False, quick: Quick = False, json: Json = False,
) -> None:  # fmt: skip
    """A prefix encoded in chunks: full attention over them, and dictionaries whose Z is summed or averaged (Table 3 of the paper)."""
    _run("chunks", data, out, model_dir, task, seed, only, set_, split, report, quick, json)


def heatmap(
    data: Data, out: Out = None, model_dir: ModelDir = None, task: Tasks = None, seed: Seeds = None, only: Only = None, set_: Set = None,
    split: Split = Split.TEST, report: Report = False, quick: Quick = False, json: Json = False,
) -> None:  # fmt: skip
    """Two-level lookups: recall and agreement by lists and how many are scanned (Figure 4 of the paper)."""
    _run("lists", data, out, model_dir, task, seed or [0], only, set_, split, report, quick, json)


def build(
    data: Data, model_dir: ModelDir = None, set_: Set = None, quick: Quick = False, json: Json = False, strict: Strict = False
) -> None:
    """What building takes: tokens a CPU-second, memory, bytes of int8 and fp32 rows, a further chunk."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.asm.building import measure
    from treadle_bench.asm.command import model_folder
    from treadle_bench.report import show

    rows, goals = measure(data, model_folder(model_dir), tuple(set_ or ()), quick=quick)
    show(rows, goals, as_json=json, title="asm build", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


def operate(
    data: Data, model_dir: ModelDir = None, set_: Set = None, quick: Quick = False, json: Json = False, strict: Strict = False
) -> None:
    """The guard on questions in and off the task, and the time to map 100 MB."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.asm.command import model_folder
    from treadle_bench.asm.operating import measure
    from treadle_bench.report import show

    rows, goals = measure(data, model_folder(model_dir), tuple(set_ or ()), quick=quick)
    show(rows, goals, as_json=json, title="asm operate", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


def add_to(app: typer.Typer) -> None:
    """Make them commands of `treadle bench asm`."""
    app.command("eval")(eval_)
    for command in (sweep, chunks, heatmap, build, operate):
        app.command()(command)


def _run(
    what: str, data: Path, out: Path | None, model_dir: Path | None, task: list[str] | None, seed: list[int] | None, only: list[str] | None,
    changes: list[str] | None, split: Split, report: bool, quick: bool, json: bool, strict: bool = False,
) -> None:  # fmt: skip
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.asm import command

    options = command.AsmOptions(
        data,
        out,
        model_dir,
        tuple(task or ()),
        tuple(seed or SEEDS),
        tuple(only or ()),
        tuple(changes or ()),
        split,
        quick,
        json,
        report,
    )
    goals = getattr(command, what)(options)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])

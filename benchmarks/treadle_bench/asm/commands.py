"""`treadle bench asm …`: the figures of attention-state memory, one command for each table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle_bench.asm.fidelity_commands import add_to
from treadle_bench.flags import Json, Quick, Strict, exit_unless_met

app = typer.Typer(
    no_args_is_help=True,
    help="Attention-state memory: how near a dictionary comes to its prefix, beside rivals; what building, lookups and requests take.",
)
add_to(app)


@app.command()
def latency(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    data: Annotated[
        Path | None, typer.Option(help="Folder with clinc150's train.json and val.json, for the recall on a real model's queries.")
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
) -> None:
    """One layer's lookup against attention over 1K to 16K tokens, one thread (Figure 5 of the paper on this machine; 2 GB, 5 minutes)."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.asm.latency import measure
    from treadle_bench.report import show

    rows, goals, notes = measure(quick=quick, data=data, model_dir=model_dir)
    show(rows, goals, as_json=json, title="asm latency", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def serve(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    dictionary: Annotated[
        Path | None, typer.Option(help="Folder of a dictionary for a prefix of as many tokens; default: one is built.")
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
) -> None:
    """Requests behind a prefix of 4K tokens: first token and tokens a second by full prefill, cached KV and dictionary (3 GB, 15 minutes)."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.asm.serve import measure
    from treadle_bench.report import show

    rows, goals, notes = measure(quick=quick, dictionary=dictionary, model_dir=model_dir)
    show(rows, goals, as_json=json, title="asm serve", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])

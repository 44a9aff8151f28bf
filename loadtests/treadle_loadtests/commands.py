"""`treadle loadtest …`: scenarios over running services, each with its goals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treadle_loadtests.report import Report

app = typer.Typer(no_args_is_help=True, help="Run a scenario over real processes and check everything: swap, chaos, deadlines.")
Quick = Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes: does it work, not how well.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Save = Annotated[Path | None, typer.Option("--save", metavar="FOLDER", help="Write a page of results into this folder.")]


@app.command()
def swap(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    seconds: Annotated[float, typer.Option(min=1, help="Longest time.")] = 240.0,
) -> None:
    """Versions change under load; every row is compared with what it must be. Exit code 1 where a goal is missed."""
    from treadle_loadtests.swap import Plan, run

    _finish(run(Plan(seconds=8.0, gathers=5_000, swaps=3, pause_seconds=0.3) if quick else Plan(seconds=seconds)), json, save)


@app.command()
def deadlines(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    seconds: Annotated[float, typer.Option(min=1, help="Length of each of the two runs.")] = 25.0,
) -> None:
    """Decode and prefill gathers at 80 % load, earliest deadline first and FIFO, held against an oracle. Exit code 1 where a goal is missed."""
    from treadle_loadtests.deadlines import Plan, run

    _finish(run(Plan(seconds=2.0, table_bytes=128 << 20, refusals=300) if quick else Plan(seconds=seconds)), json, save)


@app.command()
def chaos(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    kills: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Longest time.")] = 900.0,
) -> None:
    """Owners, pools, clients and loaders are killed under load; every row is compared. Exit code 1 where a goal is missed."""
    from treadle_loadtests.chaos import Plan, run

    _finish(run(Plan(kills=4, seconds=15.0, swap_every=3) if quick else Plan(kills=kills, seconds=seconds)), json, save)


def _finish(report: Report, as_json: bool, save: Path | None) -> None:
    report.show(as_json=as_json)
    if save is not None:
        report.save(save)
    if not report.met:
        raise typer.Exit(1)

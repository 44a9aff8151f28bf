"""`treadle loadtest …`: scenarios over running services, each with its goals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treadle_loadtests.report import Report

app = typer.Typer(no_args_is_help=True, help="Run a scenario over real processes and check everything.")
Quick = Annotated[bool, typer.Option("--quick", help="Seconds instead of minutes: does it work, not how well.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Model = Annotated[str, typer.Option(help="Whose tokenizer and template are used: a known model or a folder with tokenizer.json.")]
MODEL = "smollm2-135m"
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


@app.command("prefix-swap")
def prefix_swap(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    seconds: Annotated[float, typer.Option(min=1, help="Longest time.")] = 180.0,
) -> None:
    """Versions of a dictionary are published, promoted and deleted while readers look up; every state is compared. Exit code 1 where a goal is missed."""
    from treadle_loadtests.prefix_swap import Plan, run

    small = Plan(seconds=10.0, lookups=500, swaps=3, version_bytes=4 << 20, pause_seconds=0.2)
    _finish(run(small if quick else Plan(seconds=seconds)), json, save)


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


@app.command()
def chat(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="Of the load whose latency is measured, through the gateway and straight.")
    ] = 30.0,
    streams: Annotated[int, typer.Option(min=1, help="At once.")] = 1000,
    model: Model = MODEL,
) -> None:
    """One core for the gateway: added latency at 200 answers a second, many streams at once, the ceiling. Exit code 1 where a goal is missed."""
    from treadle_loadtests.chat import Plan, run

    small = Plan(rate=20.0, seconds=3.0, streams=30, streams_seconds=3.0, stream_tokens=4, ceiling_max=0.0, model=model)
    _finish(run(small if quick else Plan(seconds=seconds, streams=streams, model=model)), json, save)


@app.command()
def cancel(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    disconnects: Annotated[int, typer.Option(min=1, help="Clients that leave.")] = 1000,
    model: Model = MODEL,
) -> None:
    """Clients leave at random moments; how soon do workers stop? Exit code 1 where a goal is missed."""
    from treadle_loadtests.cancel import Plan, run

    _finish(run(Plan(disconnects=40, model=model) if quick else Plan(disconnects=disconnects, model=model)), json, save)


@app.command()
def rolling(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each worker is restarted.")] = 3,
    real: Annotated[bool, typer.Option(help="Also two workers with a model, and their pool.")] = True,
    model: Model = MODEL,
) -> None:
    """Every worker and the pool are restarted under load; no request may fail. Exit code 1 where a goal is missed."""
    from treadle_loadtests.rolling import Plan, run

    small = Plan(workers=2, rounds=1, rate=20.0, real=False, model=model)
    _finish(run(small if quick else Plan(rounds=rounds, real=real, model=model)), json, save)


@app.command()
def overload(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    seconds: Annotated[float, typer.Option(min=4, help="Of each load.")] = 20.0,
    model: Model = MODEL,
) -> None:
    """Three times what the workers can do: goodput, and the wait of those who are let in. Exit code 1 where a goal is missed."""
    from treadle_loadtests.overload import Plan, run

    small = Plan(seconds=3.0, settle_seconds=1.0, loads=(1.1,), model=model)
    _finish(run(small if quick else Plan(seconds=seconds, model=model)), json, save)


@app.command()
def trace(
    data: Annotated[Path, typer.Option(help="Folder or file of the trace: FAST25-release/traces of kvcache-ai/Mooncake.")],
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    requests: Annotated[int, typer.Option(min=1, help="The first so many.")] = 8000,
    speed: Annotated[float, typer.Option(min=0.1, help="Times faster than it was.")] = 30.0,
    model: Model = MODEL,
) -> None:
    """Real requests over four prefix caches: routing against one cache of their size. Exit code 1 where a goal is missed."""
    from treadle_loadtests.trace import Plan, run

    small = Plan(data, requests=min(requests, 300), speed=speed, blocks_max=2048, policies=("prefix",), model=model)
    _finish(run(small if quick else Plan(data, requests=requests, speed=speed, model=model)), json, save)


@app.command()
def faults(
    quick: Quick = False,
    json: Json = False,
    save: Save = None,
    model: Annotated[str, typer.Option(help="A model's name or folder; none: a tiny one.")] = "",
) -> None:
    """Pool, workers and store are dead, frozen or slow while chats are read and answered: none hangs. Exit code 1 where a goal is missed."""
    from treadle_loadtests.fault_cells import ALL_CELLS, QUICK_CELLS
    from treadle_loadtests.faults import plan_of, run

    _finish(run(plan_of(model, QUICK_CELLS if quick else ALL_CELLS)), json, save)


def _finish(report: Report, as_json: bool, save: Path | None) -> None:
    report.show(as_json=as_json)
    if save is not None:
        report.save(save)
    if not report.met:
        raise typer.Exit(1)

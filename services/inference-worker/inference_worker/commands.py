"""`treadle model`: fetches the small real model, and shows what is here. Heavy imports wait until a command runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from treadle.nn.model_fetch import ModelEntry

app = typer.Typer(name="model", help="Language models on this machine.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
Cache = Annotated[Path | None, typer.Option("--cache", help="Where models are kept; default $TREADLE_HOME or ~/.cache/treadle.")]


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="Which model; `treadle model ls` lists them.")] = "smollm2-135m",
          as_json: AsJson = False, cache: Cache = None) -> None:  # fmt: skip
    """Download a model, check its digest and convert it, once; print its folder."""
    from treadle.contract.errors import TreadleError
    from treadle.nn import model_fetch

    try:
        folder = model_fetch.fetch(name, cache) if as_json or not sys.stderr.isatty() else _fetch_with_bar(name, cache)
    except TreadleError as error:
        sys.stderr.write(f"treadle model fetch: {error}\n")
        raise typer.Exit(1) from error
    typer.echo(json.dumps({"model": name, "path": str(folder)}) if as_json else str(folder))


@app.command("ls")
def list_models(as_json: AsJson = False, cache: Cache = None) -> None:
    """List the models that can be fetched, and where those lie that were."""
    from treadle.nn import model_fetch

    entries = model_fetch.list_models(cache)
    if as_json:
        typer.echo(json.dumps({"models": [_as_dict(entry) for entry in entries]}))
        return
    _print_table(entries)


def _fetch_with_bar(name: str, cache: Path | None) -> Path:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from treadle.nn import model_fetch

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=1.0)
        return model_fetch.fetch(name, cache, lambda step, fraction: bar.update(task, description=step, completed=fraction))


def _print_table(entries: list[ModelEntry]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "size", "licence", "from", box=None)
    table.add_column("folder", overflow="fold")  # a path that is cut is of no use
    for entry in entries:
        size = f"{entry.bytes / 1e6:.0f} MB" if entry.path else "-"
        table.add_row(entry.name, size, entry.licence, entry.source, str(entry.path) if entry.path else "not fetched")
    Console().print(table)


def _as_dict(entry: ModelEntry) -> dict[str, str | int | None]:
    path = str(entry.path) if entry.path else None
    return {"name": entry.name, "source": entry.source, "licence": entry.licence, "path": path, "bytes": entry.bytes}

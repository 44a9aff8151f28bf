"""What every command of `treadle bench` takes, and how it ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

Quick = Annotated[bool, typer.Option("--quick", help="Fewer rounds and sizes: an impression, not a figure to quote.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of a table.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a goal is missed; a quick run is not judged.")]


def exit_unless_met(strict: bool, met: Iterable[bool]) -> None:
    """Exit with 1 if `strict` and a goal was missed."""
    if strict and not all(met):
        raise typer.Exit(1)

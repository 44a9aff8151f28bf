"""`treadle logs`: what the services of the run folder print."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from treadle.cli.run_folder import RunFolder, home
from treadle.cli.service_log import follow, last_lines
from treadle.contract.errors import NotFound

LINES = 50


def logs(
    service: Annotated[str, typer.Argument(help="One service (pool, worker, gateway, supervisor, …); none: all of them.")] = "",
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines of each.")] = LINES,
) -> None:
    """Show the last lines of the logs, also of a fabric that has ended."""
    folder = RunFolder(home()).logs
    known = sorted(path.stem for path in folder.glob("*.log"))
    chosen = [name for name in known if service in ("", name) or name.endswith(f"-{service}")]
    if not chosen:
        raise NotFound(f"no log of {service or 'any service'} in {folder}; there are: {', '.join(known) or 'none'}")
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    paths = {name: folder / f"{name}.log" for name in chosen}
    for name, path in paths.items():
        for line in last_lines(path, lines):
            _print(name, line, width)
    if follow_on:
        try:
            for name, line in follow(paths, stop=lambda: False):
                _print(name, line, width)
        except KeyboardInterrupt:
            return


def _print(name: str, line: str, width: int) -> None:
    prefix = f"{name:<{width}} | " if width else ""
    sys.stdout.write(f"{prefix}{line}\n")
    sys.stdout.flush()

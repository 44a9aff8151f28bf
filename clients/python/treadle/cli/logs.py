"""`treadle logs`: what the services of the run folder print."""

from __future__ import annotations

import json
import re
import sys
from functools import partial
from typing import Annotated

import typer

from treadle.cli.run_folder import Failure, RunFolder, home
from treadle.cli.service_log import LogFollower, follow
from treadle.cli.terminal import stderr
from treadle.contract.errors import NotFound

LINES = 50


def logs(
    service: Annotated[str, typer.Argument(help="One service (pool, worker, gateway, supervisor, …); none: all of them.")] = "",
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many of the last lines of each.")] = LINES,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document for each line: service, line.")] = False,
) -> None:
    """Show the last lines of the logs, also of a fabric that has ended."""
    run_folder = RunFolder(home())
    folder = run_folder.logs
    known = sorted(path.stem for path in folder.glob("*.log"))
    chosen = [name for name in known if service in ("", name) or re.search(rf"-{re.escape(service)}(-\d+)?$", name)]
    if not chosen:
        raise NotFound(f"no log of {service or 'any service'} in {folder}; {_told(known)}")
    width = max(map(len, chosen)) if len(chosen) > 1 else 0
    show = _print_json if as_json else partial(_print, width)
    followers = {name: LogFollower(folder / f"{name}.log") for name in chosen}
    for name, follower in followers.items():
        for line in follower.last(lines):
            show(name, line)
    failure = run_folder.read_failure() if run_folder.read() is None else None
    if failure is not None:  # not a line of a log: it goes where messages go
        stderr().print("\n".join(failure_lines(failure)), soft_wrap=True, markup=False)
    if follow_on:
        try:
            for name, line in follow(followers, stop=lambda: False):
                show(name, line)
        except KeyboardInterrupt:
            return


def _told(known: list[str]) -> str:
    """The logs that there are."""
    return f"there {'are' if len(known) > 1 else 'is'} {', '.join(known) or 'none'}"


def failure_lines(failure: Failure) -> list[str]:
    """Why the last fabric ended, for people."""
    return [f"the last fabric ended by itself at {failure.time} ({failure.service}; {failure.log}):", failure.words]


def _print_json(name: str, line: str) -> None:
    sys.stdout.write(json.dumps({"service": name, "line": line}) + "\n")
    sys.stdout.flush()


def _print(width: int, name: str, line: str) -> None:
    prefix = f"{name:<{width}} | " if width else ""
    sys.stdout.write(f"{prefix}{line}\n")
    sys.stdout.flush()

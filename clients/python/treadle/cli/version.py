"""`treadle version`: which packages of ours are installed."""

from __future__ import annotations

import platform
from importlib.metadata import distributions
from typing import Annotated

import typer

from treadle.cli.terminal import print_json, stdout
from treadle.contract import PROTO_VERSION


def package_versions(prefix: str = "treadle") -> dict[str, str]:
    """Installed distributions whose name begins with `prefix`."""
    names = ((dist.name, dist.version) for dist in distributions())
    return dict(sorted((name, version) for name, version in names if name and name.startswith(prefix)))


def version(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Show the versions of treadle's packages, its protocol and Python."""
    packages = package_versions()
    if as_json:
        print_json({"packages": packages, "protocol": PROTO_VERSION, "python": platform.python_version()})
        return
    console = stdout()
    for name, number in packages.items():
        console.print(f"{name:<28} {number}", markup=False)
    console.print(f"{'protocol':<28} {PROTO_VERSION}\n{'Python':<28} {platform.python_version()}", markup=False)

"""What all commands of the pool share: how it is reached, and how a version of it is named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram_pool.commands.load_options import read_limited
from engram_pool.terminal import VERSION_DIGITS
from treadle.contract import InvalidArgument, NotFound

if TYPE_CHECKING:
    from treadle.client import Fabric

Pool = Annotated[str, typer.Option("--pool", envvar="TREADLE_POOL", help="Address of the pool, host:port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="TREADLE_API_KEY_FILE", help="File whose first line is a key of the pool.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[str, typer.Argument(help="Version, or its first digits; none: the current one.")]
DEFAULT_POOL = "127.0.0.1:7401"


def full_version(fabric: Fabric, name: str, digits: str) -> str:
    """The one version of `name` that begins with `digits`; the current one for none. Raises NotFound, InvalidArgument."""
    models = [model for model in fabric.engram.list_models() if model.model.name == name]
    found = [m.version for m in models if m.version.startswith(digits) and (digits or m.current)]
    if len(found) > 1:
        raise InvalidArgument(f"{name}: {len(found)} versions begin with {digits!r}; give more digits")
    if not found:
        here = ", ".join(model.version[:VERSION_DIGITS] for model in models)
        raise NotFound(f"{name}: no version {digits!r}; there is {here}" if models else f"no model {name!r} in this pool")
    return found[0]


def fabric_of(pool: str, api_key_file: Path | None) -> Fabric:
    """The pool, with the first key of a file. Raises InvalidArgument for a file without one."""
    from treadle.client import Fabric  # gRPC takes 100 ms that `--help` need not pay

    if api_key_file is None:
        return Fabric(engram=pool)
    keys = [line for line in read_limited(api_key_file, 1 << 16).decode().splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidArgument(f"{api_key_file} holds no key")
    return Fabric(engram=pool, key=keys[0].strip())

"""`treadle key`: makes keys for a gateway, and puts digests in place of keys in a file."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from treadle.contract.errors import InvalidArgument, NotFound

app = typer.Typer(name="key", help="Make keys for a gateway, and keep their digests in its key file.", no_args_is_help=True)
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
KeyFile = Annotated[Path, typer.Argument(help="The gateway's --api-key-file.")]
SHOWN_CHARACTERS = 9  # of a key, to tell it from others: of 256 random bits some 220 stay secret
PRIVATE = 0o600


@app.command()
def new(
    tenant: Annotated[str, typer.Option(help="Keys of one name share cached prefixes and a metric label.")] = "",
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="More are refused with 429.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Of prompts and answers together.")] = None,
    calls_max: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    priority: Annotated[str, typer.Option(help="high, normal or low, of requests that name none.")] = "",
    engram: Annotated[str, typer.Option(help="Memory of requests that choose none: NAME, NAME@VERSION or none.")] = "",
    file: Annotated[Path | None, typer.Option(help="Append the line to this key file; a gateway reads it within a second.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key, print it once, and print or append the line with its digest."""
    from inference_gateway.domain.key_options import CALLS, ENGRAM, PRIORITY, REQUESTS, TENANT, TOKENS, record_of
    from treadle.chassis.keys import hashed, key_digest, new_key

    key = new_key()
    given = {
        TENANT: tenant, REQUESTS: requests_per_minute, TOKENS: tokens_per_minute, CALLS: calls_max, PRIORITY: priority, ENGRAM: engram,
    }  # fmt: skip
    options = {name: str(value) for name, value in given.items() if value}
    record_of(key_digest(key), options)  # InvalidArgument says which option is wrong
    line = " ".join([hashed(key), *(f"{name}={value}" for name, value in options.items())])
    if file is not None:
        _append(file, f"# {key[:SHOWN_CHARACTERS]}… of {time.strftime('%Y-%m-%d')}\n{line}\n")
    if as_json:
        typer.echo(json.dumps({"key": key, "line": line, "file": None if file is None else str(file)}))
        return
    typer.echo(key)
    where = f"Appended to {file}:" if file is not None else "Append this line to the gateway's --api-key-file:"
    typer.echo(f"This key is shown once and kept nowhere. {where}\n{line}", err=True)


@app.command("hash")
def hash_file(file: KeyFile, as_json: AsJson = False) -> None:
    """Put digests in place of the keys in a file; whoever shows a key notices nothing."""
    from treadle.chassis.keys import hashed, is_hashed

    lines, count = _read(file).splitlines(), 0
    for number, text in enumerate(lines):
        key = text.split()[0] if text.split() else ""
        if key and not key.startswith("#") and not is_hashed(key):
            lines[number] = text.replace(key, hashed(key), 1)
            count += 1
    if count:
        _replace(file, "\n".join(lines) + "\n")
    typer.echo(json.dumps({"file": str(file), "hashed": count}) if as_json else f"{file}: {count} keys replaced by their digests")


def _append(path: Path, text: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, PRIVATE), "r+", encoding="utf-8") as file:
            before = file.read()
            file.write(("" if not before or before.endswith("\n") else "\n") + text)
    except OSError as error:
        raise InvalidArgument(f"cannot append to {path}: {error.strerror or error}") from error


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror or error}") from error


def _replace(path: Path, text: str) -> None:
    """Write a private file beside it and put it in its place: a gateway that reads meanwhile sees the one or the other."""
    try:
        target = path.resolve()
        before = target.stat()
        with tempfile.NamedTemporaryFile("w", dir=target.parent, prefix=f".{target.name}.", delete=False, encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, before.st_mode & 0o777)
        if os.geteuid() == 0:
            os.chown(file.name, before.st_uid, before.st_gid)
        os.replace(file.name, target)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror or error}") from error

"""What all commands of the pool share: how it is reached, and how a version of it is named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram_pool.commands.load_options import read_limited
from engram_pool.terminal import VERSION_DIGITS
from treadle.contract import AccessDenied, InvalidArgument, NotFound

if TYPE_CHECKING:
    from treadle.client import Fabric

Pool = Annotated[str, typer.Option("--pool", envvar="TREADLE_POOL", help="Address of the pool, host:port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="TREADLE_API_KEY_FILE", help="File whose first line is a key of the pool.")
]
TlsRoots = Annotated[
    Path | None,
    typer.Option("--tls-root-file", envvar="TREADLE_TLS_ROOT_FILE", help="PEM roots that vouch for the pool; none: no TLS."),
]
TlsClient = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-file",
        envvar="TREADLE_TLS_CLIENT_FILE",
        help="PEM file with certificate and key, for a pool that asks for them; with --tls-root-file.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[str, typer.Argument(help="Version, or its first digits; none: the current one.")]
DEFAULT_POOL = "127.0.0.1:7401"
FILE_BYTES_MAX = 1 << 20  # of keys, roots and certificates


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


@contextmanager
def fabric_of(pool: str, api_key_file: Path | None, tls_root_file: Path | None, tls_client_file: Path | None) -> Iterator[Fabric]:
    """The pool, with the first key of a file. Raises InvalidArgument and NotFound for files that do not fit, AccessDenied with the option to give."""
    from treadle.client import Fabric  # gRPC takes 100 ms that `--help` need not pay

    if tls_client_file is not None and tls_root_file is None:
        raise InvalidArgument("--tls-client-file is shown in TLS: give --tls-root-file FILE too")
    for file in (tls_root_file, tls_client_file):
        if file is not None:
            read_limited(file, FILE_BYTES_MAX)
    key = None if api_key_file is None else _first_key(api_key_file)
    fabric = Fabric(engram=pool, key=key, tls_root_file=tls_root_file, tls_cert_file=tls_client_file, tls_key_file=tls_client_file)
    try:
        with fabric:
            yield fabric
    except AccessDenied as error:
        if key is not None:
            raise
        raise AccessDenied(f"{pool} asks for a key: give --api-key-file FILE") from error


def _first_key(path: Path) -> str:
    lines = (line.strip() for line in read_limited(path, FILE_BYTES_MAX).decode().splitlines())
    for line in lines:
        if line and not line.startswith("#"):
            return line
    raise InvalidArgument(f"{path} holds no key")

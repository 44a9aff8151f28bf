"""What all commands of the store share: how it is reached, and how people write durations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from treadle.contract import AccessDenied, InvalidArgument, NotFound

if TYPE_CHECKING:
    from treadle.client.asm import AsmStore

Store = Annotated[str, typer.Option("--store", envvar="TREADLE_ASM_STORE", help="Address of the store, host:port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="TREADLE_API_KEY_FILE", help="File whose first line is a key of the store.")
]
TlsRoots = Annotated[
    Path | None,
    typer.Option("--tls-root-file", envvar="TREADLE_TLS_ROOT_FILE", help="PEM roots that vouch for the store; none: no TLS."),
]
TlsClient = Annotated[
    Path | None,
    typer.Option(
        "--tls-client-file",
        envvar="TREADLE_TLS_CLIENT_FILE",
        help="PEM file with certificate and key, for a store that asks for them; with --tls-root-file.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Which = Annotated[
    str, typer.Argument(metavar="NAME[@VERSION]", help="Name, and version or its first 8 digits or more; none: the current one.")
]
DEFAULT_STORE = "127.0.0.1:7402"
KEY_BYTES_MAX = 1 << 20
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@contextmanager
def store_at(store: str, api_key_file: Path | None, tls_root_file: Path | None, tls_client_file: Path | None) -> Iterator[AsmStore]:
    """The store, with the first key of a file.

    Raises InvalidArgument and NotFound for files that do not fit, AccessDenied with the option to give.
    """
    from treadle.client import Fabric  # gRPC takes 100 ms that `--help` need not pay

    if tls_client_file is not None and tls_root_file is None:
        raise InvalidArgument("--tls-client-file is shown in TLS: give --tls-root-file FILE too")
    for file in (tls_root_file, tls_client_file):
        if file is not None:
            _read(file)
    key = None if api_key_file is None else _first_key(api_key_file)
    with Fabric(
        asm=store, key=key, tls_root_file=tls_root_file, tls_cert_file=tls_client_file, tls_key_file=tls_client_file
    ) as fabric:
        try:
            yield fabric.asm
        except AccessDenied as error:
            if key is not None:
                raise
            raise AccessDenied(f"{store} asks for a key: give --api-key-file FILE") from error


def seconds_of(text: str) -> float:
    """A duration in people's words: 90s, 15m, 2h, 7d, or a number of seconds. Raises InvalidArgument."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise InvalidArgument(f"{text!r}: a duration expected, such as 90s, 15m, 2h or 7d")
    return float(match[1]) * _UNITS[match[2] or "s"]


def _first_key(path: Path) -> str:
    for line in _read(path).decode(errors="replace").splitlines():
        if line.strip() and not line.startswith("#"):
            return line.strip()
    raise InvalidArgument(f"{path} holds no key")


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > KEY_BYTES_MAX:
        raise InvalidArgument(f"{path} is larger than {KEY_BYTES_MAX} bytes")
    return data

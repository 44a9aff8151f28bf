"""`treadle pool ls`, `promote`, `rollback`, `verify`, `rm`: the versions that are there."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from engram_pool.commands.calling import (
    DEFAULT_POOL,
    Json,
    KeyFile,
    Name,
    Pool,
    TlsClient,
    TlsRoots,
    Version,
    fabric_of,
    full_version,
)
from engram_pool.terminal import (
    VERSION_DIGITS,
    model_document,
    model_line,
    print_json,
    print_line,
    print_promoted,
    print_table,
    progress_bar,
    size_text,
)
from treadle.contract import InvalidArgument


def promote(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version, or its first digits.")],
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Make a resident version current: new requests get it, those in progress keep theirs."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        if not version:
            raise InvalidArgument(
                f"give the version to make current, or its first digits; `treadle pool rollback {name}` goes back"
            )
        promoted = fabric.engram.promote(name, full_version(fabric, name, version))
    print_promoted(promoted, as_json)


def rollback(
    name: Name,
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Go back to the version that was current before; once more goes forward again."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        promoted = fabric.engram.promote(name)
    print_promoted(promoted, as_json)


def list_models(
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """List what is resident, the current version of each model first."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        models = fabric.engram.list_models()
    if as_json:
        print_json([model_document(model) for model in models])
        return
    columns = ("model", "version", "current", "layers", "size", "readers", "loaded")
    print_table(columns, [model_line(model) for model in models], empty="the pool holds no tables; `treadle pool load` brings some")


def verify(
    name: Name,
    version: Version = "",
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Read a version again and compare every checksum. A version that does not fit leaves service, and the exit code is 1."""
    begun = time.monotonic()
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric, progress_bar("verifying") as report:
        full = full_version(fabric, name, version)
        checked = fabric.engram.verify(name, full, report)
    seconds = time.monotonic() - begun
    if as_json:
        print_json({"model": name, "version": full, "bytes": checked, "seconds": round(seconds, 3), "intact": True})
    else:
        print_line(f"{name} {full[:VERSION_DIGITS]}: {size_text(checked)} intact, {seconds:.1f} s")


def remove(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version, or its first digits; none: all of them.")] = "",
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Take a version, or all of a model, off the list. Its memory goes when no reader holds it."""
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric:
        full = full_version(fabric, name, version) if version else None
        removed, awaiting = fabric.engram.remove(name, full)
    if as_json:
        print_json({"model": name, "removed": removed, "awaiting_readers": awaiting})
        return
    held = f"; {awaiting} still in memory until readers let go" if awaiting else ""
    print_line(f"{name}: removed {', '.join(version[:VERSION_DIGITS] for version in removed)}{held}")

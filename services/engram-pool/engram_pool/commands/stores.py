"""`treadle pool push` and `pull`: versions in a Mooncake Store."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import typer

from engram_pool.commands.calling import DEFAULT_POOL, Json, KeyFile, Pool, TlsClient, TlsRoots, fabric_of, full_version
from engram_pool.commands.load_turn import in_turn
from engram_pool.terminal import print_loaded, print_pushed, progress_bar
from treadle.contract import InvalidArgument

StoredName = Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Name of the model, and version.")]
Store = Annotated[str, typer.Option("--store", envvar="TREADLE_STORE", help="Master of the Mooncake Store, host:port.")]
StoreProtocol = Annotated[str, typer.Option("--protocol", help="What the bytes move by: tcp or rdma.")]


def push(
    name: StoredName, store: Store, replicas: Annotated[int, typer.Option(min=1, help="Store nodes that keep each object.")] = 2,
    part_mib: Annotated[int, typer.Option(min=64, max=1024, help="Size of an object, MiB; a multiple of 4.")] = 64,
    replace: Annotated[bool, typer.Option("--replace", help="Remove objects that are there already.")] = False,
    protocol: StoreProtocol = "tcp", pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, tls_root_file: TlsRoots = None, tls_client_file: TlsClient = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Push a version of this host's pool into a Mooncake Store, pinned, and read all of it back. Needs Mooncake here."""
    from treadle.client.engram.mooncake_push import PushOptions

    begun, (model, digits) = time.monotonic(), _name_and_digits(name)
    options = PushOptions(replicas, part_mib << 20, replace)
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric, progress_bar("pushing") as report:
        full = full_version(fabric, model, digits)
        pushed = fabric.engram.push_store(store, model, full, options=options, protocol=protocol, progress=report)
    print_pushed(pushed, store, time.monotonic() - begun, as_json)


def pull(
    name: StoredName, store: Store, protocol: StoreProtocol = "tcp",
    keep_previous: Annotated[bool, typer.Option(help="Keep the version that is current now.")] = True,
    pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, tls_root_file: TlsRoots = None, tls_client_file: TlsClient = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Have the pool load a version from a Mooncake Store, checksums and version compared; without a version, what was pushed last."""
    model, version = _name_and_digits(name)
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric, progress_bar("pulling") as report:
        ask = partial(fabric.engram.load_store, store, model, version or None, protocol=protocol)
        loaded, seconds = in_turn(partial(ask, keep_previous=keep_previous, progress=report))
    print_loaded(loaded, seconds, as_json)


def _name_and_digits(text: str) -> tuple[str, str]:
    """NAME or NAME@VERSION as its parts. Raises InvalidArgument."""
    name, at, digits = text.partition("@")
    if not name or (at and not digits):
        raise InvalidArgument(f"NAME or NAME@VERSION, got {text!r}")
    return name, digits

"""`treadle asm ls`, `promote`, `pin`, `unpin`, `extend`, `rm`, `status`: what a store keeps, and what its names mean."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from asm_store.commands.calling import DEFAULT_STORE, Json, KeyFile, Store, TlsClient, TlsRoots, Which, seconds_of, store_at
from asm_store.commands.terminal import (
    STORED_COLUMNS,
    VERSION_DIGITS,
    print_json,
    print_line,
    print_table,
    size_text,
    stored_document,
    stored_line,
    time_text,
)
from treadle.contract import InvalidArgument

if TYPE_CHECKING:
    from treadle.client.asm import Deleted

PIN_TTL = "1d"


def list_dictionaries(
    name: Annotated[str, typer.Argument(help="Only of this name; none: all.")] = "",
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """List what is kept, the current version of each name first."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        kept = asm.list(name)
    if as_json:
        print_json([stored_document(stored) for stored in kept])
        return
    empty = "the store keeps no dictionary" + (f" of the name {name}" if name else "; `treadle asm publish FOLDER` brings one")
    print_table(STORED_COLUMNS, [stored_line(stored) for stored in kept], empty=empty)


def promote(
    which: Which,
    expected: Annotated[
        str | None, typer.Option(help="Version that must be current now, all digits, '' for none; else nothing is done.")
    ] = None,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Make a version current: new requests get it, those in progress keep theirs."""
    if "@" not in which:
        raise InvalidArgument(f"give the version to make current: {which}@VERSION; `treadle asm ls {which}` lists them")
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        pointer = asm.promote(which, expected)
    if as_json:
        print_json(asdict(pointer))
    else:
        print_line(f"{pointer.name}: {pointer.version[:VERSION_DIGITS]} is current now (change {pointer.revision} of this name)")


def pin(
    which: Which,
    ttl: Annotated[str, typer.Option(help="For how long: 90s, 15m, 2h, 7d.")] = PIN_TTL,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Keep a version from eviction for a while, whoever uses it."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        until = asm.pin(which, seconds_of(ttl))
    if as_json:
        print_json({"dictionary": which, "pinned_until_seconds": until})
    else:
        print_line(f"{which}: kept until {time_text(until)}, and longer while it is current or in use")


def unpin(
    which: Which,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """End a pin."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        asm.unpin(which)
    if as_json:
        print_json({"dictionary": which, "pinned_until_seconds": 0.0})
    else:
        print_line(f"{which}: pinned no more")


def extend(
    which: Which,
    chunk: Annotated[
        str,
        typer.Argument(
            metavar="CHUNK@VERSION",
            help="Dictionary of the further chunk, published before, built with --extend-from the version that it extends.",
        ),
    ],
    promote: Annotated[
        bool, typer.Option(help="Make the new version current, if the name still means the one that is extended.")
    ] = False,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Merge the dictionary of a further chunk of the prefix into a version; makes a new version, and leaves both as they are."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        stored = asm.extend(which, chunk, promote=promote)
    if as_json:
        print_json(stored_document(stored))
        return
    tokens = stored.dictionary.prefix.tokens
    print_line(f"{stored.name} {stored.version[:VERSION_DIGITS]}: stands for {tokens:,} tokens, {size_text(stored.file_bytes)}")
    if not stored.current:
        print_line(f"treadle asm promote {stored.name}@{stored.version[:VERSION_DIGITS]} makes it current")


def remove(
    which: Annotated[
        str, typer.Argument(metavar="NAME[@VERSION]", help="Name, and version or its first digits; none: ALL versions of the name.")
    ],
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Delete a version, or all of a name, every copy, and print what is gone. Exit code 1 while a replica has not answered."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        deleted = asm.delete(which)
    if as_json:
        print_json({
            "files": [asdict(file) for file in deleted.files], "pending_replicas": list(deleted.pending_replicas),
        })  # fmt: skip
    else:
        _print_proof(which, deleted)
    if deleted.pending_replicas:
        raise typer.Exit(1)


def status(
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Show how the store is doing."""
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
        now = asm.status()
    if as_json:
        print_json(asdict(now))
        return
    others = f", knows {', '.join(now.replicas)}" if now.replicas else ""
    print_line(
        f"asm-store {now.build_version} (protocol {now.proto_version}), pid {now.pid}, replica {now.replica or 'alone'}{others}"
    )
    room = f"{size_text(now.file_bytes)} of {size_text(now.file_bytes_max)}"
    print_line(f"{now.versions} versions, {room}; {now.lookups:,} lookups, {now.evictions:,} evictions since it started")
    for tenant, kept in sorted(now.tenant_bytes.items()):
        print_line(f"tenant {tenant or '(none)'}: {size_text(kept)}")
    if now.draining:
        print_line("it is draining: new work is refused")


def _print_proof(which: str, deleted: Deleted) -> None:
    lines = [
        (file.ref.name, file.ref.version[:VERSION_DIGITS], file.replica, file.path, f"{file.bytes:,}",
         "yes" if file.freed else "when its readers let go")
        for file in deleted.files
    ]  # fmt: skip
    print_table(("name", "version", "replica", "path", "bytes", "freed"), lines, empty=f"{which}: no file was left to delete")
    if deleted.pending_replicas:
        print_line(
            f"did not answer, and delete it when they next hear of it: {', '.join(deleted.pending_replicas)}; until then a copy may be there"
        )
    else:
        print_line(f"{which}: every copy is gone")

"""`treadle asm publish` and `get`: a dictionary's folder into a store, and out of one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from asm_store.commands.calling import DEFAULT_STORE, Json, KeyFile, Store, TlsClient, TlsRoots, Which, store_at
from asm_store.commands.terminal import VERSION_DIGITS, print_json, print_line, progress_bar, size_text, stored_document
from treadle.contract.dictionary_file import read_manifest


def publish(
    folder: Annotated[Path, typer.Argument(help="Folder that `treadle asm build` wrote.", show_default=False)],
    promote: Annotated[
        bool | None,
        typer.Option(
            help="Make it what its name means at once: new requests get it. Else `treadle asm promote` does. Default: unless it is of a further chunk.",
            show_default=False,
        ),
    ] = None,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Bring a dictionary to a store, where workers find it. It is there whole, every checksum compared, or not at all."""
    begun = time.monotonic()
    promote = not read_manifest(folder).prefix.first if promote is None else promote
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm, progress_bar() as report:
        published = asm.publish(folder, promote=promote, progress=report)
    stored, seconds = published.stored, time.monotonic() - begun
    if as_json:
        print_json(
            stored_document(stored)
            | {"existed": published.existed, "card_taken": published.card_taken, "seconds": round(seconds, 3)}
        )
        return
    brought = "was there already" if published.existed else f"{size_text(stored.file_bytes)} in {seconds:.1f} s"
    print_line(f"{stored.name} {stored.version[:VERSION_DIGITS]}: {brought}")
    if not published.card_taken:
        print_line(
            "its card was not taken: the version keeps the one that it came with; delete the version to publish it with another"
        )
    if first := stored.dictionary.prefix.first:
        print_line(
            f"it is of a further chunk: treadle asm extend NAME {stored.name}@{stored.version[:VERSION_DIGITS]} adds it to what it was built for, "
            f"the {first:,} tokens before it"
        )
    elif stored.current:
        print_line(
            f'it is current: requests choose it by "treadle": {{"prefix": "{stored.name}"}}, people by treadle chat --prefix {stored.name}'
        )
    else:
        print_line(f"treadle asm promote {stored.name}@{stored.version[:VERSION_DIGITS]} makes it current")


def get(
    which: Which,
    folder: Annotated[Path, typer.Argument(help="New or empty folder.", show_default=False)],
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Bring a dictionary out of a store into a folder, every digest compared."""
    begun = time.monotonic()
    with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm, progress_bar() as report:
        stored = asm.get(which, folder, progress=report)
    seconds = time.monotonic() - begun
    if as_json:
        print_json(stored_document(stored) | {"folder": str(folder.absolute()), "seconds": round(seconds, 3)})
    else:
        print_line(f"{stored.name} {stored.version[:VERSION_DIGITS]}: {size_text(stored.file_bytes)} in {folder}, {seconds:.1f} s")

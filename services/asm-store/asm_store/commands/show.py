"""`treadle asm show`: what a dictionary is, in a folder or a store, what it costs beside the prefix's KV, and how well it fits. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asm_store.building.card import builders_card, read_card, sizes
from asm_store.building.card_reading import CardRead
from asm_store.commands.building import say
from asm_store.commands.calling import DEFAULT_STORE, Json, KeyFile, Store, TlsClient, TlsRoots, store_at
from asm_store.commands.terminal import VERSION_DIGITS, print_json, print_table, size_text
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, read_manifest
from treadle.contract.errors import AccessDenied, InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from treadle.client.asm import StoredDictionary

UNKNOWN, UNKNOWN_MAX = "unknown", 5  # fields of a card that are named
PARTS_MAX = 2  # of a version that a store extended
What = Annotated[
    str,
    typer.Argument(
        metavar="FOLDER|NAME[@VERSION]",
        help="Folder of a dictionary, or one that a store keeps: name, and version or its first 8 digits or more.",
        show_default=False,
    ),
]


def show(
    what: What,
    store: Store = DEFAULT_STORE,
    api_key_file: KeyFile = None,
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Show what a dictionary was made of and with, its sizes, and what calibration says of its fit."""
    folder = Path(what)
    if folder.is_dir() or "/" in what:
        if "/" not in what and what.strip("."):
            say(
                f"this is the folder ./{what}; what a store keeps under that name: treadle asm show {what.partition('@')[0]}@VERSION"
            )
        dictionary, card = read_manifest(folder), read_card(folder)
        kept = folder / PREFIX_KV_FILE
        prefix_kv_bytes = kept.stat().st_size if kept.is_file() else 0
    else:
        stored = _find(what, store, api_key_file, tls_root_file, tls_client_file)
        dictionary, prefix_kv_bytes = stored.dictionary, None
        card = builders_card(stored.card)
    if as_json:
        print_json(_document(dictionary, card) | ({} if prefix_kv_bytes is None else {"prefix_kv_file_bytes": prefix_kv_bytes}))
    else:
        print_card(dictionary, card)


def _find(
    what: str, store: str, api_key_file: Path | None, tls_root_file: Path | None, tls_client_file: Path | None
) -> StoredDictionary:
    """Of the store. Whoever meant a folder hears that there is none, before what the store says."""
    try:
        with store_at(store, api_key_file, tls_root_file, tls_client_file) as asm:
            return asm.find(what)
    except (NotFound, InvalidArgument, AccessDenied, Unavailable) as error:
        raise type(error)(f"there is no folder {what!r} here, nor could the store {store} show it: {error}") from error


def _document(dictionary: Dictionary, card: Mapping[str, Any]) -> dict[str, Any]:
    manifest = dictionary.to_manifest()
    document: dict[str, Any] = {"name": dictionary.name, "version": dictionary.version, "layers": list(dictionary.layers)}
    return document | {"settings": manifest["settings"], "prefix": manifest["prefix"], "sizes": sizes(dictionary), "card": card}


def print_card(dictionary: Dictionary, card: Mapping[str, Any]) -> None:
    """A dictionary for people: what it is, then a line for each layer."""
    read = CardRead.of(card, dictionary.layers)
    print_table(("", " "), _lines(dictionary, read), empty="")
    print_table(
        ("layer", "median cosine", "1 % cosine"),
        [(str(layer), _figure(median), _figure(percent1)) for layer, median, percent1 in read.fit],
        empty="its card says nothing of its fit" if card else "no card beside it: nothing is known of its fit",
    )


def _lines(dictionary: Dictionary, card: CardRead) -> list[tuple[str, str]]:
    settings, model, calibration, size = dictionary.settings, dictionary.model, dictionary.calibration, sizes(dictionary)
    whitened, lists = ", whitened" if settings.whitened else "", f", {settings.lists} lists" if settings.lists else ""
    made_for = card.model or model.digest[:VERSION_DIGITS]
    chunks = f" in {len(dictionary.prefix.chunks)} chunks ({settings.chunk_merge})" if len(dictionary.prefix.chunks) > 1 else ""
    behind = f" behind {dictionary.prefix.first:,}, a further chunk" if dictionary.prefix.first else ""
    lines = [
        ("dictionary", f"{dictionary.name} {dictionary.version[:VERSION_DIGITS]}, for {made_for}"),
        ("prefix", f"{dictionary.prefix.tokens:,} tokens{behind}{chunks}" + (f"; {card.source}" if card.source else "")),
        ("calibration", f"{calibration.traces:,} traces, {calibration.tokens:,} tokens{_held_out(card)}"),
        ("entries", f"{_entries(dictionary)}{lists}"),
        ("keys", f"{settings.key}{whitened}, {dictionary.entry_heads} heads joined, {dictionary.lookups} lookups a token and codebook"),
        ("states", f"{settings.aggregation}, {settings.dtype}"),
        ("matched keys", f"{settings.matched_keys:,} of each key/value head" if settings.matched_keys else "none"),
        ("storage", f"{size_text(size['storage_bytes'])}: {size['storage_share']:.0%} of the prefix KV in bf16 ({size_text(size['prefix_kv_bytes'])})"),
        ("traffic", f"{size_text(size['read_bytes'])} a step: {size['read_share']:.0%} of it"),
        ("prefix KV", "kept beside it" if dictionary.prefix_kv else "not kept"),
    ]  # fmt: skip
    if card.parts:
        lines.append(("put together", f"of {', '.join(part[:VERSION_DIGITS] for part in card.parts[:PARTS_MAX])}"))
    for of in card.fidelity:
        tokens = UNKNOWN if of.tokens is None else f"{of.tokens:,}"
        lines.append(
            (f"with {of.name}", f"agreement {_figure(of.agreement)}, KL {_figure(of.kl)} nats a token (held out, {tokens} tokens)")
        )
    if card.fit_on:
        lines.append(("fit", f"on {card.fit_on}"))
    if card.unknown:
        more = f" and {len(card.unknown) - UNKNOWN_MAX} more" if len(card.unknown) > UNKNOWN_MAX else ""
        lines.append(("card", f"not as a builder writes it: {', '.join(card.unknown[:UNKNOWN_MAX])}{more}"))
    return lines


def _held_out(card: CardRead) -> str:
    wrote = ", written by the model itself" if card.written_by_the_model else ""
    return f"{wrote}; {card.held_out_traces:,} traces held out" if card.held_out_traces else wrote


def _figure(number: float | None) -> str:
    return UNKNOWN if number is None else f"{number:.3f}"


def _entries(dictionary: Dictionary) -> str:
    count, layers, of = f"{dictionary.settings.entries:,}", len(dictionary.layers), dictionary.model.layers
    each = f"{count} a layer" if dictionary.codebooks == 1 else f"{count} a codebook, {dictionary.codebooks} codebooks a layer"
    return f"{each}, in {f'all {of}' if layers == of else f'{layers} of {of}'} layers"

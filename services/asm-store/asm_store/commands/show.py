"""`treadle asm show`: what a dictionary is, in a folder or a store, what it costs beside the prefix's KV, and how well it fits. Loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asm_store.building.card import CARD_SCHEMA, read_card, sizes
from asm_store.commands.calling import DEFAULT_STORE, Json, KeyFile, Store, TlsClient, TlsRoots, store_at
from asm_store.commands.terminal import VERSION_DIGITS, print_json, print_table, size_text
from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import PREFIX_KV_FILE, read_manifest
from treadle.contract.errors import AccessDenied, InvalidArgument, NotFound, Unavailable

if TYPE_CHECKING:
    from treadle.client.asm import StoredDictionary

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
        dictionary, card = read_manifest(folder), read_card(folder)
        kept = folder / PREFIX_KV_FILE
        prefix_kv_bytes = kept.stat().st_size if kept.is_file() else 0
    else:
        stored = _find(what, store, api_key_file, tls_root_file, tls_client_file)
        dictionary, prefix_kv_bytes = stored.dictionary, None
        card = stored.card if stored.card.get("schema") == CARD_SCHEMA else {}
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
    print_table(("", " "), _lines(dictionary, card), empty="")
    fit = card.get("fit", {})
    print_table(
        ("layer", "median cosine", "1 % cosine"),
        [(layer, f"{of['median']:.3f}", f"{of['percent1']:.3f}") for layer, of in fit.items()],
        empty="no card beside it: nothing is known of its fit",
    )


def _lines(dictionary: Dictionary, card: Mapping[str, Any]) -> list[tuple[str, str]]:
    settings, model, calibration, size = dictionary.settings, dictionary.model, dictionary.calibration, sizes(dictionary)
    whitened, lists = ", whitened" if settings.whitened else "", f", {settings.lists} lists" if settings.lists else ""
    made_for = card.get("model", {}).get("name") or model.digest[:VERSION_DIGITS]
    chunks = f" in {len(dictionary.prefix.chunks)} chunks ({settings.chunk_merge})" if len(dictionary.prefix.chunks) > 1 else ""
    behind = f" behind {dictionary.prefix.first:,}, a further chunk" if dictionary.prefix.first else ""
    lines = [
        ("dictionary", f"{dictionary.name} {dictionary.version[:VERSION_DIGITS]}, for {made_for}"),
        ("prefix", f"{dictionary.prefix.tokens:,} tokens{behind}{chunks}" + (f"; {card['source']}" if card.get("source") else "")),
        ("calibration", f"{calibration.traces:,} traces, {calibration.tokens:,} tokens{_held_out(card)}"),
        ("entries", f"{settings.entries:,} in {_of(dictionary.codebooks, 'codebook')} of {len(dictionary.layers)} of {model.layers} layers{lists}"),
        ("keys", f"{settings.key}{whitened}, {dictionary.entry_heads} heads joined, {dictionary.lookups} lookups a token and codebook"),
        ("states", f"{settings.aggregation}, {settings.dtype}"),
        ("matched keys", f"{settings.matched_keys:,} of each key/value head" if settings.matched_keys else "none"),
        ("storage", f"{size_text(size['storage_bytes'])}: {size['storage_share']:.0%} of the prefix KV in bf16 ({size_text(size['prefix_kv_bytes'])})"),
        ("traffic", f"{size_text(size['read_bytes'])} a step: {size['read_share']:.0%} of it"),
        ("prefix KV", "kept beside it" if dictionary.prefix_kv else "not kept"),
    ]  # fmt: skip
    for name, figures in (card.get("fidelity") or {}).items():
        lines.append(
            (
                f"with {name}",
                f"agreement {figures['agreement']:.3f}, KL {figures['kl']:.3f} nats a token (held out, {figures['tokens']:,} tokens)",
            )
        )
    return [*lines, ("fit", f"on {card['fit_on']}")] if "fit_on" in card else lines


def _held_out(card: Mapping[str, Any]) -> str:
    calibration = card.get("calibration", {})
    wrote = ", written by the model itself" if calibration.get("written_by_the_model") else ""
    return f"{wrote}; {calibration['held_out_traces']} traces held out" if calibration.get("held_out_traces") else wrote


def _of(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("s" if count > 1 else "")

"""What `treadle asm` prints: progress on standard error, tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from treadle.client.asm import Progress, StoredDictionary

VERSION_DIGITS = 12  # of a version, in tables: enough to tell any two apart
WIDTH_IN_FILES = 120  # characters, where there is no terminal to ask
RIGHT = frozenset({"tokens", "entries", "size", "readers", "bytes"})  # columns of numbers
FOLDING = frozenset({"name", "path"})  # columns that take several lines where the width is short


@contextmanager
def progress_bar() -> Iterator[Callable[[Progress], None]]:
    """A bar with rate and time left on standard error; nothing where that is no terminal."""
    from rich import progress as rich
    from rich.console import Console

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(), rich.DownloadColumn(),
        rich.TransferSpeedColumn(), rich.TimeRemainingColumn(),
    )  # fmt: skip
    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda now: bar.update(task, completed=now.bytes_done, total=now.bytes_total, description=now.step)


def print_table(columns: Sequence[str], lines: Sequence[Sequence[str]], *, empty: str) -> None:
    """A table on standard output; `empty` where it has no lines. Names and paths fold, nothing is cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not lines:
        print_line(empty)
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in RIGHT else "left", no_wrap=column not in FOLDING, overflow="fold"
        )  # fmt: skip
    for line in lines:
        table.add_row(*map(Text, line))
    shown = Console(highlight=False)
    Console(highlight=False, width=shown.width if shown.is_terminal else WIDTH_IN_FILES).print(table)


def print_line(text: str) -> None:
    """One line on standard output."""
    typer.echo(text)


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    typer.echo(json.dumps(document, indent=2))


def size_text(byte_count: float) -> str:
    """Bytes for people, in powers of 1000."""
    size, unit = float(byte_count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def stored_document(stored: StoredDictionary) -> dict[str, Any]:
    """A version as JSON values."""
    dictionary = stored.dictionary
    return {
        "name": stored.name, "version": stored.version, "current": stored.current, "file_bytes": stored.file_bytes,
        "prefix_tokens": dictionary.prefix.tokens, "layers": len(dictionary.layers), "entries": dictionary.settings.entries,
        "key": str(dictionary.settings.key), "dtype": str(dictionary.settings.dtype), "prefix_kv": dictionary.prefix_kv is not None,
        "model": dictionary.model.digest, "published_at_seconds": stored.published_at_seconds,
        "used_at_seconds": stored.used_at_seconds, "pinned_until_seconds": stored.pinned_until_seconds,
        "readers": stored.readers, "tenant": stored.tenant, "card": stored.card,
    }  # fmt: skip


STORED_COLUMNS = ("name", "version", "current", "tokens", "layers", "entries", "size", "readers", "used", "pinned")


def stored_line(stored: StoredDictionary) -> tuple[str, ...]:
    """A version as cells of a table, under STORED_COLUMNS."""
    dictionary = stored.dictionary
    return (
        stored.name, stored.version[:VERSION_DIGITS], "yes" if stored.current else "", f"{dictionary.prefix.tokens:,}",
        f"{len(dictionary.layers)} of {dictionary.model.layers}", f"{dictionary.settings.entries:,} {dictionary.settings.dtype}",
        size_text(stored.file_bytes), str(stored.readers), time_text(stored.used_at_seconds),
        f"until {time_text(stored.pinned_until_seconds)}" if stored.pinned_until_seconds > time.time() else "",
    )  # fmt: skip


def time_text(seconds: float) -> str:
    """A moment for people, of this machine's clock."""
    return time.strftime("%m-%d %H:%M", time.localtime(seconds)) if seconds else "never"

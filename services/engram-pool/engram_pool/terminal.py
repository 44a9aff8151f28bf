"""What `treadle pool` prints: progress on standard error, tables for people, one JSON document for programs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from treadle.contract import InvalidArgument

if TYPE_CHECKING:
    from treadle.client.engram.mooncake_push import Pushed
    from treadle.client.engram.pool_types import Progress, Promoted, ResidentModel, TenantStatus
    from treadle.contract.owners import Owner

WIDTH_IN_FILES = 120  # characters, where there is no terminal to ask
VERSION_DIGITS = 12  # of a version, in tables: enough to tell any two apart
FOLDING = ("model", "memory", "layers")  # columns that take several lines where the width is short; others keep theirs
FOLDED_WIDTH_MIN = 8  # characters of a folded cell in a line
GAP_WIDTH = 3  # characters between two columns


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[Progress], None]]:
    """A bar with rate and time left on standard error; nothing where that is no terminal."""
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.TaskProgressColumn(), rich.DownloadColumn(),
        rich.TransferSpeedColumn(), rich.TimeRemainingColumn(),
    )  # fmt: skip
    from rich.console import Console

    console = Console(stderr=True)
    with rich.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda now: bar.update(task, completed=now.bytes_done, total=now.bytes_total, description=f"{what} {now.step}")


def print_loaded(loaded: ResidentModel, seconds: float, as_json: bool) -> None:
    """What a load made, and how fast."""
    rate = loaded.segment_bytes / max(seconds, 1e-9)
    if as_json:
        print_json(model_document(loaded) | {"seconds": round(seconds, 3), "bytes_per_second": round(rate)})
    else:
        print_line(
            f"{loaded.model.name} {loaded.version[:VERSION_DIGITS]}: {size_text(loaded.segment_bytes)} in {seconds:.1f} s "
            f"({size_text(rate)}/s)"
        )


def print_promoted(promoted: Promoted, as_json: bool) -> None:
    """What is current now, and what was."""
    now, before = promoted.now, promoted.previous_version
    if as_json:
        print_json(model_document(now) | {"previous_version": before})
    elif now.version == before:
        print_line(f"{now.model.name}: {now.version[:VERSION_DIGITS]} is current already")
    else:
        print_line(
            f"{now.model.name}: {now.version[:VERSION_DIGITS]} is current now; {before[:VERSION_DIGITS] or 'no version'} was before"
        )


def print_pushed(pushed: Pushed, store: str, seconds: float, as_json: bool) -> None:
    """What a push left in the store."""
    if as_json:
        print_json({
            "model": pushed.model, "version": pushed.version, "store": store, "bytes": pushed.bytes, "objects": pushed.objects,
            "replicas": pushed.replicas, "seconds": round(seconds, 3),
        })  # fmt: skip
    else:
        print_line(
            f"{pushed.model} {pushed.version[:VERSION_DIGITS]}: {size_text(pushed.bytes)} in {pushed.objects} objects, "
            f"{pushed.replicas} replicas each, read back, {seconds:.1f} s"
        )


def model_document(model: ResidentModel) -> dict[str, Any]:
    """A version as JSON values."""
    return {
        "model": model.model.name, "version": model.version, "current": model.current, "family": str(model.model.family),
        "layers": list(model.model.layers), "row_bytes": model.model.row.bytes,
        "rows": {str(layer): table.rows for layer, table in model.model.tables}, "segment_bytes": model.segment_bytes,
        "readers": model.readers, "loaded_at_seconds": model.loaded_at_seconds,
    }  # fmt: skip


def owner_document(owner: Owner) -> dict[str, Any]:
    """An owner as JSON values."""
    return {
        "owner": owner.name, "endpoint": owner.endpoint, "state": _state(owner), "epoch": owner.epoch,
        "doors": [{"transport": door.transport, "address": door.address} for door in owner.doors],
        "holdings": [
            {"model": held.model, "version": held.version, "rows": held.rows, "layers": {
                str(layer): held.ranges(layer).tolist() for layer in held.held
            }}
            for held in owner.holdings
        ],
    }  # fmt: skip


def owner_line(owner: Owner) -> tuple[str, ...]:
    """An owner as cells of a table."""
    doors = ", ".join(f"{door.transport} {door.address}" for door in owner.doors)
    rows = f"{sum(held.rows for held in owner.holdings):,}"
    return owner.name, owner.endpoint, doors, _state(owner), str(len(owner.holdings)), rows


def _state(owner: Owner) -> str:
    return "unreachable" if not owner.reachable else "leaving" if owner.leaving else "up"


def model_line(model: ResidentModel) -> tuple[str, ...]:
    """A version as cells of a table."""
    loaded = time.strftime("%m-%d %H:%M", time.localtime(model.loaded_at_seconds))
    return (
        model.model.name, model.version[:VERSION_DIGITS], "yes" if model.current else "", ", ".join(map(str, model.model.layers)),
        size_text(model.segment_bytes), str(model.readers), loaded,
    )  # fmt: skip


def print_table(columns: tuple[str, ...], lines: Sequence[tuple[str, ...]], *, empty: str) -> None:
    """A table on standard output; `empty` where it has no lines. Under a heading, names fold and nothing is cut."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    if not lines:
        print_line(empty)
        return
    table = Table(box=box.SIMPLE_HEAD if any(columns) else None, show_header=any(columns), pad_edge=False)
    least = [_least_width(column, [line[place] for line in lines]) for place, column in enumerate(columns)]
    for column, width in zip(columns, least, strict=True):
        table.add_column(
            column, justify="right" if column in ("size", "readers") else "left", no_wrap=column not in FOLDING, overflow="fold",
            min_width=width,
        )  # fmt: skip
    for line in lines:
        table.add_row(*line)
    shown = Console(highlight=False)
    width = shown.width if shown.is_terminal else WIDTH_IN_FILES
    Console(highlight=False, width=max(width, sum(least) + GAP_WIDTH * len(columns))).print(table)


def _least_width(column: str, cells: Sequence[str]) -> int:
    """Characters that a column needs; 0 without a heading."""
    needed = max(map(len, (column, *cells))) if column else 0
    return min(needed, FOLDED_WIDTH_MIN) if column in FOLDING else needed


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


def bytes_of(text: str) -> int:
    """Bytes in people's words, as `size_text` writes them: 2G, 500 MB, 1e9. Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?)b?", text.strip().lower())
    try:
        if match is not None:
            return round(float(match[1]) * 1000.0 ** " kmgt".index(match[2] or " "))
    except (ValueError, OverflowError):
        pass
    raise InvalidArgument(f"{text!r}: bytes expected, such as 2G, 500 MB or 1000000")


def tenant_line(tenant: TenantStatus) -> tuple[str, ...]:
    """How a tenant stands, for a table."""
    most = str(tenant.rows_per_second_max or "")
    return (tenant.name, str(tenant.rows_total), str(tenant.refused_total), str(tenant.late_total), most)

"""Figures of the demo as tables: what each Engram layer did, and tokens/s with and without.

Owns layout for 80 columns. Does not measure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from treadle.inference.v1.worker_pb2 import StatusResponse

ROUNDS_MIN = 8  # an interval of fewer rounds would be no more than their range: their number is told instead
NAMES = {"local": "Engram, local", "mapped": "Engram, mapped", "rpc": "Engram, rpc"}


def engram_figures(status: StatusResponse) -> dict[str, Any]:
    """A worker's Engram counters as plain values; seconds and bytes."""
    names = (
        "layer", "tickets", "tickets_in_time", "gather_seconds_p50", "gather_seconds_p99", "slack_seconds_p50", "slack_seconds_p01",
        "stall_seconds", "row_bytes", "rows_missing",
    )  # fmt: skip
    layers = [{name: getattr(layer, name) for name in names} for layer in status.engram_layers]
    for layer in layers:
        layer["stall_share"] = layer["stall_seconds"] / status.step_seconds if status.step_seconds else 0.0
    return {
        "model": status.engram_model, "version": status.engram_version, "transport": status.engram_transport,
        "fused": status.engram_fused, "steps": status.steps, "step_seconds": status.step_seconds, "layers": layers,
    }  # fmt: skip


def engram_table(figures: dict[str, Any]) -> Table:
    """One column for each layer."""
    from rich import box
    from rich.table import Table

    title = f"Engram {figures['model']} by {figures['transport']}: {figures['steps']} steps, {figures['step_seconds']:.1f} s"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    layers = figures["layers"]
    for layer in layers:
        table.add_column(f"layer {layer['layer']}", justify="right")
    rows = {
        "gather p50 / p99": [f"{_time(x['gather_seconds_p50'])} / {_time(x['gather_seconds_p99'])}" for x in layers],
        "slack p50 / p01": [f"{_time(x['slack_seconds_p50'])} / {_time(x['slack_seconds_p01'])}" for x in layers],
        "tickets": [f"{x['tickets']:,}" for x in layers],
        "in time": [f"{x['tickets_in_time'] / max(1, x['tickets']):.2%}" for x in layers],
        "stall, share of step time": [f"{x['stall_share']:.3%}" for x in layers],
        "rows read": [f"{x['row_bytes'] / 2**20:.2f} MiB" for x in layers],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def fusion_words(figures: dict[str, Any]) -> str:
    """What the rows are and what became of them: a reader must not take the answers for the work of the rows."""
    if figures["fused"]:
        return (
            "The rows are random (no public weights exist for this model) and fusion is on: they change the answers, for the worse."
        )
    return (
        "The rows are random (no public weights exist for this model) and the fusion is shadowed: hashed, prefetched, gathered, "
        "gated and computed, but nothing is added to the answers. --engram-fusion on adds it."
    )


def bench_table(document: dict[str, Any]) -> Table:
    """Measurements in the bench format: a column for each variant, a line for each setting of the parameters that differ.

    Rows in another unit than the first (what lies behind the figures, not the figures) stay in the JSON document.
    """
    from rich import box
    from rich.table import Table

    rows = [row for row in document["rows"] if row["unit"] == document["rows"][0]["unit"]]
    varying = _varying(rows)
    variants = list(dict.fromkeys(row["name"] for row in rows))
    spread = "rounds" if any(map(_few_rounds, rows)) else "its 95 % interval"
    title = f"{rows[0]['unit']} on {document.get('machine', {}).get('cpu', 'this machine')}: median, ratio, {spread}"
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for variant in variants:
        table.add_column(NAMES.get(variant, variant), justify="right")
    settings: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {tuple(_param(row, name) for name in varying): {} for row in rows}
    for row in rows:
        settings[tuple(_param(row, name) for name in varying)][row["name"]] = row
    for setting, measured in settings.items():
        label = "\n".join(value if name == "phase" else f"{name} {value}" for name, value in zip(varying, setting, strict=True))
        table.add_row(label, *(_cell(measured.get(variant)) for variant in variants))
    return table


def bench_goals(document: dict[str, Any]) -> list[str]:
    """The goals that the bench holds its figures against, one line each.

    A quick run is an impression: of its goals only the stall share, which counts every step, is held against anything.
    """
    quick = bool(document.get("quick"))
    lines = ["a quick run is an impression: `treadle bench chat` measures speed against its goals"] if quick else []
    return lines + [
        f"{'met' if goal['met'] else 'missed'}: {goal['text']} ({goal['value']:.4g}, goal {goal['limit']:g})"
        for goal in document.get("goals", [])
        if not quick or "stall share" in goal["text"]
    ]


def _varying(rows: list[dict[str, Any]]) -> list[str]:
    """Parameters that are not the same everywhere."""
    names = list(dict.fromkeys(name for row in rows for name in row.get("params", {})))
    return [name for name in names if len({_param(row, name) for row in rows}) > 1]


def _param(row: dict[str, Any], name: str) -> str:
    return str(row.get("params", {}).get(name, ""))


def _cell(row: dict[str, Any] | None) -> str:
    """Median, ratio to the baseline of the same run, interval; below ROUNDS_MIN the number of rounds instead."""
    if row is None:
        return ""
    if row.get("ratio") is None:
        return f"{row['median']:,.4g}\nbaseline"
    interval = row.get("ratio_ci95")
    lines = [f"{row['median']:,.4g}", f"{row['ratio']:.3f}x"]
    if _few_rounds(row):
        lines.append(f"of {row['n']} rounds")
    elif interval:
        lines.append(f"{interval[0]:.3f}-{interval[1]:.3f}")
    return "\n".join(lines)


def _few_rounds(row: dict[str, Any]) -> bool:
    return row.get("ratio") is not None and row.get("n", ROUNDS_MIN) < ROUNDS_MIN


def _time(seconds: float) -> str:
    """Two or three digits in the unit that fits; negative for what came late."""
    size = abs(seconds)
    if size < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if size < 0.1 else f"{seconds:.2f} s"

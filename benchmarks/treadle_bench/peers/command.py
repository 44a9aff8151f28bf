"""Runs the peers and shows what came out: tables, notes, JSON, a plot."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from treadle_bench.peers.figure import check_plot, plot, tables
from treadle_bench.peers.measuring import OURS, QUICK, Extent, chosen_peers, measure
from treadle_bench.report import console_with_heading, document


def run_and_show(*, only: Sequence[str], quick: bool, as_json: bool, plot_to: Path | None) -> bool:
    """Measure and print; True if anything was measured. Raises InvalidArgument, Unavailable before anything starts, DataLoss."""
    peers = chosen_peers(only)
    if plot_to is not None:
        check_plot(plot_to)
    found = measure(QUICK if quick else Extent(), peers)
    whole = document(found.rows, [], {"quick": quick, "notes": found.notes})
    if plot_to is not None and found.rows:
        plot(found.rows, OURS, plot_to)
    if as_json:
        sys.stdout.write(json.dumps(whole) + "\n")
        return bool(found.rows)
    console = console_with_heading("peers", whole)
    for title, table in tables(found.rows, OURS).items():
        console.print(f"\n{title}", highlight=False)
        console.print(table)
    for note in found.notes:
        console.print(f"note   {note}", highlight=False)
    return bool(found.rows)

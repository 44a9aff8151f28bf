"""The second act as text for people: what was built, answers side by side, and figures for each way of asking.

Owns layout for 80 columns. Does not measure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from treadle.cli.demo_prefix import ENTRIES, PrefixAct
from treadle.cli.demo_prefix_answers import NAME
from treadle.cli.demo_report import VERSION_DIGITS_SHOWN
from treadle.cli.terminal import size_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from treadle.cli.demo_prefix_answers import Asked

WAYS = ("text in the prompt", "neither", "behind the prefix")


def built_view(act: PrefixAct) -> RenderableType:
    """What the dictionary was made of, what it took, and its bytes beside those of the KV that it stands for."""
    from rich.console import Group
    from rich.text import Text

    calibration, sizes = act.card["calibration"], act.card["sizes"]
    return Group(
        "",
        Text(f"A long prefix, {NAME} ({act.prefix_tokens:,} tokens), as attention states", style="bold"),
        f"treadle asm build: {act.build_seconds:.1f} s, from {calibration['traces']} traces of {calibration['tokens']:,} tokens: {ENTRIES} entries a layer, "
        f"{size_text(sizes['storage_bytes'])}, {sizes['storage_share']:.0%} of the prefix's KV ({size_text(sizes['prefix_kv_bytes'])} in bf16)",
        f"treadle asm publish: {float(act.published['seconds']):.1f} s, version {act.version[:VERSION_DIGITS_SHOWN]}",
        "",
    )


def asked_view(asked: Asked) -> RenderableType:
    """One question and its three answers side by side."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), expand=True)
    for way in WAYS:
        table.add_column(Text(way, style="dim"), ratio=1)
    table.add_row(*(Text(said.text.strip()) for said in (asked.with_text, asked.without, asked.behind)))
    return Group(Text(f"> {asked.question}", style="bold cyan"), table, "")


def figures_table(act: PrefixAct) -> Table:
    """Tokens, times and agreement for each way of asking."""
    from rich import box
    from rich.table import Table

    first, seconds, scored = act.asked[0], act.seconds_to_first, act.likelihood
    held_out = [act.fidelity[name] for name in ("nothing", "dictionary") if name in act.fidelity]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for way in WAYS:
        table.add_column(way, justify="right")
    told = {
        "prompt tokens": [f"{said.prompt_tokens:,}" for said in (first.with_text, first.without, first.behind)],
        "first token, median": [f"{1e3 * seconds[way]:,.0f} ms" for way in ("with_text", "without", "behind")],
        "  text cached": [f"{1e3 * seconds['again']:,.0f} ms", "", ""],
        "same answers": ["", *(f"{act.same(way)} of {len(act.asked)}" for way in ("without", "behind"))],
        "log-prob of answers": [f"{nats:.2f}" for nats in (scored.with_text, scored.without, scored.behind)] if scored else [],
        "next-token agreement": ["", *(f"{figures['agreement']:.3f}" for figures in held_out)],
        "KL, nats a token": ["", *(f"{figures['kl']:.3f}" for figures in held_out)],
    }
    for name, cells in told.items():
        table.add_row(name, *cells)
    return table


def origin_words(act: PrefixAct) -> str:
    """Where the figures are from, and what the answers themselves say of the prefix."""
    reports = [one.report for one in act.asked]
    counts = Counter[str]()
    for report in reports:
        counts.update({name: int(report.get(name, 0)) for name in ("lookups", "lookups_outside", "fell_back")})
    versions = ", ".join(sorted({str(report.get("version"))[:VERSION_DIGITS_SHOWN] for report in reports}))
    tokens = act.fidelity.get("dictionary", {}).get("tokens", 0)
    return (
        f"first token: nothing of the text was cached, then it was; the first question behind the prefix opened it, after "
        f"{1e3 * act.asked[0].behind.seconds_to_first:,.0f} ms. Log-probability a token, by the worker: of the answers with the text. Agreement "
        f"and KL against the text: the build's, on {tokens:,} tokens of traces kept from learning. The answers report: prefix {NAME} "
        f"{versions}, {counts['lookups']:,} lookups, {counts['lookups_outside']:,} unlike its calibration, {counts['fell_back']} of "
        f"{len(reports)} sent back to the text's own KV"
    )

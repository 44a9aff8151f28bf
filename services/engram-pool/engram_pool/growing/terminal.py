"""What `treadle engram` prints: bars and remarks on standard error, cards and comparisons for people on standard output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from engram_pool.terminal import print_line, print_table, size_text

if TYPE_CHECKING:
    from engram_pool.growing.grower import Report

PERPLEXITY_OF = {"held_out": "held out", "other_text": "other text"}
SMOOTHING = 0.05  # weight of the newest step in the loss that is shown


def say(text: str) -> None:
    """A remark on standard error."""
    typer.echo(text, err=True)


def fetching(step: str, fraction: float) -> None:
    """A remark when the fetching of a model goes on to another step."""
    if 0 < fraction < 1:
        say(f"fetching the model: {step}")


@contextmanager
def growing(name: str) -> Iterator[Callable[[Report], None]]:
    """A bar with loss and time left; where standard error is no terminal, a line each 20th of the way."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    shown = 0.0
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.TaskProgressColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
    )
    with rich.Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task(f"growing {name}", total=None)

        def watch(report: Report) -> None:
            nonlocal shown
            if not report.mix:
                shown = report.loss if not shown else (1 - SMOOTHING) * shown + SMOOTHING * report.loss
            text = f"growing {name}: {report.tokens:,} tokens, loss {shown:.3f}"
            bar.update(task, completed=report.step, total=report.steps, description=text)
            if not console.is_terminal and report.step * 20 // report.steps > (report.step - 1) * 20 // report.steps:
                say(f"{text}, step {report.step} of {report.steps}")

        yield watch


@contextmanager
def measuring() -> Iterator[Callable[[str, int, int], None]]:
    """A bar for measurements: (what, done, of)."""
    from rich import progress as rich
    from rich.console import Console

    console = Console(stderr=True)
    with rich.Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        yield lambda what, at, of: bar.update(task, completed=at, total=of, description=f"measuring: {what}")


def print_card(card: Mapping[str, Any]) -> None:
    """A card for people."""
    text, sizes, recipe = card["text"], card["sizes"], card["recipe"]
    lines = [
        ("memory", f"{card['name']} {card['version'][:12]}, for {card['model']['name']}"),
        ("text", f"{', '.join(text['names'])}: {text['train_tokens']:,} tokens" + (f"; {text['source']}" if text["source"] else "")),
        ("learnt", f"{card['tokens_learnt']:,} tokens, {recipe['passes']} pass{'es' if recipe['passes'] > 1 else ''}, seed {card['seed']}"),
        ("layers", f"{', '.join(map(str, recipe['layers']))}; rows learnt {', '.join(f'{n:,}' for n in card['rows_learnt'].values())}"),
        ("size", f"{size_text(sizes['rows_bytes'])} rows ({card['precision']}), {size_text(sizes['fusion_bytes'])} projections"),
    ]  # fmt: skip
    if card.get("parent"):
        lines.append(("grown from", f"{card['parent']['name']} {card['parent']['version'][:12]}, rows only"))
    for name, figures in card["perplexity"].items():
        states = [f"{state} {figures[state]:.2f}" for state in ("off", "on", "shuffled") if state in figures]
        change = figures["on"] / figures["off"] - 1
        lines.append(
            (f"perplexity, {PERPLEXITY_OF.get(name, name)}", f"{', '.join(states)}  ({change:+.1%}; {figures['tokens']:,} tokens)")
        )
    print_table(("", ""), lines, empty="")


def print_comparison(lines: Sequence[Mapping[str, Any]]) -> None:
    """Perplexities with their ratios to none."""
    cells = [
        (
            str(line["memory"]), f"{line['perplexity']:.3f}", f"{line['ratio']:.4f}",
            f"{line['ratio_ci95'][0]:.4f} to {line['ratio_ci95'][1]:.4f}" if line["ratio_ci95"] else "",
        )
        for line in lines
    ]  # fmt: skip
    print_table(("memory", "perplexity", "ratio", "95 %"), cells, empty="")
    if lines:
        print_line(f"{lines[0]['tokens']:,} tokens in {lines[0]['blocks']} blocks; intervals: bootstrap over blocks, paired")

"""`treadle doctor`: all findings, for people or for programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.doctor import devices, memory, processor, running, software
from treadle.cli.doctor.finding import Finding, Host, Level
from treadle.cli.terminal import print_json, stdout

CHECKS: tuple[Callable[[Host], Finding | list[Finding]], ...] = (
    processor.cpu, processor.numa, memory.memory, memory.huge_anonymous, memory.huge_shared, memory.huge_mounts, memory.hugetlb,
    memory.shared_memory, memory.limits, devices.dax, devices.cxl, devices.rdma, devices.gpu, software.compiler, software.loops,
    software.packages, software.mooncake, running.doors, running.dictionaries, running.dictionary_cache,
)  # fmt: skip
MARKS = {Level.OK: "[green]✓[/]", Level.INFO: "[cyan]·[/]", Level.WARN: "[yellow]![/]"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    root: Annotated[Path, typer.Option(help="Where /proc, /sys and /dev are.", hidden=True)] = Path("/"),
) -> None:
    """Look at this machine: what is there, what it means for the fabric, how to get more."""
    findings = examine(Host(root))
    if as_json:
        print_json({"findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings)


def examine(host: Host) -> list[Finding]:
    """All findings, in the order of the checks."""
    findings: list[Finding] = []
    for check in CHECKS:
        found = check(host)
        findings += found if isinstance(found, list) else [found]
    return findings


def _print(findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.found)
        text.append(f"\n{finding.means}", style="dim")
        if finding.advice:
            text.append(f"\n→ {finding.advice}", style="cyan")
        table.add_row(MARKS[finding.level], Text(finding.name, style="bold"), text)
    console = stdout()
    console.print(table)
    warnings = sum(finding.level is Level.WARN for finding in findings)
    console.print(f"{len(findings)} findings, {warnings or 'no'} warning{'' if warnings == 1 else 's'}")

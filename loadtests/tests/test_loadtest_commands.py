"""The commands of `treadle loadtest` are those that are documented."""

from __future__ import annotations

import re
from pathlib import Path

from typer.main import get_command

from treadle_loadtests.commands import app

ROOT = Path(__file__).resolve().parents[2]


def test_the_commands_are_those_of_the_readme_and_of_the_make_target() -> None:
    registered = set(get_command(app).commands)  # type: ignore[attr-defined]
    table = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "loadtests" / "README.md").read_text(), re.MULTILINE)
    made = re.search(r"^LOADTESTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert made is not None
    assert registered == set(table) == set(made[1].split())

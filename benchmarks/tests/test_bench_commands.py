"""The commands of `treadle bench`: those that are documented are there, and a quick run is not judged."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

from treadle_bench.commands import app
from treadle_bench.report import Goal, rows_of

ROOT = Path(__file__).resolve().parents[2]
MISSED = Goal("time", 2.0, 1.0)


def registered() -> set[str]:
    return set(get_command(app).commands)  # type: ignore[attr-defined]


def test_the_commands_are_those_that_the_help_lists() -> None:
    listed = re.findall(r"[a-z]+", (get_command(app).help or "").partition(":")[2].partition(".")[0])
    gains = {"and", "what", "a", "memory", "gains"}  # the words before the last one
    assert registered() == set(listed) - gains | {"all"}


def test_every_command_that_a_page_names_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "Makefile", *sorted((ROOT / "docs").glob("**/*.md"))]
    named: set[str] = set()
    for page in pages:
        for several in re.findall(r"treadle bench ([a-z]+(?: \| [a-z]+)*)", page.read_text()):
            named |= set(several.split(" | "))
    assert {"ring", "gather", "peers", "cache"} <= named, "the pages were read"
    assert named <= registered()


@pytest.mark.parametrize(("flags", "exit_code"), [(["--strict"], 1), (["--quick", "--strict"], 0), ([], 0)])
def test_a_quick_run_is_not_judged_and_a_strict_one_is(monkeypatch: pytest.MonkeyPatch, flags: list[str], exit_code: int) -> None:
    rows = rows_of({"base": [2.0] * 10}, {"tokens": 1}, "us", "base")
    monkeypatch.setattr("treadle_bench.hashing.measure", lambda *, quick: (rows, [MISSED]))
    done = CliRunner().invoke(app, ["hash", *flags])
    assert done.exit_code == exit_code, done.output
    assert ("MISSED" in done.output) == ("--quick" not in flags)


def test_the_figures_of_a_gpu_are_not_made_up_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    answer = CliRunner().invoke(app, ["cuda"])
    assert answer.exit_code == 2
    assert "not run" in answer.output

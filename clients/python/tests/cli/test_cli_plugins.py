"""What `treadle` itself is: lazy, and clear about commands that others bring."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from treadle.cli.main import OWN, build_app
from treadle.cli.plugins import GROUP, KNOWN, Plugin
from treadle.contract.errors import NotFound

HEAVY = ("torch", "grpc", "openai", "transformers", "engram_pool", "inference_worker", "treadle_bench", "fake_fabric")
HELP_SECONDS_MAX = 2.0  # of a core; about 0.2 alone, and the tests share the machine with others


def test_help_names_every_command_and_imports_nothing_heavy(cli: Any) -> None:
    program = f"""
import sys, time
from treadle.cli.main import main
try:
    main(["--help"])
except SystemExit as left:
    assert not left.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
print("seconds:", time.process_time())
"""
    run = subprocess.run([sys.executable, "-c", program], env=cli.environment, capture_output=True, text=True, check=True)
    assert float(run.stdout.rpartition("seconds: ")[2]) < HELP_SECONDS_MAX
    assert "heavy: []" in run.stdout
    for name in (*OWN, "pool", "model", "bench"):
        assert f"\n  {name}" in run.stdout


def test_each_command_has_a_summary_of_its_own_that_is_not_cut(cli: Any) -> None:
    entries = cli.packages / "treadle_fakes-9.9.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "engram = fake_fabric:pool_app\nspin = fake_fabric:pool_app\n")
    told = dict(re.findall(r"^  (\w+) +(.+)$", cli("--help").stdout.partition("Commands:")[2], re.MULTILINE))
    assert {name: told[name] for name in KNOWN} == {name: known.summary for name, known in KNOWN.items()}
    assert len({known.summary for known in KNOWN.values()}) == len(KNOWN)
    assert told["spin"] == "Commands for tests."  # what its package says


@pytest.mark.parametrize("name", ["pool", "engram", "model"])
def test_a_summary_is_what_the_commands_own_help_says(name: str) -> None:
    (entry,) = {each.value: each for each in entry_points(group=GROUP, name=name)}.values()
    assert Plugin(name, entry).load().info.help == KNOWN[name].summary


def test_a_plugin_is_called_as_a_command_of_its_own(cli: Any) -> None:
    assert '"path"' in cli("model", "fetch", "x", "--json").stdout


def test_a_broken_plugin_is_one_clear_line_and_breaks_nothing_else(cli: Any) -> None:
    (cli.packages / "treadle_fakes-9.9.dist-info" / "entry_points.txt").write_text(
        "[treadle.commands]\npool = no_such_module:app\nmodel = os:path\nworse = antigravity_of:app\n"
    )
    run = cli("pool", "ls", code=1)
    assert "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'" in run.stderr
    assert "Traceback" not in run.stderr
    assert "treadle-fakes 9.9" in run.stderr
    assert "not a typer app" in cli("model", code=1).stderr


def test_a_command_of_ours_that_is_not_installed_says_what_to_install() -> None:
    with pytest.raises(NotFound, match=r"treadle-bench: pip install 'treadle\[fabric\]'"):
        build_app("bench", {})
    with pytest.raises(NotFound, match="`treadle engram` comes with the package treadle-engram-pool"):
        build_app("engram", {})
    build_app("up", {})


def test_wrong_usage_is_exit_code_two(cli: Any) -> None:
    assert "No such option" in cli("up", "--colour", "red", code=2).stderr


def test_versions_are_those_of_the_installed_packages(cli: Any) -> None:
    assert "treadle-fakes                9.9" in cli("version").stdout

"""What `treadle` itself is: lazy, and clear about commands that others bring."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from treadle.cli.main import OWN, build_app
from treadle.contract.errors import NotFound

HEAVY = ("torch", "grpc", "openai", "transformers", "engram_pool", "inference_worker", "treadle_bench", "fake_fabric")
HELP_SECONDS_MAX = 2.0  # about 0.2 alone; the tests share the machine with others


def test_help_names_every_command_and_imports_nothing_heavy(cli: Any) -> None:
    program = f"""
import sys
from treadle.cli.main import main
try:
    main(["--help"])
except SystemExit as left:
    assert not left.code
print("heavy:", [name for name in {HEAVY!r} if name in sys.modules])
"""
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-c", program], env=cli.environment, capture_output=True, text=True, check=True)
    assert time.monotonic() - started < HELP_SECONDS_MAX
    assert "heavy: []" in run.stdout
    for name in (*OWN, "pool", "model", "bench"):
        assert f"\n  {name}" in run.stdout
    assert "Commands for tests." in run.stdout


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
    build_app("up", {})


def test_wrong_usage_is_exit_code_two(cli: Any) -> None:
    assert "No such option" in cli("up", "--colour", "red", code=2).stderr


def test_versions_are_those_of_the_installed_packages(cli: Any) -> None:
    assert "treadle-fakes                9.9" in cli("version").stdout

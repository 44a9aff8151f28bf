"""Which memories a fabric of fake services loads, what it says of them, and which it does not."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from treadle.cli.fabric_options import EngramFusion, EngramTable, FabricOptions
from treadle.cli.gateway import ServedName
from treadle.cli.status import MEMORY_COLUMNS_MIN, memory_table, pool_note
from treadle.cli.up import memory_line
from treadle.contract import EngramModel
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import TransportChoice

FOLDER = ("--gateway-port", "0", "--port-base", "0", "--model", "./model")
Grow = Callable[..., EngramModel]


def worker_flags(cli: Any) -> dict[str, str]:
    """Flags of the worker's command line with their values."""
    words = psutil.Process(cli.process("inference-worker").pid).cmdline()
    words = words[words.index("--model") :]
    return dict(zip(words[::2], words[1::2], strict=True))


def in_pool(cli: Any) -> list[str]:
    status = json.loads(cli("status", "--json").stdout)
    return [model["model"] for model in status["services"][0]["figures"]["models"]]


def told(cli: Any) -> str:
    return str((cli.home / "run" / "logs" / "supervisor.log").read_text())


def other_model(cli: Any) -> None:
    (cli.home / "model" / "config.json").write_text('{"num_hidden_layers": 28, "hidden_size": 1024}')


def test_the_shipped_memory_is_there_for_those_who_choose_it(cli: Any) -> None:
    cli.extra["FAKE_MEMORIES"] = "kjv"
    run = cli("up", "--detach", *FOLDER)
    assert 'memories           kjv: requests choose by "model": "fake-135m+kjv", people by treadle chat --engram kjv' in run.stdout
    flags = worker_flags(cli)
    assert "--engram-model" not in flags
    assert (flags["--engram-fusion"], flags["--engram-transport"]) == ("auto", "auto")
    text = cli("status").stdout
    (line,) = [line for line in text.splitlines() if line.strip().startswith("kjv")]
    assert "closed" in line
    assert "kjv: 12.6 MB, 4 KiB pages" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("name", ["kjv", "fresh", "kjv-shuffled", "court-decisions-of-the-last-fifty-years"])
def test_no_name_of_a_memory_is_cut_and_only_long_ones_are_folded(name: str) -> None:
    memory = {
        "model": name, "default": False, "version": "1b" * 32, "open": False, "refusal": "", "requests": 1_234_567,
        "tokens": 1_234_567_890, "transport": "mapped", "fused": False,
    }  # fmt: skip
    console = Console(file=io.StringIO(), width=80)
    console.print(memory_table([memory]))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()[3:]
    assert max(map(len, lines)) <= 80
    assert lines[0].split()[1:] == ["1b1b1b1b1b1b", "closed", "1,234,567", "1,234,567,890", "mapped", "shadowed"]
    assert "".join(line[: lines[0].index("1b1b")].strip() for line in lines) == name
    assert (len([line for line in lines if line.strip()]) == 1) == (len(name) <= MEMORY_COLUMNS_MIN)


def test_the_pools_size_is_that_of_all_versions_and_says_so_where_names_are_fewer() -> None:
    def note(*models: tuple[str, int]) -> str:
        return pool_note({"models": [{"model": name, "bytes": size} for name, size in models], "page_bytes": 4096})

    assert note() == "no tables: 0.0 MB, 4 KiB pages"
    assert note(("kjv", 6_100_000), ("code", 12_600_000)) == "code, kjv: 18.7 MB, 4 KiB pages"
    two = note(("kjv", 6_100_000), ("kjv", 6_500_000), ("code", 12_600_000))
    assert two == "code, kjv (2 names, 3 versions): 25.2 MB, 4 KiB pages"
    assert note(("kjv", 6_100_000), ("kjv", 6_500_000)) == "kjv (1 name, 2 versions): 12.6 MB, 4 KiB pages"


def test_a_document_names_the_memories_and_how_they_are_asked_for(cli: Any, grow: Grow) -> None:
    model = grow(cli.home / "code", "code")
    up = json.loads(cli("up", "--detach", "--json", *FOLDER, "--memory", "./code").stdout)
    assert [memory["name"] for memory in up["memories"]] == ["kjv", "code"]
    assert up["memories"][1] == {"name": "code", "version": model.version, "model": "fake-135m+code", "default": False}
    services = {service["service"]: service for service in json.loads(cli("status", "--json").stdout)["services"]}
    memories = services["inference-worker"]["figures"]["memories"]
    assert [(memory["model"], memory["open"], memory["fused"]) for memory in memories] == [
        ("code", False, True),
        ("kjv", False, True),
    ]


def test_a_pool_that_was_killed_has_its_memories_again(cli: Any, wait_for: Callable[..., Any]) -> None:
    cli("up", "--detach", *FOLDER)
    before = cli.process("engram-pool")
    before.send(9)
    wait_for(
        lambda: (mark := cli.process("engram-pool")) and mark != before and cli.state()["services"][0]["stage"] == "ready",
        "the pool",
    )
    assert in_pool(cli) == ["kjv"]


def test_the_shipped_memory_is_left_out_for_a_model_of_other_sizes_and_that_is_no_error(cli: Any) -> None:
    other_model(cli)
    run = cli("up", "--detach", *FOLDER)
    words = "kjv was made for fake-135m (30 layers of 576), model has 28 of 1024: not loaded"
    assert words in run.stderr
    assert words in told(cli)
    assert in_pool(cli) == []


def test_the_shipped_memory_goes_where_the_worker_finds_another_tokenizer(cli: Any) -> None:
    cli.extra["FAKE_MEMORIES"] = ""
    run = cli("up", "--detach", *FOLDER)
    assert "kjv was made for fake-135m: not loaded (token_map differs)" in run.stderr
    assert "none to choose" in run.stdout
    assert in_pool(cli) == []


def test_a_folder_that_does_not_fit_is_an_error_if_its_sizes_tell_and_said_if_only_the_worker_knows(cli: Any, grow: Grow) -> None:
    grow(cli.home / "wide", "wide", hidden=960)
    refused = cli("up", *FOLDER, "--memory", "wide", code=1).stderr
    assert "wide was made for fake-135m (30 layers of 960), model has 30 of 576" in refused
    assert "treadle engram grow" in refused
    grow(cli.home / "notes", "notes")
    run = cli("up", "--detach", *FOLDER, "--memory", "notes")
    assert "notes cannot be chosen: token_map differs" in run.stderr
    assert "notes: token_map differs" in cli("status").stdout


def test_the_speed_profile_is_the_default_memory_of_all_requests(cli: Any) -> None:
    cli("up", "--detach", *FOLDER, "--engram-table", "speed", "--engram-fusion", "on")
    flags = worker_flags(cli)
    assert (flags["--engram-model"], flags["--engram-fusion"]) == ("smollm2-demo", "on")
    assert in_pool(cli) == []  # the fake pool's command only talks about random rows


def test_a_pool_may_begin_empty_and_a_fabric_may_have_none(cli: Any) -> None:
    run = cli("up", "--detach", *FOLDER, "--engram-table", "none")
    assert "none to choose; `treadle pool load --grown FOLDER` brings one, nothing has to restart" in run.stdout
    cli("down")
    run = cli("up", "--detach", *FOLDER, "--no-engram")
    assert "memories" not in run.stdout
    assert worker_flags(cli)["--engram-transport"] == "off"


def test_the_default_memory_has_to_be_one_that_is_loaded(cli: Any, grow: Grow) -> None:
    grow(cli.home / "code", "code")
    refused = cli("up", *FOLDER, "--memory", "code", "--engram-default", "bible", code=1).stderr
    assert "--engram-default bible: not loaded; there is kjv, code" in refused
    cli("up", "--detach", *FOLDER, "--memory", "code", "--engram-default", "code")
    assert worker_flags(cli)["--engram-model"] == "code"


def test_a_folder_that_is_no_memory_is_told_before_anything_starts(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "manifest.json cannot be read" in cli("up", *FOLDER, "--memory", "./empty", code=1).stderr
    assert not (cli.home / "run" / "logs" / "engram-pool.log").exists()


def test_options_travel_to_another_process_as_they_are() -> None:
    options = FabricOptions(
        memories=("/a", "/b"), engram_table=EngramTable.SPEED, engram_transport=TransportChoice.RPC, engram_fusion=EngramFusion.ON
    )
    assert FabricOptions.from_json(options.to_json()) == options


@pytest.mark.parametrize(
    ("options", "default"),
    [
        ({}, ""),
        ({"engram_table": EngramTable.SPEED}, "smollm2-demo"),
        ({"engram_table": EngramTable.SPEED, "engram_default": "none"}, ""),
        ({"engram_table": EngramTable.SPEED, "engram": False}, ""),
        ({"engram_default": "kjv"}, "kjv"),
    ],
)
def test_the_default_memory_follows_from_the_options(options: dict[str, Any], default: str) -> None:
    assert FabricOptions(**options).default_memory == default


def test_without_a_pool_there_are_no_memories_to_name() -> None:
    with pytest.raises(InvalidArgument, match="--no-engram"):
        FabricOptions(engram=False, memories=("/a",))


def test_the_line_about_memories_says_the_default_and_bounds_their_number() -> None:
    many = [ServedName(f"m+n{number}", f"n{number}", "ab") for number in range(12)]
    assert memory_line([ServedName("m"), *many]).startswith("n0, n1, n2, n3, n4, n5, n6, n7, …: requests choose")
    assert memory_line([ServedName("m", "n1", "ab"), *many[:2]]).startswith(
        'n0, n1; n1 unless they choose: requests choose by "model": "m+n0"'
    )


def test_rows_by_mooncake_come_from_a_pool_that_is_told_to_open_its_door(cli: Any) -> None:
    cli("up", "--detach", *FOLDER, "--engram-transport", "mooncake")
    assert worker_flags(cli)["--engram-transport"] == "mooncake"
    assert "--mooncake-listen" in psutil.Process(cli.process("engram-pool").pid).cmdline()

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import pytest

from treadle.chassis.server import read_key_file, read_key_lines
from treadle.chassis.settings import ServerSettings, WrongSetting, is_loopback, load_settings, split_address


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """Settings of a test."""

    listen: str = "127.0.0.1:7499"
    """Where."""
    table_bytes_max: int = 8
    """Most bytes."""
    folder: Path | None = None
    """A folder."""
    fast: bool = False
    """Faster."""
    colour: Colour = Colour.RED
    """Which."""


def load(*argv: str) -> Settings:
    return load_settings(Settings, "TEST", "prog", list(argv))


def test_flags_win_over_the_environment_which_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("table_bytes_max: 1\nfast: true\ncolour: blue\nfolder: /tmp\n")
    monkeypatch.setenv("TREADLE_TEST_TABLE_BYTES_MAX", "2")
    monkeypatch.setenv("TREADLE_TEST_FAST", "no")
    settings = load("--config", str(config), "--table-bytes-max", "3")
    assert (settings.table_bytes_max, settings.fast, settings.colour, settings.folder) == (3, False, Colour.BLUE, Path("/tmp"))
    assert load("--table-bytes-max", "1_000").table_bytes_max == 1000


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--table-bytes-max", "many"], "--table-bytes-max: int expected, got 'many'"),
        (["--fast", "perhaps"], "--fast: bool expected"),
        (["--colour", "green"], "['red', 'blue']"),
        (["--listen", "nowhere"], "host:port"),
        (["--listen", "127.0.0.1:99999"], "host:port"),
        (["--listen", "0.0.0.0:1"], "beyond loopback"),
        (["--metrics-listen", "0.0.0.0:1"], "metrics_public"),
        (["--tls-cert-file", "x"], "go together"),
        (["--log-level", "loud"], "log_level"),
        (["--config", "/nonexistent.yaml"], "No such file"),
    ],
)
def test_a_wrong_value_stops_the_start_with_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(*argv)
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("text", ["tabel: 1", "- 1", "a: [", "listen: {a: 1}"])
def test_a_wrong_file_stops_the_start(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(SystemExit):
        load("--config", str(tmp_path / "c.yaml"))
    assert capsys.readouterr().err.startswith("prog: ")


def test_help_names_flag_variable_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--table-bytes-max" in shown
    assert "Most bytes. [TREADLE_TEST_TABLE_BYTES_MAX; default: 8]" in shown
    assert "Longest time for calls in progress" in shown  # inherited


def test_a_listener_beyond_loopback_needs_keys_or_certificates_of_clients(tmp_path: Path) -> None:
    assert Settings(listen="0.0.0.0:1", api_key_file=tmp_path / "keys").listen == "0.0.0.0:1"
    with pytest.raises(WrongSetting):
        Settings(listen="10.0.0.1:1")
    beyond = partial(Settings, listen="10.0.0.1:1", tls_cert_file=tmp_path / "cert", tls_key_file=tmp_path / "key")
    with pytest.raises(WrongSetting, match="give api_key_file or tls_client_root_file"):
        beyond()
    assert beyond(tls_client_root_file=tmp_path / "roots").listen == "10.0.0.1:1"
    with pytest.raises(WrongSetting, match="needs tls_cert_file"):
        Settings(tls_client_root_file=tmp_path / "roots")
    assert split_address("[::1]:80") == ("[::1]", 80)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"])
def test_numbers_of_this_machine_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["127.evil.example", "localhost.evil.example", "0.0.0.0", "[::]", "10.0.0.1", ""])
def test_names_and_numbers_of_others_are_not_loopback(host: str) -> None:
    assert not is_loopback(host)


def test_a_key_file_keeps_its_order_and_its_comments_are_no_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# a\n\n   # indented\n  first \nsecond\n")
    assert read_key_file(tmp_path / "keys", "api_key_file") == ["first", "second"]
    (tmp_path / "keys").write_text("  # nothing\n")
    with pytest.raises(WrongSetting, match=r"worker_key_file: .* holds no key"):
        read_key_file(tmp_path / "keys", "worker_key_file")


def test_a_key_file_may_say_more_of_each_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# a\nfirst\n\n second  engram=kjv colour=red \n")
    first, second = read_key_lines(path, "api_key_file", {"engram", "colour"})
    assert (first.key, first.options, first.number) == ("first", {}, 2)
    assert (second.key, second.options, second.number) == ("second", {"engram": "kjv", "colour": "red"}, 4)
    assert "second" not in repr(second)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("secret colour=red", r"line 2: behind the key .* engram=VALUE"), ("secret word", "line 2"), ("secret engram=", "line 2"),
        ("secret engram=a engram=b", "line 2: the option engram stands there twice"), ("first", "line 2: the key of line 1 again"),
    ],
)  # fmt: skip
def test_a_wrong_line_of_a_key_file_is_named_by_its_number_alone(tmp_path: Path, line: str, told: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"first\n{line}\n")
    with pytest.raises(WrongSetting, match=told) as refused:
        read_key_lines(path, "api_key_file", {"engram"})
    assert not any(word in str(refused.value) for word in ("secret", "first", "word", "red"))

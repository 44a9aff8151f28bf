"""`treadle asm` against a real store: what people and programs read, and what a mistake is told."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asm_store.commands import app
from asm_store.commands.calling import seconds_of
from treadle.contract import AccessDenied, InvalidArgument, NotFound, Overtaken, TreadleError, Unavailable
from treadle.contract.dictionary import Grouping
from treadle.contract.dictionary_card import CARD_SCHEMA

NARROW = {"COLUMNS": "80"}


class Asm:
    """The command, pointed at one store."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it prints."""
        run = CliRunner().invoke(app, [*words, "--store", self.address], env=NARROW)
        if isinstance(run.exception, TreadleError):
            raise run.exception
        assert run.exit_code == code, run.output
        return run.stdout

    def json(self, *words: str, code: int = 0) -> Any:
        """The document that it prints."""
        return json.loads(self(*words, "--json", code=code))


@pytest.fixture
def asm(start_store: Any, tmp_path: Path) -> Iterator[Asm]:
    with start_store(tmp_path / "data") as process:
        yield Asm(process.address)


def test_publish_list_promote_and_remove_tell_what_they_did(asm: Asm, make: Any) -> None:
    old, new = make(seed=1, prefix_kv=True), make(seed=2)
    assert "the store keeps no dictionary; `treadle asm publish FOLDER` brings one" in asm("ls")
    told = asm("publish", str(old.folder))
    assert f"rules {old.version[:12]}" in told
    assert '"treadle": {"prefix": "rules"}' in told
    again = asm("publish", str(old.folder))
    assert ("was there already" in again, "card was not taken" in again) == (True, False)
    (old.folder / "card.json").write_text('{"seed": 5}')
    assert "card was not taken" in asm("publish", str(old.folder))
    assert (asm.json("publish", str(old.folder))["card_taken"], asm.json("ls", "rules")[0]["card"]) == (False, {"seed": 1})
    assert "treadle asm promote rules@" in asm("publish", str(new.folder), "--no-promote")
    lines = [line.strip() for line in asm("ls").splitlines()]
    assert [line.split()[1] for line in lines if line.startswith("rules")] == [old.version[:12], new.version[:12]]
    documents = asm.json("ls", "rules")
    assert [(one["version"], one["current"], one["prefix_kv"]) for one in documents] == [
        (old.version, True, True),
        (new.version, False, False),
    ]
    assert "is current now (change 2 of this name)" in asm("promote", f"rules@{new.version[:8]}", "--expected", old.version)
    with pytest.raises(Overtaken):
        asm("promote", f"rules@{new.version[:8]}", "--expected", old.version)
    with pytest.raises(InvalidArgument, match="rules@VERSION"):
        asm("promote", "rules")
    proof = asm.json("rm", f"rules@{old.version[:8]}")
    assert proof["pending_replicas"] == []
    assert {Path(file["path"]).name for file in proof["files"]} >= {"dictionary.safetensors", "prefix_kv.safetensors"}
    assert not any(Path(file["path"]).exists() for file in proof["files"])
    assert "every copy is gone" in asm("rm", "rules")
    assert asm.json("ls") == []
    assert "no dictionary of the name rules" in asm("ls", "rules")
    with pytest.raises(NotFound):
        asm("rm", "rules")


def test_a_version_in_a_store_is_shown_as_its_folder_is(asm: Asm, make: Any) -> None:
    old, new = make(seed=1), make(seed=2)
    for made in (old, new):
        (made.folder / "card.json").write_text(json.dumps({"schema": CARD_SCHEMA, "source": f"words {made.version[:4]}"}))
        asm("publish", str(made.folder))
    assert asm("show", "rules") == asm("show", str(new.folder))
    assert asm("show", f"rules@{old.version[:8]}") == asm("show", str(old.folder))
    assert f"words {old.version[:4]}" in asm("show", f"rules@{old.version[:8]}")
    document, of_folder = asm.json("show", "rules"), asm.json("show", str(new.folder))
    assert of_folder.pop("prefix_kv_file_bytes") == 0
    assert document == of_folder
    with pytest.raises(NotFound, match="unknown"):
        asm("show", "unknown")
    with pytest.raises(NotFound, match="treadle asm build"):
        asm("show", "./rules")


@pytest.mark.parametrize(
    ("fields", "unknown", "named"),
    [
        ({"fit": {"0": {"agreement": 1}}, "fidelity": {"dictionary": {"agreement": 0.5}}}, 6, ""),  # as of another release
        ({"fit": {"0": 3, "2": {"median": "high", "percent1": 10**400}}}, 4, "fit.0, fit.2.median, fit.2.percent1"),
        (
            {"fit": [1], "fidelity": "good", "model": 3, "source": ["a"], "calibration": 1},
            0,
            "fit, fidelity, model, source, calibration",
        ),
        (
            {"fidelity": {"x": {"kl": True, "tokens": -1}, "y": 0}, "fit_on": {}},
            6,
            "fidelity.x.kl, fidelity.x.tokens, fidelity.y, fit_on",
        ),
        ({"calibration": {"held_out_traces": "many", "written_by_the_model": 1}}, 0, "calibration.written_by_the_model"),
    ],
)
def test_a_card_of_any_shape_is_shown_as_far_as_it_is_one(
    asm: Asm, make: Any, fields: dict[str, Any], unknown: int, named: str
) -> None:
    made = make()
    (made.folder / "card.json").write_text(json.dumps({"schema": CARD_SCHEMA} | fields))
    asm("publish", str(made.folder))
    for what in ("rules", str(made.folder)):
        shown = asm("show", what)
        assert "40 tokens" in shown
        assert (f"not as a builder writes it: {named}" in " ".join(shown.split())) is bool(named), shown
        assert shown.count("unknown") == unknown, shown
        assert asm.json("show", what)["card"] == {"schema": CARD_SCHEMA} | fields


def test_nothing_that_a_terminal_would_obey_is_shown_of_a_card(asm: Asm, make: Any) -> None:
    made, bad = make(), "a\x1b[31mb\x07c\x9bd\u202ee\nf\ud800g"
    card = {"schema": CARD_SCHEMA, "source": bad, "model": {"name": bad}, "fit_on": bad, "fidelity": {bad: {"kl": bad}}}
    (made.folder / "card.json").write_text(json.dumps(card | {"calibration": {bad: 1}}))
    asm("publish", str(made.folder))
    shown = asm("show", "rules")
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert "a\ufffd[31mb\ufffdc\ufffdd\ufffde f\ufffdg" in shown
    (made.folder / "card.json").write_text(json.dumps(card | {"source": "long " * 5000}))
    assert len(asm("show", str(made.folder))) < 10_000


def test_of_a_folder_and_a_name_alike_it_is_said_which_is_shown(
    asm: Asm, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, kept = make(seed=1), make(seed=2)
    asm("publish", str(kept.folder))
    here.folder.rename(tmp_path / "rules")
    monkeypatch.chdir(tmp_path)

    def show(what: str) -> tuple[str, str]:
        run = CliRunner().invoke(app, ["show", what, "--store", asm.address], env=NARROW, catch_exceptions=False)
        return run.stdout, run.stderr

    shown, told = show("rules")
    assert here.version[:12] in shown
    assert "this is the folder ./rules; what a store keeps under that name: treadle asm show rules@VERSION" in told
    for what, made in (("./rules", here), (f"rules@{kept.version[:12]}", kept)):
        shown, told = show(what)
        assert (made.version[:12] in shown, told) == (True, "")


@pytest.mark.parametrize(
    ("grouping", "layers", "words"),
    [
        (Grouping.SHARED, (0, 1, 2, 3), "16 a layer, in all 4 layers"),
        (Grouping.INDIVIDUAL, (0, 2), "16 a codebook, 2 codebooks a layer, in 2 of 4 layers"),
    ],
)
def test_entries_are_counted_in_words(
    asm: Asm, make: Any, plain: Any, grouping: Grouping, layers: tuple[int, ...], words: str
) -> None:
    made = make(settings=replace(plain, grouping=grouping), layers=layers)
    assert words in asm("show", str(made.folder))


def test_a_folder_that_is_not_there_is_said_beside_what_the_store_says(asm: Asm) -> None:
    with pytest.raises(
        NotFound, match=r"^there is no folder 'ruels' here, nor could the store .*ruels: the store keeps no such version"
    ):
        asm("show", "ruels")
    with pytest.raises(InvalidArgument, match=r"^there is no folder 'My Rules' here, nor could the store .*a name is"):
        asm("show", "My Rules")
    with socket.socket() as nobody:  # bound, and nobody listens
        nobody.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*nobody.getsockname())
        with pytest.raises(
            Unavailable, match=rf"^there is no folder 'ruels' here, nor could the store {address} show it: .*does not answer"
        ):
            Asm(address)("show", "ruels")


def test_a_version_is_brought_out_and_the_folder_is_as_it_was(asm: Asm, make: Any, tmp_path: Path) -> None:
    made = make()
    asm("publish", str(made.folder))
    document = asm.json("get", "rules", str(tmp_path / "out"))
    assert document["folder"] == str(tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == {
        path.name: path.read_bytes() for path in made.folder.iterdir()
    }


def test_pins_end_by_themselves_or_by_unpin(asm: Asm, make: Any) -> None:
    asm("publish", str(make().folder))
    assert "kept until" in asm("pin", "rules", "--ttl", "2h")
    assert "until" in asm("ls")
    assert asm.json("pin", "rules", "--ttl", "3h")["pinned_until_seconds"] > asm.json("ls")[0]["used_at_seconds"]
    assert "pinned no more" in asm("unpin", "rules")
    assert asm.json("ls")[0]["pinned_until_seconds"] == 0


def test_a_prefix_grows_by_a_chunk(asm: Asm, make: Any, plain: Any) -> None:
    base = make(settings=plain)
    (base.folder / "card.json").write_text(json.dumps({"schema": CARD_SCHEMA, "model": {"name": "some-model"}}))
    asm("publish", str(base.folder))
    chunk = make(name="chunk", settings=plain, seed=3, prefix_text="more", tokens=24, first=40)
    told, which = asm("publish", str(chunk.folder)), f"chunk@{chunk.version[:12]}"
    assert f"treadle asm extend NAME {which}" in told
    assert '"prefix"' not in told
    assert "24 tokens behind 40" in asm("show", which)
    for words in (("promote", which), ("publish", str(chunk.folder), "--promote")):
        with pytest.raises(InvalidArgument, match="it is no prefix"):
            asm(*words)
    assert "treadle asm promote rules@" in asm("extend", "rules", which)
    document = asm.json("extend", "rules", which, "--promote")
    assert (document["prefix_tokens"], document["current"]) == (64, True)
    shown = asm("show", "rules")
    for part in (f"of {base.version[:12]}, {chunk.version[:12]}", "for some-model", "on what its parts were measured on"):
        assert part in shown, shown
    median = float(base.tensors["layers.0.cosine_quantiles"][:, 50].min())  # the same traces looked at both
    assert asm.json("show", "rules")["card"]["fit"]["0"]["median"] == pytest.approx(median, abs=1e-4)
    assert f"{median:.3f}" in shown


def test_status_tells_room_and_replica(asm: Asm, make: Any) -> None:
    asm("publish", str(make().folder))
    assert "1 versions" in asm("status")
    assert asm.json("status")["versions"] == 1


def test_a_key_is_asked_for_by_the_option_to_give(start_store: Any, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# of the store\nsesame\n")
    keys.chmod(0o600)
    with start_store(tmp_path / "data", "--api-key-file", str(keys)) as process:
        asm = Asm(process.address)
        with pytest.raises(AccessDenied, match="give --api-key-file FILE"):
            asm("ls")
        assert asm.json("ls", "--api-key-file", str(keys)) == []
        with pytest.raises(NotFound, match="cannot be read"):
            asm("ls", "--api-key-file", str(tmp_path / "nowhere"))
        with pytest.raises(InvalidArgument, match="--tls-root-file"):
            asm("ls", "--tls-client-file", str(keys))


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800), ("30", 30), ("1.5h", 5400)])
def test_durations_are_written_as_people_do(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "-1s", "soon", "5w"])
def test_what_is_no_duration_is_told_so(text: str) -> None:
    with pytest.raises(InvalidArgument, match="90s, 15m, 2h or 7d"):
        seconds_of(text)


def test_help_loads_neither_grpc_nor_torch() -> None:
    script = (
        "import sys\nfrom typer.testing import CliRunner\nfrom asm_store.commands import app\n"
        "assert 'publish' in CliRunner().invoke(app, ['--help']).stdout\n"
        "print([name for name in ('torch', 'grpc', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "[]"

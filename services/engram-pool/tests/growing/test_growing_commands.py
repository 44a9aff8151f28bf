"""`treadle engram` as a person types it, on a model small enough for a test."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from engram_pool.growing import growth
from engram_pool.growing.commands import app
from engram_pool.growing.corpus import read_text
from engram_pool.growing.optimiser import RowAdagrad
from treadle.contract.errors import DataLoss, FingerprintMismatch, TreadleError

NAMES = ["Abel", "Cain", "Seth", "Enosh", "Kenan", "Jared", "Enoch", "Noah", "Shem", "Ham", "Japheth", "Terah"]


def genealogy(count: int, seed: int = 0, shift: int = 3) -> str:
    draw = np.random.default_rng(seed)
    pairs = draw.integers(0, len(NAMES), (count, 2))
    return (
        "\n".join(
            f"{NAMES[a]} begat {NAMES[(5 * a + shift) % 12]} and {NAMES[b]} saw {NAMES[(a + 7 * b) % 12]} ." for a, b in pairs
        )
        + "\n"
    )


SIZES = ["--layers", "1,2", "--heads", "2", "--prime-base", "101", "--threads", "1"]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a process of its own, which must succeed."""
    command = [sys.executable, "-m", "treadle.cli", "engram", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done


def document(*arguments: str) -> Any:
    """What a command prints with --json, run in this process."""
    done = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("growing")
    (place / "text.txt").write_text(genealogy(9000), encoding="utf-8")
    (place / "more.txt").write_text(genealogy(1500, seed=4), encoding="utf-8")
    (place / "new.txt").write_text(genealogy(2500, seed=5, shift=8), encoding="utf-8")  # who begat whom is another story
    (place / "other.txt").write_text("the fish swam far away .\n" * 500, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def memory(place: Path, model_folder: Path) -> Path:
    done = run(
        "grow",
        "--model",
        str(model_folder),
        "--text",
        "text.txt",
        "--mix",
        "other.txt",
        "--name",
        "names",
        *SIZES,
        "--json",
        cwd=place,
    )
    card = json.loads(done.stdout)
    assert card["perplexity"]["held_out"]["on"] < card["perplexity"]["held_out"]["off"]
    assert set(card["perplexity"]["other_text"]) >= {"off", "on"}
    assert card["text"]["names"] == ["text.txt"]
    assert "most of what so little text gives is its style" in done.stderr
    return place / "names"


def test_a_memory_grows_from_a_text_and_its_card_says_how(memory: Path) -> None:
    shown = run("card", str(memory), cwd=memory.parent).stdout
    assert "text.txt" in shown
    assert "perplexity, held out" in shown
    card = json.loads(run("card", str(memory), "--json", cwd=memory.parent).stdout)
    assert card["recipe"]["layers"] == [1, 2]
    assert card["precision"] == "int4"


def test_eval_tells_the_memory_from_its_shuffled_rows(memory: Path, model_folder: Path) -> None:
    text = str(memory.parent / "more.txt")
    without, on, wrong = document("eval", str(memory), "--text", text, "--model", str(model_folder), "--threads", "1")
    assert without["ratio"] == 1.0
    assert on["ratio_ci95"][1] < 0.95
    assert wrong["ratio"] > on["ratio"]


def test_add_makes_a_new_version_with_the_same_projections(memory: Path, model_folder: Path) -> None:
    base, text, second = (
        ["--model", str(model_folder), "--threads", "1"],
        str(memory.parent / "new.txt"),
        memory.parent / "names-2",
    )
    card = document("add", str(memory), "--text", text, "--out", str(second), "--passes", "4", *base)
    old = json.loads((memory / "card.json").read_text())
    assert card["parent"] == {"name": "names", "version": old["version"]}
    assert card["version"] != old["version"]
    assert (second / "fusion.safetensors").read_bytes() == (memory / "fusion.safetensors").read_bytes()
    lines = document("compare", str(memory), str(second), "--text", text, *base)
    assert [line["memory"].split()[0] for line in lines] == ["without", "names", "names"]
    assert lines[2]["perplexity"] < lines[1]["perplexity"]


def test_a_killed_growth_goes_on_and_ends_with_the_same_version(place: Path, memory: Path, model_folder: Path) -> None:
    arguments = [
        "grow",
        "--model",
        str(model_folder),
        "--text",
        "text.txt",
        "--mix",
        "other.txt",
        "--name",
        "names",
        "--out",
        "again",
        *SIZES,
    ]
    command = [sys.executable, "-m", "treadle.cli", "engram", *arguments]
    process = subprocess.Popen(
        command, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert process.stderr is not None
    deadline = time.monotonic() + 60
    for line in process.stderr:
        if "step" in line or time.monotonic() > deadline:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not (place / "again").exists()
    done = run(*arguments, "--json", cwd=place)
    assert "going on from step" in done.stderr
    assert json.loads(done.stdout)["version"] == json.loads((memory / "card.json").read_text())["version"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grow", "--text", "latin.txt", "--name", "x"], "not UTF-8"),
        (["grow", "--text", "short.txt", "--name", "x"], "too few"),
        (["grow", "--text", "text.txt", "--name", "names"], "is there already"),
        (["grow", "--text", "text.txt", "--name", "x", "--layers", "1,99"], "the model has 4 layers"),
        (["grow", "--text", "text.txt", "--name", "x", "--layers", "one"], "--layers: numbers"),
        (["grow", "--text", "text.txt", "--name", "x", "--precision", "int3"], "precision"),
        (["grow", "--text", "text.txt", "--name", "x", "--dim", "8"], "dim: 8 values in int4 make rows of 6 bytes"),
        (["grow", "--text", "text.txt", "--name", "x", "--device", "tpu"], "--device: cpu, cuda or cuda:N"),
        (["grow", "--text", "text.txt", "--name", "x", "--device", "cuda:99"], "sees"),
        (["grow", "--text", "text.txt", "--name", "none"], "means something else"),
        (["grow", "--text", "utf16.txt", "--name", "x"], "UTF-16"),
        (["grow", "--text", "text.txt", "--text", "text.txt", "--name", "x"], "the same text as text.txt"),
        (["grow", "--text", "text.txt", "same.txt", "--name", "x"], "same.txt: the same text as text.txt"),
        (["grow", "--text", "text.txt", "--held-out", "same.txt", "--name", "x"], "the same text as text.txt"),
        (["grow", "--text", "text.txt", "--mix", "short.txt", "--name", "x"], "to mix in"),
        (["grow", "--text", "text.txt", "--mix", "other.txt", "--no-mix", "--name", "x"], "--mix and --no-mix"),
        (["grow", "--text", "text.txt", "--name", "x", "--out", "text.txt/x"], "--out"),
        (["eval", "nowhere", "--text", "text.txt"], "nowhere"),
    ],
)
def test_bad_input_is_refused_before_any_work(
    place: Path, memory: Path, model_folder: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert memory.is_dir()
    monkeypatch.chdir(place)
    (place / "latin.txt").write_bytes("Ünïcode ".encode("latin-1") * 100)
    (place / "short.txt").write_text("too short", encoding="utf-8")
    (place / "utf16.txt").write_bytes("Sixteen bits of each letter. ".encode("utf-16-le") * 100)
    (place / "same.txt").write_bytes((place / "text.txt").read_bytes())
    with pytest.raises(TreadleError, match=re.escape(message)):
        CliRunner().invoke(app, [*arguments, "--model", str(model_folder), "--threads", "1"], catch_exceptions=False)
    assert not (place / "x").exists()


def test_several_passes_are_warned_of(place: Path, model_folder: Path) -> None:
    done = CliRunner().invoke(
        app,
        [
            "grow", "--model", str(model_folder), "--text", str(place / "more.txt"), "--no-mix", "--name", "twice", "--out",
            str(place / "twice"), "--passes", "2", *SIZES,
        ],
        catch_exceptions=False,
    )  # fmt: skip
    assert done.exit_code == 0
    assert "warning: 2 passes" in done.stderr


def test_an_interrupt_waits_for_the_end_of_its_step(
    place: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half an update in the checkpoint would be done twice when the run goes on."""
    arguments = ["grow", "--model", str(model_folder), "--text", str(place / "more.txt"), "--no-mix", "--name", "held", *SIZES]
    whole = document(*arguments, "--out", str(place / "held-whole"))
    step = RowAdagrad.step

    def interrupted_step(self: RowAdagrad, *args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        step(self, *args)

    monkeypatch.setattr(RowAdagrad, "step", interrupted_step)
    stopped = CliRunner().invoke(app, [*arguments, "--out", str(place / "held-again")])
    assert stopped.exit_code != 0
    assert "interrupted behind step 1 of" in stopped.stderr
    monkeypatch.undo()
    assert document(*arguments, "--out", str(place / "held-again"))["version"] == whole["version"]


def test_a_checkpoint_of_another_model_or_mix_is_refused(place: Path, model_folder: Path, tmp_path: Path) -> None:
    (place / "mix-1.txt").write_text("the fish swam far away .\n" * 900, encoding="utf-8")
    (place / "mix-2.txt").write_text("the bird flew very high .\n" * 900, encoding="utf-8")
    other_model = tmp_path / "other"
    shutil.copytree(model_folder, other_model)
    weights = load_file(other_model / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other_model / "model.safetensors", {"format": "pt"})

    def grow(model: Path, mix: str) -> Any:
        arguments = ["--model", str(model), "--text", str(place / "more.txt"), "--mix", str(place / mix), "--name", "tied", *SIZES]
        return CliRunner().invoke(app, ["grow", *arguments, "--out", str(place / "tied")], catch_exceptions=False)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(RowAdagrad, "step", lambda *_: signal.raise_signal(signal.SIGINT))
        assert grow(model_folder, "mix-1.txt").exit_code != 0
    with pytest.raises(FingerprintMismatch, match="blocks"):
        grow(model_folder, "mix-2.txt")
    with pytest.raises(FingerprintMismatch, match="model"):
        grow(other_model, "mix-1.txt")


def test_what_is_odd_about_a_text_is_said(place: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "KNOWN_PERPLEXITY", 1e9)
    (place / "twice.txt").write_text(genealogy(1500, seed=9) * 2, encoding="utf-8")
    arguments = ["--model", str(model_folder), "--text", str(place / "twice.txt"), "--no-mix", "--tokens", "999999", *SIZES]
    done = CliRunner().invoke(app, ["grow", *arguments, "--name", "odd", "--out", str(place / "odd")], catch_exceptions=False)
    for remark in (
        "mostly seen this text already",
        "word for word",
        "most of what so little text gives",
        "--tokens 999999: the text has",
    ):
        assert remark in done.stderr
    card = json.loads((place / "odd" / "card.json").read_text())
    assert 0 < card["tokens_learnt"] == card["text"]["train_tokens"]
    assert "other_text" in card["perplexity"]


def test_a_card_changed_by_hand_and_a_memory_of_another_model_are_refused(
    memory: Path, model_folder: Path, tmp_path: Path, place: Path
) -> None:
    (tmp_path / "card.json").write_text('{"name": "a"}')
    with pytest.raises(DataLoss, match="engram-card"):
        CliRunner().invoke(app, ["card", str(tmp_path)], catch_exceptions=False)
    (tmp_path / "card.json").write_text('{"schema": "treadle.engram-card/1", "name": "a"}')
    with pytest.raises(DataLoss, match="version, precision"):
        CliRunner().invoke(app, ["card", str(tmp_path)], catch_exceptions=False)
    narrow = tmp_path / "narrow"
    shutil.copytree(model_folder, narrow)
    config = json.loads((narrow / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(config | {"hidden_size": config["hidden_size"] // 2}))
    with pytest.raises(FingerprintMismatch, match="hidden size"):
        CliRunner().invoke(
            app,
            ["eval", str(memory), "--text", str(place / "new.txt"), "--model", str(narrow), "--threads", "1"],
            catch_exceptions=False,
        )


def test_a_byte_order_mark_and_foreign_line_ends_are_not_learnt(tmp_path: Path) -> None:
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_text(tmp_path / "marked.txt") == "one\ntwo\n"

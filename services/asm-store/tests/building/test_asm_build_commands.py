"""`treadle asm build`, `show` and `eval` as a user types them, on the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asm_store.building.chat import chat_wrap
from asm_store.commands import app
from treadle.contract.dictionary_file import read_manifest
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, NotFound

WORDS = ("the salary cap", "a trade", "the draft", "an exception", "a free agent", "the roster", "a contract", "the season")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with a prefix in two files, traces and questions."""
    (tmp_path / "rules.txt").write_text("Rule 1: the salary cap binds a trade.\n")
    (tmp_path / "more.txt").write_text("Rule 2: the draft comes first.\n")
    lines = [{"prompt": f"May {one} follow ", "answer": other} for one in WORDS for other in WORDS[:4]]
    (tmp_path / "traces.jsonl").write_text("\n".join(map(json.dumps, lines)))
    questions = [{"prompt": f"May {one} ", "choices": ["yes", "no"], "answer": "no"} for one in WORDS] + [
        {"prompt": "Then ", "answer": "a trade"},
        {"prompt": "Or "},
    ]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, questions)))
    return tmp_path


def build_arguments(texts: Path, model: Path, *more: str) -> list[str]:
    return [
        "build", "--model", str(model), "--prefix", str(texts / "rules.txt"), "--prefix", str(texts / "more.txt"), "--name", "rules",
        "--out", str(texts / "out"), "--entries", "64", "--threads", "1", *more,
    ]  # fmt: skip


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_prefix_is_built_shown_and_asked_about(texts: Path, tiny_folder: Path) -> None:
    traces = ("--traces", str(texts / "traces.jsonl"))
    printed = run(*build_arguments(texts, tiny_folder, *traces, "--keep-prefix-kv", "--source", "our own words"))
    assert "treadle asm publish" in printed
    shown = run("show", str(texts / "out"))
    for part in ("69 tokens; our own words", "64 a layer, in all 3 layers", "with dictionary", "median cosine"):
        assert part in shown, shown
    document = json.loads(run("show", str(texts / "out"), "--json"))
    assert document["prefix_kv_file_bytes"] > 0
    file = texts / "out" / "dictionary.safetensors"
    assert document["sizes"]["storage_bytes"] == file.stat().st_size - padding(file)
    answers = json.loads(
        run(
            "eval",
            str(texts / "out"),
            "--questions",
            str(texts / "questions.jsonl"),
            "--model",
            str(tiny_folder),
            "--threads",
            "1",
            "--json",
        )
    )
    assert list(answers) == ["full prefix", "dictionary", "nothing"]
    assert answers["full prefix"]["agreement"] == 1.0
    assert answers["full prefix"]["kl"] == 0.0
    assert answers["dictionary"]["questions"] == 10
    assert answers["dictionary"]["kl"] < answers["nothing"]["kl"]
    assert None not in answers["dictionary"].values()


def padding(path: Path) -> int:
    """Bytes of a safetensors file that are no tensor of the dictionary."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, list[int]]] = json.loads(file.read(length))
    pads = [of["data_offsets"] for name, of in header.items() if name.startswith("pad.")]
    return 8 + length + sum(end - begin for begin, end in pads)


def test_without_kept_kv_questions_need_the_prefixes_text(texts: Path, tiny_folder: Path) -> None:
    run(*build_arguments(texts, tiny_folder, "--traces", str(texts / "traces.jsonl")))
    asking = (
        "eval",
        str(texts / "out"),
        "--questions",
        str(texts / "questions.jsonl"),
        "--model",
        str(tiny_folder),
        "--threads",
        "1",
    )
    with pytest.raises(NotFound, match="--keep-prefix-kv"):
        run(*asking)
    with pytest.raises(InvalidArgument, match="not the ones it was built from"):
        run(*asking, "--prefix", str(texts / "rules.txt"))
    assert "agreement" in run(*asking, "--prefix", str(texts / "rules.txt"), "--prefix", str(texts / "more.txt"))


def test_the_model_writes_traces_where_none_are_given(texts: Path, tiny_folder: Path) -> None:
    card = json.loads(run(*build_arguments(texts, tiny_folder, "--self-traces", "20", "--json")))
    assert card["calibration"]["written_by_the_model"] is True
    assert card["calibration"]["traces"] + card["calibration"]["held_out_traces"] == 20


def test_a_further_chunk_takes_the_settings_of_its_base(texts: Path, tiny_folder: Path) -> None:
    traces = ("--traces", str(texts / "traces.jsonl"))
    run(*build_arguments(texts, tiny_folder, *traces, "--heads-joined", "2", "--lists", "4", "--matched-keys", "0"))
    (texts / "chunk.txt").write_text("Rule 3: the season is long.\n")
    run(
        "build",
        "--model",
        str(tiny_folder),
        "--prefix",
        str(texts / "chunk.txt"),
        "--name",
        "rules",
        "--out",
        str(texts / "chunk"),
        "--extend-from",
        str(texts / "out"),
        *traces,
    )
    shown = [json.loads(run("show", str(texts / name), "--json")) for name in ("out", "chunk")]
    assert shown[0]["settings"] == shown[1]["settings"]
    assert shown[1]["card"]["base"] == shown[0]["version"]


def test_an_extended_version_is_asked_about_beside_the_whole_text(texts: Path, tiny_folder: Path, start_store: Any) -> None:
    (texts / "chunk.txt").write_text("Rule 3: the season is long.\n")
    files = [word for name in ("rules", "more", "chunk") for word in ("--prefix", str(texts / f"{name}.txt"))]
    traces, plain = ("--traces", str(texts / "traces.jsonl")), ("--matched-keys", "0", "--entries", "32")
    run(*build_arguments(texts, tiny_folder, *traces, *plain))
    model, out = ("--model", str(tiny_folder), "--threads", "1"), texts / "out"
    run("build", *model, *files[4:], "--name", "chunk", "--out", str(texts / "chunk"), "--extend-from", str(out), *traces)
    run("build", *model, *files, "--name", "whole", "--out", str(texts / "whole"), *traces, *plain)
    with start_store(texts / "data") as process:
        for name in ("out", "chunk"):
            run("publish", str(texts / name), "--store", process.address)
        chunk = read_manifest(texts / "chunk")
        run("extend", "rules", f"chunk@{chunk.version}", "--promote", "--store", process.address)
        run("get", "rules", str(texts / "extended"), "--store", process.address)

    def ask(name: str, *more: str) -> Any:
        asked = ("--questions", str(texts / "questions.jsonl"), *model, "--json")
        return json.loads(run("eval", str(texts / name), *asked, *more))

    extended, whole = ask("extended", *files), ask("whole", *files)
    assert extended["full prefix"] == whole["full prefix"]
    assert extended["nothing"] == whole["nothing"]
    assert extended["dictionary"]["kl"] < extended["nothing"]["kl"]
    with pytest.raises(NotFound, match="give the texts of its 2 parts, in order"):
        ask("extended")
    with pytest.raises(InvalidArgument, match=r"--prefix: .*part 2 of 2"):
        ask("extended", *files[:4])
    with pytest.raises(InvalidArgument, match=r"--prefix: .*part 1 of 2"):
        ask("extended", *files[2:], *files[:2])
    with pytest.raises(InvalidArgument, match=r"--prefix: .* 1 more than it was built from"):
        ask("extended", *files, *files[4:])
    with pytest.raises(InvalidArgument, match="it is no prefix"):
        ask("chunk", *files[4:])
    card = texts / "extended" / "card.json"
    assert json.loads(card.read_text())["model"]["name"] == "tiny"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--self-traces", "20", "--layers", "0,x"), "--layers: numbers"),
        (("--self-traces", "20", "--layers", "0,7"), "the model has 3"),
        (("--self-traces", "20", "--heads-joined", "3"), "divides the 2 query heads"),
        (("--self-traces", "1", "--entries", "9999"), "9999 entries need"),
        (("--traces", "/nowhere"), "/nowhere: no such text file"),
        (("--traces", "/nowhere", "--self-traces", "3"), "one of them"),
        (("--self-traces", "20", "--chat"), "--chat: writes the prompts of --traces"),
    ],
)  # fmt: skip
def test_what_cannot_be_built_is_refused_in_plain_words(
    texts: Path, tiny_folder: Path, more: tuple[str, ...], message: str
) -> None:
    with pytest.raises((InvalidArgument, NotFound), match=message):
        run(*build_arguments(texts, tiny_folder, *more))


def test_a_model_without_a_chat_template_cannot_write_chats(texts: Path, tiny_folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no chat template"):
        run(*build_arguments(texts, tiny_folder, "--traces", str(texts / "traces.jsonl"), "--chat"))


def test_prompts_are_written_as_the_models_chat_template_does(smollm2_folder: Path) -> None:
    written = chat_wrap(smollm2_folder)("May I?")
    assert "<|im_start|>user\nMay I?<|im_end|>" in written
    assert written.endswith("<|im_start|>assistant\n")


def test_another_models_dictionary_is_refused_by_the_field(texts: Path, tiny_folder: Path, smollm2_folder: Path) -> None:
    run(*build_arguments(texts, tiny_folder, "--traces", str(texts / "traces.jsonl")))
    with pytest.raises(FingerprintMismatch, match="model"):
        run(
            "eval",
            str(texts / "out"),
            "--questions",
            str(texts / "questions.jsonl"),
            "--model",
            str(smollm2_folder),
            "--threads",
            "1",
        )


def test_a_line_of_questions_that_is_wrong_is_named(texts: Path, tiny_folder: Path) -> None:
    run(*build_arguments(texts, tiny_folder, "--traces", str(texts / "traces.jsonl")))
    for line, message in (
        ('{"prompt": "a", "choices": ["b"]}', "2 to 1024 choices"), ('{"prompt": "a", "choices": ["b", "c"], "answer": "d"}', "none of the choices"),
        ('{"ask": 1}', "expected"), ("x", "not JSON"),
    ):  # fmt: skip
        (texts / "wrong.jsonl").write_text(line)
        with pytest.raises(InvalidArgument, match=f"wrong.jsonl line 1: .*{message}"):
            run(
                "eval", str(texts / "out"), "--questions", str(texts / "wrong.jsonl"), "--model", str(tiny_folder), "--threads", "1"
            )


def test_the_command_loads_no_torch_until_it_builds() -> None:
    program = "import sys; import asm_store.commands; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=60, check=False).returncode == 0

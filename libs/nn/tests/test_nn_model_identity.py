"""Which model a folder holds, in a dictionary's words."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from treadle.contract.dictionary import DictionaryModel
from treadle.contract.errors import FingerprintMismatch, NotFound
from treadle.nn import model_identity
from treadle.nn.config import ModelConfig
from treadle.nn.model_identity import RECORD, dictionary_model
from treadle.nn.weights import weight_files, weights_digest


@pytest.fixture
def folder(make_tiny: Callable[[str], Path], tmp_path: Path) -> Path:
    """A model of several shards with a tokenizer, for this test alone."""
    copy = tmp_path / "model"
    shutil.copytree(make_tiny("llama"), copy)
    (copy / "tokenizer.json").write_text('{"model": {}}')
    return copy


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as settled at once."""
    monkeypatch.setattr(model_identity, "SETTLED_NS", -(10**12))


def identity(folder: Path) -> DictionaryModel:
    return dictionary_model(folder, ModelConfig.from_folder(folder))


def test_a_folder_and_its_copy_are_the_same_model(folder: Path, tmp_path: Path) -> None:
    there = identity(folder)
    assert (there.layers, there.heads, there.kv_heads, there.head_dim) == (3, 4, 2, 16)
    assert there.tokenizer == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    shutil.copytree(folder, tmp_path / "copy")
    assert identity(tmp_path / "copy") == there


def test_what_differs_is_named_and_what_states_do_not_depend_on_does_not_count(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    there = dictionary_model(folder, config)
    assert dictionary_model(folder, replace(config, positions_max=99, eos_token_ids=())) == there
    turned = dictionary_model(folder, replace(config, rope_theta=500_000.0))
    assert turned.rope != there.rope
    assert dictionary_model(folder, replace(config, norm_eps=1e-5)).rope == there.rope
    assert dictionary_model(folder, replace(config, norm_eps=1e-5)).digest != there.digest
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE"}}')
    with pytest.raises(FingerprintMismatch, match=r"model\.tokenizer"):
        identity(folder).fingerprint.require(there.fingerprint.as_dict())


def test_a_changed_weight_is_another_model_whatever_the_record_says(folder: Path, settled: None) -> None:
    there = identity(folder)
    assert (folder / RECORD).is_file()
    shard = weight_files(folder)[0]
    stat = shard.stat()
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as if it had never been written
    assert identity(folder).digest != there.digest


def test_weights_are_read_once_and_again_only_when_the_record_is_no_good(
    folder: Path, settled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read(at: Path) -> str:
        reads.append(at)
        return weights_digest(at)

    monkeypatch.setattr(model_identity, "weights_digest", read)
    there = identity(folder)
    assert identity(folder) == there
    assert len(reads) == 1
    for damaged in ("", "[]", "{", json.dumps({"files": {}, "digest": "0" * 64}), json.dumps({"digest": 3})):
        (folder / RECORD).write_text(damaged)
        reads.clear()
        assert identity(folder) == there
        assert len(reads) == 1


def test_young_files_and_folders_that_cannot_be_written_leave_no_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = identity(folder)  # written a moment ago
    assert not (folder / RECORD).exists()
    monkeypatch.setattr(model_identity, "SETTLED_NS", -(10**12))

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("read-only file system")

    monkeypatch.setattr(Path, "write_text", refused)
    assert identity(folder) == there
    assert not (folder / RECORD).exists()


def test_a_folder_without_weights_or_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"tokenizer\.json"):
        identity(folder)
    (folder / "tokenizer.json").write_text("{}")
    for path in weight_files(folder):
        path.unlink()
    with pytest.raises(NotFound):
        identity(folder)

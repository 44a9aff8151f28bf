"""A dictionary's manifest and its file: what fits, what is refused in which words, and what comes back."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Grouping,
    Positions,
    Prefix,
    RowDtype,
)  # fmt: skip
from treadle.contract.dictionary_file import (
    CARD_FILE,
    MANIFEST_FILE,
    TENSORS_FILE,
    check_digests,
    map_tensors,
    read_manifest,
    tensor_info,
    write_folder,
)  # fmt: skip
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound

DIGEST = "ab" * 32
MODEL = DictionaryModel(DIGEST, DIGEST, DIGEST, layers=3, heads=6, kv_heads=2, head_dim=4)


def arrays(dictionary_shapes: Any) -> dict[str, NDArray[Any]]:
    random = np.random.default_rng(0)
    made = {}
    for name, (dtype, shape) in dictionary_shapes:
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "I32": np.int32}[dtype]
        made[name] = random.integers(0, 100, shape).astype(kind)
    return made


def sample(**settings: Any) -> tuple[Dictionary, dict[str, NDArray[Any]]]:
    class Shapes(Dictionary):
        def __post_init__(self) -> None:
            pass

    parts: dict[str, Any] = {
        "name": "rules", "model": MODEL, "layers": (0, 2), "prefix": Prefix(DIGEST, 10, (6, 4)),
        "calibration": Calibration(DIGEST, 2, 30), "settings": DictionarySettings(entries=5, **settings),
    }  # fmt: skip
    shapes = dict(Shapes(**parts, tensors=()).tensor_shapes())
    tensors = arrays(shapes.items())
    infos = tuple((name, tensor_info(array, shapes[name][0])) for name, array in sorted(tensors.items()))
    return Dictionary(**parts, tensors=infos), tensors


@pytest.mark.parametrize("dtype", list(RowDtype))
@pytest.mark.parametrize("lists", [0, 2])
def test_a_folder_gives_back_what_was_written(tmp_path: Path, dtype: RowDtype, lists: int) -> None:
    dictionary, tensors = sample(dtype=dtype, lists=lists, ridge_ppm=1000)
    write_folder(tmp_path, dictionary, tensors, b"{}")
    found = read_manifest(tmp_path)
    assert found == dictionary
    assert found.version == dictionary.version
    views = map_tensors(tmp_path / TENSORS_FILE, found)
    assert views.keys() == tensors.keys()
    for name, view in views.items():
        np.testing.assert_array_equal(view, tensors[name])
        assert not view.flags.writeable
        assert view.ctypes.data % 64 == 0 or view.nbytes == 0, name
    check_digests(views, found)


def test_all_of_a_folder_is_on_the_disk_before_its_manifest_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dictionary, tensors = sample()
    fsync, synced = os.fsync, list[tuple[str, bool]]()

    def noted(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, (tmp_path / MANIFEST_FILE).exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    write_folder(tmp_path, dictionary, tensors, b"{}")
    manifest = f".{MANIFEST_FILE}.partial"
    before = [(name, False) for name in (TENSORS_FILE, CARD_FILE, manifest, tmp_path.name)]
    assert synced == [*before, (tmp_path.name, True)]
    assert {path.name for path in tmp_path.iterdir()} == {TENSORS_FILE, CARD_FILE, MANIFEST_FILE}


def test_safetensors_itself_reads_the_file(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    dictionary, tensors = sample()
    write_folder(tmp_path, dictionary, tensors)
    loaded = load_file(tmp_path / TENSORS_FILE)
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array)


def test_a_flipped_bit_names_its_tensor(tmp_path: Path) -> None:
    dictionary, tensors = sample()
    write_folder(tmp_path, dictionary, tensors)
    views = {name: array.copy() for name, array in map_tensors(tmp_path / TENSORS_FILE, dictionary).items()}
    views["layers.2.log_z"].view(np.uint8).flat[3] ^= 1
    with pytest.raises(DataLoss, match=r"layers\.2\.log_z"):
        check_digests(views, dictionary)


def test_what_was_extended_names_its_parts_and_what_was_not_is_written_as_ever() -> None:
    plain, _ = sample()
    assert set(plain.to_manifest()["prefix"]) == {"digest", "tokens", "chunks"}
    assert "prefix.parts" not in plain.fingerprint.as_dict()
    joined = replace(plain, prefix=replace(plain.prefix, parts=("ab" * 32, "cd" * 32)))
    for dictionary in (plain, joined):
        assert Dictionary.from_json(dictionary.to_json()) == dictionary
    assert joined.version != plain.version


def test_a_further_chunk_says_where_it_was_read_and_is_no_prefix_by_itself() -> None:
    whole, _ = sample()
    whole.require_whole()
    assert "prefix.first" not in whole.fingerprint.as_dict()
    chunk = replace(whole, prefix=replace(whole.prefix, first=40))
    assert chunk.to_manifest()["prefix"]["first"] == 40
    assert Dictionary.from_json(chunk.to_json()) == chunk
    assert chunk.version != whole.version
    with pytest.raises(InvalidArgument, match="further chunk alone, read behind 40 tokens"):
        chunk.require_whole()
    with pytest.raises(InvalidArgument, match=r"prefix\.first"):
        replace(chunk.prefix, parts=("ab" * 32, "cd" * 32))


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_torn_file_is_refused(tmp_path: Path, length: int) -> None:
    dictionary, tensors = sample()
    write_folder(tmp_path, dictionary, tensors)
    path = tmp_path / TENSORS_FILE
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DataLoss):
        map_tensors(path, dictionary)


def test_a_folder_without_a_manifest_says_what_makes_one(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="treadle asm build"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("[]")
    with pytest.raises(InvalidArgument, match="object"):
        read_manifest(tmp_path)


def test_heads_are_joined_within_a_group_or_over_all_groups() -> None:
    alone, _ = sample(grouping=Grouping.INDIVIDUAL, heads_joined=3)
    assert alone.heads_of_lookups == (((0, 1, 2),), ((3, 4, 5),))
    single, _ = sample(grouping=Grouping.INDIVIDUAL, heads_joined=1)
    assert single.heads_of_lookups == (((0,), (1,), (2,)), ((3,), (4,), (5,)))
    shared, _ = sample(grouping=Grouping.SHARED, heads_joined=1)
    assert shared.heads_of_lookups == (((0, 3), (1, 4), (2, 5)),)
    assert (shared.codebooks, shared.entry_heads, shared.key_dim) == (1, 2, 8)
    with pytest.raises(InvalidArgument, match="heads_joined"):
        sample(heads_joined=2)


def test_a_tensor_of_another_shape_is_named() -> None:
    dictionary, _ = sample()
    info = dict(dictionary.tensors)
    info["layers.0.log_z"] = replace(info["layers.0.log_z"], shape=(1, 5, 3))
    with pytest.raises(InvalidArgument, match=r"layers\.0\.log_z: shape \[1, 5, 2\] expected, got \[1, 5, 3\]"):
        replace(dictionary, tensors=tuple(info.items()))


def test_another_model_is_refused_by_the_field_that_differs() -> None:
    dictionary, _ = sample()
    other = replace(MODEL, rope="cd" * 32)
    with pytest.raises(FingerprintMismatch, match=r"model\.rope"):
        dictionary.fingerprint.require(other.fingerprint.as_dict())
    dictionary.fingerprint.require(MODEL.fingerprint.as_dict())


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("settings", "log_base"), "2", "log_base"),
        (("settings", "key"), "post-rope", "settings.key"),
        (("prefix", "chunks"), [3, 4], "prefix.chunks"),
        (("prefix", "parts"), [DIGEST] * 3, "prefix.parts"),
        (("prefix", "parts"), ["ab", "cd"], "version"),
        (("prefix", "first"), -1, "prefix.first"),
        (("prefix", "first"), True, "prefix.first"),
        (("model", "kv_heads"), 4, "kv_heads"),
        (("schema",), "treadle.dictionary/2", "schema"),
        (("settings", "lists"), 6, "settings.lists"),
        (("settings", "matched_keys"), -1, "settings.matched_keys"),
        (("settings", "matched_keys"), 3, r"missing \['layers.0.matched_biases'"),
        (("layers",), [2, 0], "layers"),
    ],
)
def test_a_wrong_field_is_named(place: tuple[str, ...], value: object, words: str) -> None:
    dictionary, _ = sample()
    manifest: Any = dictionary.to_manifest()
    target = manifest
    for step in place[:-1]:
        target = target[step]
    target[place[-1]] = value
    with pytest.raises(InvalidArgument, match=words):
        Dictionary.from_manifest(manifest)


def test_matched_keys_stand_where_the_prefix_stood() -> None:
    dictionary, _ = sample(matched_keys=3, dtype=RowDtype.I8)
    infos = dict(dictionary.tensors)
    assert (infos["layers.2.matched_keys"].dtype, infos["layers.2.matched_keys"].shape) == ("BF16", (2, 3, 4))
    assert dict(sample(matched_keys=3, dtype=RowDtype.F32)[0].tensors)["layers.0.matched_values"].dtype == "F32"
    with pytest.raises(InvalidArgument, match="after-prefix"):
        sample(matched_keys=3, positions=Positions.FROM_ZERO)


def test_quantiles_stand_for_every_percent() -> None:
    assert dict(sample()[0].tensor_shapes())["layers.0.cosine_quantiles"] == ("F32", (1, QUANTILES))

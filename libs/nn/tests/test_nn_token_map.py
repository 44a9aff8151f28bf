"""Compressed token ids on the small model's tokenizer and on texts made for the purpose."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from treadle.contract import EngramModel, Family
from treadle.contract.errors import DataLoss, NotFound
from treadle.nn.demo_profile import smollm2_demo_template
from treadle.nn.token_map import compressed_token_map, token_map_digest


def tokenizer_of(texts: list[str], path: Path, special: tuple[str, ...] = ()) -> Path:
    tokenizer = Tokenizer(models.WordLevel({text: number for number, text in enumerate(texts)}, unk_token=texts[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.save(str(path))
    return path


def test_case_accents_compatibility_forms_and_spacing_share_an_id(tmp_path: Path) -> None:
    same = ["the", "The", " THE", "thé", "ｔｈｅ", "the\t\n "]
    other = ["then", "ﬁ", "fi"]
    token_map, size = compressed_token_map(tokenizer_of([*same, *other], tmp_path / "tokenizer.json"))
    assert list(token_map) == [0, 0, 0, 0, 0, 0, 1, 2, 2]
    assert size == 3


def test_a_space_is_not_nothing_and_runs_of_spaces_are_one_space(tmp_path: Path) -> None:
    token_map, size = compressed_token_map(tokenizer_of(["x", " ", "   ", "\n\t", "\u0301", " x "], tmp_path / "tokenizer.json"))
    assert list(token_map) == [0, 1, 1, 1, 2, 0]  # a lone accent normalises to nothing, so it is keyed by itself
    assert size == 3


def test_special_tokens_are_kept_and_undecodable_ones_keyed_by_their_raw_form(tmp_path: Path) -> None:
    path = tokenizer_of(["a", "b\ufffd", "c\ufffd", "A"], tmp_path / "tokenizer.json", special=("<|end|>", "<|END|>"))
    token_map, size = compressed_token_map(path)
    assert list(token_map) == [0, 1, 2, 0, 3, 3]
    assert size == 4


def test_the_small_models_map(smollm2_folder: Path) -> None:
    path = smollm2_folder / "tokenizer.json"
    token_map, size = compressed_token_map(path)
    assert token_map.dtype == np.int32
    assert token_map.shape == (49_152,)
    assert size == 32_873
    firsts = np.unique(token_map, return_index=True)[1]
    assert list(token_map[np.sort(firsts)]) == list(range(size))  # numbered as first seen, without gaps
    tokenizer = Tokenizer.from_file(str(path))
    ids = [tokenizer.token_to_id(text) for text in ("the", "The", "Ġthe", "ĠTHE")]
    assert None not in ids
    assert len(set(ids)) == 4
    assert len({int(token_map[token]) for token in ids}) == 1
    assert int(token_map[tokenizer.token_to_id("<|im_end|>")]) != int(token_map[tokenizer.token_to_id("<|im_start|>")])
    assert token_map_digest(token_map) == hashlib.sha256(b"".join(int(t).to_bytes(4, "little") for t in token_map)).hexdigest()


def test_the_demo_profile_is_what_it_says(smollm2_folder: Path) -> None:
    model, token_map = smollm2_demo_template(smollm2_folder / "tokenizer.json")
    assert (model.name, model.family, model.layers, model.orders, model.heads) == ("smollm2-demo", Family.DEMO, (2, 15), (2, 3), 8)
    assert (model.row.bytes, model.row.dim, model.row.dtype, model.pad_id, model.columns) == (320, 160, "bf16", 2, 16)
    assert model.primes[0][0][0] == 20_011  # the first prime from 20,000 on
    assert 100e6 < model.rows_hashed(2) * 320 < 105e6
    assert model.token_map == token_map_digest(token_map)
    assert model.compressed_vocab_size == 32_873
    assert model.tables == ()
    assert EngramModel.from_json(model.to_json()) == model


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        compressed_token_map(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(DataLoss, match=r"not a tokenizer\.json"):
        compressed_token_map(tmp_path / "tokenizer.json")

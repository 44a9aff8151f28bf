"""The folder: what is written is what is read, the engine's fusion computes what training did, and damage is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engram_pool.growing import folder
from engram_pool.growing.card import CARD_SCHEMA, NEEDED
from engram_pool.growing.evaluation import in_precision
from engram_pool.growing.grower import Grower
from engram_pool.growing.memory import delta
from treadle.contract import EngramModel
from treadle.contract.engram_model import CARD_BYTES_MAX
from treadle.contract.errors import DataLoss, InvalidArgument, NotFound
from treadle.nn.fusion import EngramFusion

CARD: dict[str, Any] = dict.fromkeys(NEEDED) | {"schema": CARD_SCHEMA, "name": "names"}


@pytest.fixture
def written(tmp_path: Path, grown: Grower) -> Path:
    folder.write(tmp_path / "names", grown.memory, "int4", CARD)
    return tmp_path / "names"


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int4"])
def test_a_folder_reads_back_as_the_memory_in_its_precision(tmp_path: Path, grown: Grower, precision: str) -> None:
    model = folder.write(tmp_path / "names", grown.memory, precision, CARD)
    back, served = folder.read(tmp_path / "names"), in_precision(grown.memory, precision)
    assert back.model == model
    assert back.card["version"] == model.version
    assert back.card["sizes"]["rows_bytes"] == (tmp_path / "names" / folder.ROWS).stat().st_size
    for layer, part in served.layers.items():
        assert torch.equal(back.memory.layers[layer].rows, part.rows)
        assert torch.equal(back.memory.layers[layer].wkv, part.wkv)


def test_the_engine_fuses_what_training_added(written: Path, grown: Grower) -> None:
    model = EngramModel.from_json((written / folder.MANIFEST).read_bytes())
    fusion = EngramFusion.load(written / folder.FUSION, model, grown.memory.hidden)
    back, stored = folder.read(written).memory, load_file(written / folder.ROWS)
    ids = back.ids(1, grown.corpus.held_out[:2])
    hidden = torch.randn(len(ids), back.hidden, generator=torch.Generator().manual_seed(2))
    rows = torch.from_numpy(stored["1.rows"][ids.numpy()])
    learnt = delta(back.layers[1], hidden, back.layers[1].rows[ids].flatten(1))
    torch.testing.assert_close(fusion.forward(1, hidden, rows), learnt, rtol=1e-4, atol=1e-6)


def test_a_folder_is_never_written_over(written: Path, grown: Grower) -> None:
    with pytest.raises(InvalidArgument, match="is there already"):
        folder.write(written, grown.memory, "int4", {})


def test_an_oversized_card_leaves_nothing_behind(tmp_path: Path, grown: Grower) -> None:
    with pytest.raises(InvalidArgument, match="card"):
        folder.write(tmp_path / "names", grown.memory, "int4", {"note": "x" * CARD_BYTES_MAX})
    assert list(tmp_path.iterdir()) == []


def test_a_flipped_bit_in_the_rows_is_found(written: Path) -> None:
    tensors = load_file(written / folder.ROWS)
    tensors["2.rows"][5, 0] ^= 1
    save_file(tensors, written / folder.ROWS)
    with pytest.raises(DataLoss, match="rows of layer 2"):
        folder.read(written)


def test_other_weights_a_torn_file_and_a_missing_one_are_named(written: Path) -> None:
    fusion = (written / folder.FUSION).read_bytes()
    (written / folder.FUSION).write_bytes(fusion[:-1] + bytes([fusion[-1] ^ 1]))
    with pytest.raises(DataLoss, match="not the weights that the manifest names"):
        folder.read(written)
    (written / folder.FUSION).unlink()
    with pytest.raises(NotFound, match=r"fusion\.safetensors"):
        folder.read(written)


def test_a_template_is_no_grown_memory(written: Path) -> None:
    manifest = json.loads((written / folder.MANIFEST).read_bytes())
    (written / folder.MANIFEST).write_text(json.dumps(manifest | {"tables": {}}))
    with pytest.raises(DataLoss, match="not the manifest of a grown memory"):
        folder.read(written)


def test_another_token_map_is_found(written: Path) -> None:
    tensors = load_file(written / folder.ROWS)
    tensors["token_map"] = np.roll(tensors["token_map"], 1)
    save_file(tensors, written / folder.ROWS)
    with pytest.raises(DataLoss, match="token_map"):
        folder.read(written)

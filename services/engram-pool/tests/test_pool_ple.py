"""Qwen PLE checkpoints: derived from config.json and tensors, joined from shards, read as numbers, refused in words that help."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.adapters.safetensors_checkpoint import open_checkpoint
from engram_pool.commands import app
from engram_pool.domain.checkpoint_rows import CheckpointRows
from engram_pool.domain.derivation import derived_template
from engram_pool.domain.ple_config import ple_template
from engram_pool.domain.tensor_match import match_tensors
from treadle import kernels
from treadle.contract import EngramModel, FingerprintMismatch, InvalidArgument, RowLayout, Scale, Windows
from treadle.contract.families import qwen_ple_model
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.kernels import HashPlan
from treadle.kernels.dequantise_reference import FP8_E4M3, NF4_LEVELS

if TYPE_CHECKING:
    from tests.conftest import Serve, Served, StartPool, TensorData, WriteSafetensors

PREFIX = "model.language_model.layers.1.ple.ple_embedding."
SCALE = 0.00019931793212890625  # as bf16 holds it
TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text", "hidden_size": 2048, "vocab_size": 248_320, "eos_token_id": 248_044, "ple_layer_ids": [2],
    "ple_embed_dim": 2560, "ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 100, "split_ngram_parts": 16,
    "make_ngram_vocab_size_divisible_by": 128, "seed": 1234,
}  # fmt: skip
BF16 = RowLayout(320, 160, "bf16")


@dataclass
class Ple:
    """A checkpoint folder as Qwen publishes it, small primes, 16 shards in three files."""

    folder: Path
    tensors: dict[str, TensorData]
    rows: NDArray[np.uint8]  # [padded rows, bytes of the row tensor]
    write: WriteSafetensors

    def save(self, **text: Any) -> Path:
        """Write it; keys of text_config by keyword, None leaves one out."""
        keys = {key: value for key, value in (TEXT | text).items() if value is not None}
        (self.folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": keys}))
        names = list(self.tensors)
        for part in range(3):
            self.write(self.folder / f"model-{part}.safetensors", {name: self.tensors[name] for name in names[part::3]})
        return self.folder


Make = Callable[..., Ple]


@pytest.fixture
def make(tmp_path: Path, write_tensors: WriteSafetensors) -> Make:
    """`make(dtype, width)`: rows of `width` columns of a tensor dtype, as shards, with the numbers of the hash beside them."""

    def checkpoint(dtype: str, width: int, *, suffix: str = "weight", folder: str = "Qwen PLE small") -> Ple:
        path = tmp_path / folder
        path.mkdir()
        model = qwen_ple_model("x", layers=(1,), prime_base=100, row=BF16)
        padded = -(-model.rows_hashed(1) // 128) * 128
        row_bytes = width * {"BF16": 2, "F8_E4M3": 1, "U8": 1}[dtype]
        rows = np.random.default_rng(7).integers(0, 120, (padded, row_bytes), dtype=np.uint8)
        tensors: dict[str, TensorData] = {"lm_head.weight": ("BF16", (4, 8), bytes(64))}
        for k, shard in reversed(list(enumerate(np.split(rows, 16)))):  # 10 to 15 come before 2 in a file, and sort so too
            tensors[f"{PREFIX}ngram_embedding.shard_{k}.{suffix}"] = (dtype, (len(shard), width), shard.tobytes())
        primes = np.array(model.primes[0], dtype="<i8").reshape(-1)
        for name, numbers in (
            ("layer_multipliers", np.array(model.multipliers[0], dtype="<i8")), ("ngram_heads_vocab_sizes", primes),
            ("ngram_heads_offsets", np.cumsum(primes) - primes),
        ):  # fmt: skip
            tensors[PREFIX + name] = ("I64", numbers.shape, numbers.tobytes())
        return Ple(path, tensors, rows, write_tensors)

    return checkpoint


def global_scale(ple: Ple, value: float = SCALE) -> Ple:
    """With one BF16 scale for the whole table."""
    bits = (np.array([value], dtype="<f4").view("<u4") >> 16).astype("<u2")
    ple.tensors[f"{PREFIX}ngram_embedding.weight_scale"] = ("BF16", (1,), bits.tobytes())
    return ple


def row_scales(ple: Ple, suffix: str = "weight_scale", *, flat: bool = False) -> NDArray[np.float32]:
    """With one fp32 scale for each row, in shards as the rows."""
    scales = np.random.default_rng(8).random((len(ple.rows), 1), dtype=np.float32) + np.float32(0.25)
    for k, shard in enumerate(np.split(scales, 16)):
        shape = (len(shard),) if flat else shard.shape
        ple.tensors[f"{PREFIX}ngram_embedding.shard_{k}.{suffix}"] = ("F32", shape, shard.tobytes())
    return scales


async def load(served: Served, path: Path, model: EngramModel | None = None, **source: Any) -> EngramModel:
    request = pb.LoadTableRequest(
        checkpoint=pb.CheckpointSource(path=str(path), **source), manifest_json=model.to_json() if model else b""
    )
    events = [event async for event in served.stub.LoadTable(request)]
    return EngramModel.from_json(events[-1].loaded.manifest_json)


async def refused(served: Served, path: Path, model: EngramModel | None = None, **source: Any) -> str:
    request = pb.LoadTableRequest(
        checkpoint=pb.CheckpointSource(path=str(path), **source), manifest_json=model.to_json() if model else b""
    )
    code, text, _ = await served.failure(served.stub.LoadTable(request))
    assert code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), text
    assert not served.pool.occupancy.table_bytes
    return text


def table(served: Served, name: str) -> NDArray[np.uint8]:
    return served.pool.find(name, "").stored.segments[1].rows


async def test_fp8_shards_with_one_scale_are_loaded_by_their_config_alone(serve: Serve, make: Make) -> None:
    ple = global_scale(make("F8_E4M3", 160))
    async with serve() as served:
        model = await load(served, ple.save())
        assert (model.name, model.layers, model.pad_id, model.eos_id) == ("qwen-ple-small", (1,), 248_044, 248_044)
        assert model.row == RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(SCALE))
        assert model.template == replace(qwen_ple_model("qwen-ple-small", layers=(1,), prime_base=100, row=model.row))
        assert model.table(1).rows == len(ple.rows) > model.rows_hashed(1)
        assert np.array_equal(table(served, model.name), ple.rows)


async def test_what_transformers_leaves_out_of_a_config_has_its_defaults(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    folder = ple.save(ngram_size=None, heads_per_ngram=None, seed=None, vocab_size=None, make_ngram_vocab_size_divisible_by=None,
                      split_ngram_parts=None, ple_embed_dim=None, hidden_size=2560, eos_token_id=[248_044, 1])  # fmt: skip
    async with serve() as served:
        model = await load(served, folder, name="mine")
        assert model.template == qwen_ple_model("mine", layers=(1,), prime_base=100, row=BF16)
        assert np.array_equal(table(served, "mine"), ple.rows)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight.absmax"])
async def test_nf4_rows_are_packed_to_84_bytes(serve: Serve, make: Make, suffix: str) -> None:
    ple = make("U8", 80)
    scales = row_scales(ple, suffix, flat=suffix == "weight.absmax")
    async with serve() as served:
        model = await load(served, ple.save(ple_embedding_dtype="nf4"))
        assert model.row == RowLayout(84, 160, "nf4", Scale("fp32", 160))
        assert np.array_equal(table(served, model.name), np.hstack([ple.rows, scales.view(np.uint8)]))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("packed", [False, True])
async def test_a_row_whose_scale_is_no_number_is_named(serve: Serve, make: Make, number: float, packed: bool) -> None:
    row, there = (
        7,
        f"{PREFIX}ngram_embedding.shard_15.weight_packed" if packed else f"{PREFIX}ngram_embedding.shard_15.weight_scale",
    )
    ple = make("U8", 84 if packed else 80, suffix="weight_packed" if packed else "weight")
    if not packed:
        row_scales(ple)
    dtype, shape, data = ple.tensors[there]
    end, bad = (row + 1) * len(data) // shape[0], np.array([number], dtype="<f4").tobytes()
    ple.tensors[there] = (dtype, shape, data[: end - 4] + bad + data[end:])
    async with serve() as served:
        code, said, _ = await served.failure(
            served.stub.LoadTable(pb.LoadTableRequest(checkpoint=pb.CheckpointSource(path=str(ple.save()), row_dtype="nf4")))
        )
        assert code == grpc.StatusCode.DATA_LOSS
        assert f"the scales of row {15 * shape[0] + row} are not finite" in said


async def test_u8_rows_hold_what_the_caller_says_packed_or_not(serve: Serve, make: Make) -> None:
    ple = make("U8", 84, suffix="weight_packed")
    as_words = {name: ("U32", (shape[0], 21), data) for name, (_, shape, data) in ple.tensors.items() if "shard" in name}
    async with serve() as served:
        assert "does not say what its bytes hold" in await refused(served, ple.save())
        assert "('nvfp4' is not known)" in await refused(served, ple.save(ple_embedding_dtype="nvfp4"))
        bytes_of_two, ple.tensors = ple.tensors, ple.tensors | as_words
        assert "nf4 rows are U8, got" in await refused(served, ple.save(), row_dtype="nf4")
        ple.tensors = bytes_of_two
        model = await load(served, ple.save(), row_dtype="nf4")
        assert model.row == RowLayout(84, 160, "nf4", Scale("fp32", 160))
        assert np.array_equal(table(served, model.name), ple.rows)


async def test_fp8_rows_with_a_scale_each_are_packed_to_164_bytes(serve: Serve, make: Make) -> None:
    ple = make("F8_E4M3", 160)
    scales = row_scales(ple)
    async with serve() as served:
        model = await load(served, ple.save())
        assert model.row == RowLayout(164, 160, "fp8_e4m3", Scale("fp32", 160))
        assert np.array_equal(table(served, model.name), np.hstack([ple.rows, scales.view(np.uint8)]))


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
async def test_rows_that_were_looked_up_by_tokens_are_the_numbers_of_the_checkpoint(serve: Serve, make: Make, kind: str) -> None:
    ple = global_scale(make("F8_E4M3", 160)) if kind == "fp8" else make("U8", 80)
    if kind == "fp8":
        numbers = np.take(FP8_E4M3, ple.rows) * np.float32(SCALE)
    else:
        levels = np.take(NF4_LEVELS, np.stack((ple.rows >> 4, ple.rows & 15), axis=-1)).reshape(len(ple.rows), 160)
        numbers = levels * row_scales(ple)
    windows = Windows.of_sequences([([248_044, 1000, 99_999, 42, 7, 248_044, 7], 0)], 2)
    async with serve() as served:
        model = await load(served, ple.save(), row_dtype="nf4" if kind == "nf4" else "")
        ids = kernels.row_ids(HashPlan.from_model(model, 1, None), windows)
        rows = await asyncio.to_thread(looked_up, served, model, windows)
        assert np.array_equal(kernels.dequantise(rows, model.row), numbers[ids])


def looked_up(served: Served, model: EngramModel, windows: Windows) -> NDArray[np.uint8]:
    with served.fabric.engram.open(model.name) as handle:
        return handle.lookup(windows)[1].copy()


def test_the_published_config_hashes_to_the_golden_rows() -> None:
    keys = TEXT | {"ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 128}
    plan = HashPlan.from_model(ple_template(keys, "qwen", RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(SCALE))), 1, None)
    rows = kernels.row_ids(plan, Windows.of_sequences([([248_044, 1000, 99_999, 42], 0)], 2))
    assert plan.rows_hashed == 320_001_446
    assert plan.multipliers.tolist() == [23703573157769, 20109073645365, 8052911324071]
    assert rows[1, :2].tolist() == [1876085, 31308566]
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest().startswith("7acc73336e680db8")


def test_a_second_layer_goes_on_where_the_primes_and_the_seed_of_the_first_end() -> None:
    model = ple_template(TEXT | {"ple_layer_ids": [5, 2]}, "two", BF16)
    assert model.layers == (1, 4)
    assert min(map(min, model.primes[1])) > max(map(max, model.primes[0]))
    assert model.multipliers[0] != model.multipliers[1]


def test_a_checkpoint_of_the_published_size_is_understood(tmp_path: Path) -> None:
    """128 shards of 2,500,012 rows in two files that are holes: 51 GB to read, nothing on disk."""
    published = TEXT | {"ngram_vocab_size_base": 20_000_000, "split_ngram_parts": 128}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": published}))
    for part in range(2):
        header: dict[str, Any] = {}
        for place, k in enumerate(range(part, 128, 2)):
            begin = place * 2_500_012 * 160
            name = f"{PREFIX}ngram_embedding.shard_{k}.weight"
            header[name] = {"dtype": "F8_E4M3", "shape": [2_500_012, 160], "data_offsets": [begin, begin + 2_500_012 * 160]}
        end = 64 * 2_500_012 * 160
        if part == 0:
            header[f"{PREFIX}ngram_embedding.weight_scale"] = {"dtype": "BF16", "shape": [1], "data_offsets": [end, end + 2]}
        text = json.dumps(header).encode()
        with (tmp_path / f"model-{part}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            if part == 0:
                file.seek(0, 2)
                file.write(b"\x51\x39")
    checkpoint = open_checkpoint(tmp_path)
    try:
        model = derived_template(checkpoint, None, {})
        rows = CheckpointRows(checkpoint, model, None, match_tensors(checkpoint, model, {}))
        assert rows.row_count(1) == 320_001_536 >= model.rows_hashed(1) == 320_001_446
        assert model.row.scale == Scale.of_all_rows(SCALE)
        out = np.ones((3, 160), dtype=np.uint8)
        rows.read(1, 127 * 2_500_012 - 1, out)  # across the seam of the last two shards
        assert not out.any()
    finally:
        checkpoint.close()


async def test_a_missing_shard_is_named(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    async with serve() as served:
        first, last, middle = (ple.tensors.pop(f"{PREFIX}ngram_embedding.shard_{k}.weight") for k in (0, 15, 7))
        assert "shard 7 is missing: there are 13, from 1 to 14" in await refused(served, ple.save())
        ple.tensors |= {f"{PREFIX}ngram_embedding.shard_{k}.weight": shard for k, shard in ((0, first), (7, middle))}
        text = await refused(served, ple.save())
        assert "15 shards" in text
        assert "there are 16 (split_ngram_parts)" in text
        ple.tensors[f"{PREFIX}ngram_embedding.shard_15.weight"] = last
        ple.tensors[f"{PREFIX}ngram_embedding.shard_07.weight"] = middle
        assert "a shard's number stands twice" in await refused(served, ple.save())


async def test_shards_are_named_one_by_one_or_by_a_pattern(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    ple.tensors = {name.replace(f"{PREFIX}ngram_embedding.shard_", "part/"): tensor for name, tensor in ple.tensors.items()}
    names = {f"1.rows.{k}": f"part/{k}.weight" for k in range(16)}
    async with serve() as served:
        folder = ple.save()
        open_role = await refused(served, folder)
        assert "name one for the role 1.rows" in open_role
        assert "lm_head.weight BF16[4, 8]" in open_role
        wrong = {
            "shard 3 is missing": {role: name for role, name in names.items() if role != "1.rows.3"},
            "as a whole and by shards": names | {"1.rows": "part/*.weight"},
            "'part/2.weight' is named for two shards": names | {"1.rows.3": "part/2.weight"},
            "'nobody', named for a shard of the role 1.rows, is not there": names | {"1.rows.3": "nobody"},
            "unknown roles ['2.rows.0']": names | {"2.rows.0": "part/0.weight"},
        }
        for says, tensors in wrong.items():
            assert says in await refused(served, folder, tensors=tensors)
        for tensors in (names, {"1.rows": "part/*.weight"}):
            model = await load(served, folder, tensors=tensors)
            assert np.array_equal(table(served, model.name), ple.rows)


async def test_tensors_that_differ_in_a_number_only_are_listed_as_one(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    async with serve() as served:
        text = await refused(served, ple.save(ple_layer_ids=[1, 2, 3]))
    assert "name one for each of the roles 0.rows, 2.rows" in text
    assert f"16 x {PREFIX.replace('.1.', '.*.')}ngram_embedding.shard_*.weight BF16[{len(ple.rows) // 16}, 160]" in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eos_token_id": None}, "eos_token_id is missing"), ({"ple_embed_dim": 100}, "100 does not divide by 16"),
        ({"ple_layer_ids": [0]}, "counted from 1"), ({"ngram_size": 99}, "ngram_size 99"), ({"heads_per_ngram": 10**9}, "at most 256"),
        ({"ngram_vocab_size_base": 200}, "belong to two checkpoints"), ({"seed": 5}, "'multipliers' differs"),
        ({"ngram_vocab_size_base": 1 << 60}, "ngram_vocab_size_base: 2 to"), ({"vocab_size": 0}, "vocab_size"),
        ({"ple_layer_ids": [2.0]}, "ple_layer_ids: whole numbers"), ({"ple_layer_ids": None}, "neither engram_layer_ids"),
    ],
)  # fmt: skip
async def test_a_config_that_does_not_fit_its_tensors_is_refused_by_key(
    serve: Serve, make: Make, change: dict[str, Any], says: str
) -> None:
    ple = make("BF16", 160)
    async with serve() as served:
        assert says in await refused(served, ple.save(**change))


async def test_a_scale_that_is_missing_or_no_scale_is_refused(serve: Serve, make: Make) -> None:
    ple = make("F8_E4M3", 160)
    name = f"{PREFIX}ngram_embedding.weight_scale"
    async with serve() as served:
        assert "name one for the role 1.scale" in await refused(served, ple.save())
        for value, says in ((0.0, "above 0"), (float("inf"), "finite"), (-1.0, "above 0")):
            assert says in await refused(served, global_scale(ple, value).save())
        ple.tensors[name] = ("I64", (1,), bytes(8))
        assert "BF16, F16 or F32" in await refused(served, ple.save())
        ple.tensors[name] = ("F32", (3, 7), bytes(84))
        assert "scales that divide 160 values" in await refused(served, ple.save())
        ple.tensors[name] = ("F32", (), np.array(0.5, dtype="<f4").tobytes())  # a scalar as torch saves it
        assert (await load(served, ple.save())).row.scale == Scale.of_all_rows(0.5)


async def test_tensors_without_rows_are_refused(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    ple.tensors[f"{PREFIX}ngram_embedding.shard_3.weight"] = ("BF16", (), bytes(2))
    async with serve() as served:
        assert "belong to two checkpoints" in await refused(served, ple.save())


async def test_a_manifest_whose_scale_is_not_the_checkpoints_is_refused(serve: Serve, make: Make) -> None:
    folder = global_scale(make("F8_E4M3", 160)).save()
    model = qwen_ple_model("given", layers=(1,), prime_base=100, row=RowLayout(160, 160, "fp8_e4m3"))
    async with serve() as served:
        assert "the manifest has no row.scale" in await refused(served, folder, model)
        other = replace(model, row=replace(model.row, scale=Scale.of_all_rows(1.0)))
        assert "'row.scale' differs" in await refused(served, folder, other)
        assert "name, row_dtype: the manifest says both" in await refused(served, folder, model, row_dtype="nf4")
        as_bytes = global_scale(make("U8", 160, folder="bytes")).save()
        assert "the manifest has no row.scale" in await refused(served, as_bytes, model)
        fitting = replace(model, row=replace(model.row, scale=Scale.of_all_rows(SCALE)))
        assert (await load(served, folder, fitting)).name == "given"


async def test_numbers_of_another_hash_are_refused_with_a_manifest_too(serve: Serve, make: Make) -> None:
    ple = make("BF16", 160)
    model = qwen_ple_model("given", layers=(1,), prime_base=100, seed=4, row=BF16)
    async with serve() as served:
        assert "'multipliers' differs" in await refused(served, ple.save(), model)
        multipliers = ple.tensors[f"{PREFIX}layer_multipliers"]
        ple.tensors[f"{PREFIX}layer_multipliers"] = ("I64", (2,), multipliers[2][:16])
        assert "expected '3 numbers (manifest)', got '2 (" in await refused(served, ple.save())
        ple.tensors[f"{PREFIX}layer_multipliers"] = ("F32", (3,), bytes(12))
        assert "I64 numbers of the hash expected" in await refused(served, ple.save())


def test_the_command_needs_no_token_map_and_takes_a_name(start_pool: StartPool, make: Make, tmp_path: Path) -> None:
    folder = global_scale(make("F8_E4M3", 160)).save()
    (folder / "tokenizer.json").write_text("{}")  # there, and not needed
    with start_pool(tmp_path / "s") as process:

        def run(*words: str) -> Any:
            result = CliRunner().invoke(app, ["load", *words, "--pool", process.address, "--json"])
            if result.exception is not None and not isinstance(result.exception, SystemExit):
                raise result.exception
            return json.loads(result.stdout)

        assert run("--checkpoint", str(folder))["model"] == "qwen-ple-small"
        loaded = run("mine", "--checkpoint", str(folder), "--map", f"1.rows={PREFIX}ngram_embedding.shard_*.weight")
        assert (loaded["model"], loaded["layers"], loaded["row_bytes"]) == ("mine", [1], 160)
        with pytest.raises(InvalidArgument, match="row_dtype: nf4, but"):
            run("--checkpoint", str(folder), "--row-dtype", "nf4")
        with pytest.raises(InvalidArgument, match="--row-dtype"):
            run("--random", "--row-dtype", "nf4")
        (folder / "config.json").write_text(json.dumps({"text_config": TEXT | {"seed": 9}}))
        with pytest.raises(FingerprintMismatch, match="multipliers"):
            run("--checkpoint", str(folder))

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import (
    EngramModel,
    FingerprintMismatch,
    Fusion,
    InvalidArgument,
    RowLayout,
    Scale,
    Table,
    canonical_json,
    version_of,
)
from treadle.contract.families import deepseek_v41_model, demo_model, hash_multipliers, head_primes, qwen_ple_model
from treadle.contract.row_layout import PRECISIONS, row_layout
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.contract.version import is_version_prefix

MAP = "ab" * 32
BF16 = RowLayout(320, 160, "bf16")


def demo() -> EngramModel:
    return demo_model(
        "smollm2-demo",
        layers=(2, 15),
        token_map=MAP,
        compressed_vocab_size=40_000,
        pad_id=2,
        prime_base=20_000,
        row=BF16,
        fusion=Fusion("demo"),
    )


def every_family() -> list[EngramModel]:
    return [demo(), deepseek_v41_model("v41", token_map=MAP, pad_id=2, fusion=Fusion("v4.1", MAP)), qwen_ple_model("ple", row=BF16)]


def grown(precision: str, seed: int = 0) -> EngramModel:
    return deepseek_v41_model(
        "kjv", token_map=MAP, pad_id=2, compressed_vocab_size=32_873, orders=(2, 3), prime_base=10_007, row=row_layout(precision, 32),
        fusion=Fusion("v4.1", MAP), seed=seed,
    )  # fmt: skip


def four_qwen_layouts() -> list[EngramModel]:
    """BF16, FP8 with one scale of all rows and with one each, NF4."""
    layouts = (
        BF16, RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(0.000199)), RowLayout(164, 160, "fp8_e4m3", Scale("fp32", 160)),
        RowLayout(84, 160, "nf4", Scale("fp32", 160)),
    )  # fmt: skip
    return [qwen_ple_model("ple", row=row) for row in layouts]


@pytest.mark.parametrize(
    "model",
    [*every_family(), *map(grown, PRECISIONS), *four_qwen_layouts()],
    ids=lambda m: f"{m.family}-{m.row.dtype}-{m.row.bytes}",
)
def test_a_manifest_survives_the_round_trip_byte_for_byte(model: EngramModel) -> None:
    loaded = model.with_tables({layer: Table(model.rows_hashed(layer) + 5, MAP) for layer in model.layers})
    for each in (model, loaded):
        assert EngramModel.from_json(each.to_json()) == each
        assert EngramModel.from_json(each.to_json()).to_json() == each.to_json()
        assert each.version == version_of(json.loads(each.to_json()))
    assert loaded.template == model
    assert loaded.version != model.version


def test_manifests_of_before_keep_their_versions() -> None:
    v41 = deepseek_v41_model("v41", token_map=MAP, pad_id=2)
    versions = [model.version[:16] for model in (v41, grown("int4"), qwen_ple_model("ple", row=BF16))]
    assert versions == ["cd76e8d87a25279f", "ad019f3675baeeb0", "a5378f2335ef1f8e"]


def test_the_scale_of_all_rows_stands_in_the_manifest_as_its_bits() -> None:
    scale = Scale.of_all_rows(0.000199)
    assert (scale.dtype, scale.block, scale.bits) == ("fp32", 0, "3950aaa8")
    assert scale.value == pytest.approx(0.000199, rel=1e-7)
    row = qwen_ple_model("ple", row=RowLayout(160, 160, "fp8_e4m3", scale)).to_manifest()["row"]
    assert row == {"bytes": 160, "dim": 160, "dtype": "fp8_e4m3", "scale": {"dtype": "fp32", "block": 0, "bits": "3950aaa8"}}
    assert RowLayout(160, 160, "fp8_e4m3", scale).inline_scale is None
    assert qwen_ple_model("ple", row=RowLayout(160, 160, "fp8_e4m3", scale)).fingerprint.as_dict()["row_scale"] == scale.bits
    assert not any("row_scale" in model.fingerprint.as_dict() for model in every_family())
    with pytest.raises(InvalidArgument, match="stand in the rows"):
        _ = Scale("fp32", 160).value
    for value in (0.0, -1.0, float("inf"), float("nan"), 1e300):
        with pytest.raises(InvalidArgument, match=r"row\.scale"):
            Scale.of_all_rows(value)


def test_rows_hashed_equal_the_published_totals() -> None:
    v41 = deepseek_v41_model("v41", token_map=MAP, pad_id=2)
    assert (v41.rows_hashed(1), v41.rows_hashed(14)) == (384_006_168, 384_016_682)
    assert qwen_ple_model("ple", row=BF16).rows_hashed(0) == 320_001_446
    official = demo_model("d", layers=(1, 15), token_map=MAP, compressed_vocab_size=100_000, pad_id=2, prime_base=646_400, row=BF16)
    assert (official.rows_hashed(1), official.rows_hashed(15)) == (10_344_164, 10_348_242)
    assert (official.primes[0][0][0], official.primes[1][1][7]) == (646_403, 646_879)


def test_multipliers_equal_the_published_numbers() -> None:
    v41 = deepseek_v41_model("v41", token_map=MAP, pad_id=2)
    assert v41.multipliers[0] == (76632096046245, 4839876093313, 35959672319349, 73987337458391)
    assert v41.multipliers[1] == (67716810739261, 51510806800915, 30921347202721, 82619226485591)
    assert qwen_ple_model("ple", row=BF16).multipliers == ((23703573157769, 20109073645365, 8052911324071),)


def test_primes_are_different_over_the_whole_model() -> None:
    primes = [p for orders in head_primes((1000, 1000), 3, 8) for heads in orders for p in heads]
    assert len(set(primes)) == len(primes) == 48
    assert all(all(p % d for d in range(2, int(p**0.5) + 1)) for p in primes)


WRONG: list[tuple[str, Any]] = [
    ("schema", "treadle.engram-model/9"), ("family", "nobody"), ("layers", []), ("layers", [3, 2]), ("layers", ["2"]), ("layers", 2),
    ("orders", [3, 2]), ("orders", [2, 99]), ("heads", 0), ("heads", True), ("primes", [[[1] * 8] * 2] * 2), ("primes", [[[7] * 8] * 2]),
    ("primes", 7), ("multipliers", [[1, 2, -3]] * 2), ("multipliers", [[1, 2]] * 2), ("pad_id", -1), ("pad_id", 2.0), ("eos_id", 5),
    ("name", "../etc"), ("name", ""), ("name", 7), ("name", "none"), ("name", "default"), ("token_map", "short"), ("compressed_vocab_size", 0), ("row", {"bytes": 320}),
    ("row", {"bytes": 319, "dim": 160, "dtype": "bf16"}), ("row", {"bytes": 8, "dim": 4, "dtype": "bf16"}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "int3"}), ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 32}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 0}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 0, "bits": "7f800000"}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 0, "bits": "3F800000"}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 0, "bits": 1.0}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp16", "block": 0, "bits": "3f800000"}}),
    ("row", {"bytes": 324, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": 160, "bits": "3f800000"}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": "fp32", "block": True, "bits": "3f800000"}}),
    ("row", {"bytes": 320, "dim": 160, "dtype": "bf16", "scale": {"dtype": 7, "block": 32}}), ("row", {"bytes": 16, "dim": 33, "dtype": "nf4"}), ("row", {"bytes": 16, "dim": 33, "dtype": "int4"}),
    ("fusion", {"form": "other"}), ("tables", {"2": {"rows": 1, "version": MAP}, "15": {"rows": 1, "version": MAP}}),
    ("tables", {"2": {"rows": 10**9, "version": MAP}}), ("tables", []), ("surprise", 1),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_field_is_refused_by_name(field: str, value: Any) -> None:
    manifest = demo().to_manifest() | {field: value}
    with pytest.raises(InvalidArgument) as refusal:
        EngramModel.from_manifest(manifest)
    named = {"layers": "layers", "primes": "primes", "name": "name", "token_map": "version"}.get(field, field)
    assert named in str(refusal.value) or "wrong type" in str(refusal.value)


@pytest.mark.parametrize("field", sorted(demo().to_manifest()))
def test_a_missing_field_is_refused(field: str) -> None:
    manifest = demo().to_manifest()
    del manifest[field]
    if field == "fusion":
        assert EngramModel.from_manifest(manifest).fusion is None
    else:
        with pytest.raises(InvalidArgument):
            EngramModel.from_manifest(manifest)


@settings(deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    )
)
def test_no_json_value_does_more_than_be_refused(value: Any) -> None:
    with pytest.raises(InvalidArgument):
        EngramModel.from_manifest(value)


@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"\xff\xfe", b"null", b" " * (2 << 20), b"[" * 200_000])
def test_text_that_is_no_manifest_is_refused(text: bytes) -> None:
    with pytest.raises(InvalidArgument):
        EngramModel.from_json(text)


def test_scales_are_counted_in_the_row() -> None:
    assert RowLayout(264, 256, "fp8_e4m3", Scale("ue8m0", 32)).bytes == 264
    with pytest.raises(InvalidArgument, match="264"):
        RowLayout(256, 256, "fp8_e4m3", Scale("ue8m0", 32))


def test_fp16_scales_and_half_byte_values_are_counted_in_the_row() -> None:
    layout = RowLayout(20, 32, "int4", Scale("fp16", 16))
    assert (layout.value_bytes, layout.scale_bytes) == (16, 4)
    assert (BF16.value_bytes, BF16.scale_bytes) == (320, 0)
    with pytest.raises(InvalidArgument, match="20"):
        RowLayout(18, 32, "int4", Scale("fp16", 16))
    with pytest.raises(InvalidArgument, match="even"):
        RowLayout(16, 31, "int4")


def test_the_presets_of_grown_rows_have_one_scale_behind_the_values() -> None:
    assert [row_layout(precision, 32).bytes for precision in PRECISIONS] == [64, 34, 18]
    assert row_layout("bf16", 32) == RowLayout(64, 32, "bf16")
    assert row_layout("fp8", 32) == RowLayout(34, 32, "fp8_e4m3", Scale("fp16", 32))
    assert row_layout("int4", 64) == RowLayout(34, 64, "int4", Scale("fp16", 64))
    for precision, dim in (("int8", 32), ("fp32", 32), (7, 32), ("int4", 33), ("int4", 16), ("bf16", 4096), ("fp8", True)):
        with pytest.raises(InvalidArgument):
            row_layout(precision, dim)  # type: ignore[arg-type]


def test_a_grown_template_has_its_own_orders_and_seed() -> None:
    model, other = grown("int4"), grown("int4", seed=1)
    assert (model.orders, model.order_max, model.columns, model.row.bytes) == ((2, 3), 3, 16, 18)
    assert model.multipliers[0] == hash_multipliers(32_873, 1, 3)
    assert model.multipliers != other.multipliers
    assert model.primes == other.primes
    assert 160_000 < model.rows_hashed(1) < 163_000
    sparse = deepseek_v41_model("s", token_map=MAP, pad_id=2, orders=(2, 5))
    assert (sparse.columns, len(sparse.multipliers[0])) == (16, 5)


def test_the_fingerprint_names_the_field_that_differs() -> None:
    model, other = demo(), replace(demo(), row=RowLayout(160, 80, "bf16"))
    model.fingerprint.require(model.fingerprint.as_dict())
    with pytest.raises(FingerprintMismatch) as refusal:
        model.fingerprint.require({"row_bytes": "160", "family": "engram-demo"})
    assert refusal.value.field == "row_bytes"
    assert model.fingerprint != other.fingerprint
    with pytest.raises(FingerprintMismatch) as refusal:
        model.fingerprint.require({"colour": "blue"})
    assert refusal.value.field == "colour"


def test_canonical_json_is_sorted_compact_utf8_without_floats() -> None:
    assert canonical_json({"b": 1, "a": ["ü", None, True]}) == '{"a":["ü",null,true],"b":1}'.encode()
    for bad in ({"a": 1.0}, {"a": [float("nan")]}, {"a": {1: 2}}, {"a": object()}):
        with pytest.raises(InvalidArgument):
            canonical_json(bad)


def test_a_version_may_be_chosen_by_its_first_eight_digits_or_more() -> None:
    assert all(is_version_prefix(text) for text in ("8dd46b5d", MAP, MAP[:9]))
    assert not any(is_version_prefix(text) for text in ("", "8dd46b5", MAP + "0", "8DD46B5D", "8dd46b5g", "8dd46b5d\n"))


def test_a_table_version_needs_every_chunk() -> None:
    rows, row_bytes = 20_000, 320
    chunks = [bytes([n]) * 32 for n in range(-(-rows * row_bytes // CHUNK_BYTES))]
    assert table_version(rows, row_bytes, chunks) != table_version(rows, row_bytes, chunks[::-1])
    with pytest.raises(InvalidArgument, match="chunk_digests"):
        table_version(rows, row_bytes, chunks[:-1])


def test_layers_without_a_table_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="layer 3"):
        demo().rows_hashed(3)
    with pytest.raises(InvalidArgument, match="template"):
        demo().table(2)

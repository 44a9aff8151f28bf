"""Rows to numbers, and numbers to what is added to the hidden state, against the formulas written out."""

import hashlib
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from treadle.contract import EngramModel, Fusion, RowLayout, Scale
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound
from treadle.contract.families import demo_model
from treadle.nn.config import ModelConfig
from treadle.nn.dequantise import dequantise
from treadle.nn.fusion import RANDOM_ROW_RMS, EngramFusion
from treadle.nn.half_linear import HalfLinear
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM

HIDDEN, TOKENS = 64, 30
BF16 = RowLayout(64, 32, "bf16")
CONFIG = ModelConfig.from_json({
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100, "max_position_embeddings": 512,
})  # fmt: skip


def engram(form: str = "demo", weights: str | None = None) -> EngramModel:
    return demo_model(
        "tiny", layers=(0, 2), token_map="0" * 64, compressed_vocab_size=100, pad_id=0, prime_base=50, heads=2, row=BF16,
        fusion=Fusion(form, weights),
    )  # fmt: skip


def random_rows(tokens: int = TOKENS, seed: int = 0, rms: float = RANDOM_ROW_RMS) -> Tensor:
    values = torch.randn(tokens, 4, 32, generator=torch.Generator().manual_seed(seed)) * rms
    return values.to(torch.bfloat16).view(torch.uint8)


def hidden_states(tokens: int = TOKENS, seed: int = 1) -> Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)) * 3.0


def sequence(fusion: EngramFusion) -> SequenceKV:
    return SequenceKV(CONFIG, history=fusion.history_widths)


def test_plain_dtypes_are_read_as_they_are() -> None:
    values = torch.tensor([[[1.5, -2.0, 0.25, 384.0] * 4]])
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)):
        rows = values.to(dtype).view(torch.uint8)
        assert torch.equal(dequantise(rows, RowLayout(16 * dtype.itemsize, 16, name)), values)
    numbers = torch.arange(16, dtype=torch.uint8).view(1, 1, 16)
    assert torch.equal(dequantise(numbers, RowLayout(16, 16, "u8"))[0, 0], torch.arange(16.0))


def test_fp8_rows_are_multiplied_by_their_inline_scales() -> None:
    layout = RowLayout(66, 64, "fp8_e4m3", Scale("ue8m0", 32))
    row = torch.zeros(66, dtype=torch.uint8)
    row[:5] = torch.tensor([0x38, 0xB8, 0x7E, 0x01, 0x40])  # 1, -1, 448, 2^-9, 2
    row[32:34] = torch.tensor([0x38, 0x3C])  # 1, 1.5
    row[64:] = torch.tensor([127 + 3, 127 - 2])  # 8, 1/4
    read = dequantise(row.view(1, 1, 66), layout)[0, 0]
    assert read[:5].tolist() == [8.0, -8.0, 3584.0, 2.0**-6, 16.0]
    assert read[32:34].tolist() == [0.25, 0.375]


def test_a_scale_byte_is_a_power_of_two_and_its_extremes_are_defined() -> None:
    layout = RowLayout(17, 16, "fp8_e4m3", Scale("ue8m0", 16))
    rows = torch.full((256, 1, 17), 0x38, dtype=torch.uint8)
    rows[:, 0, 16] = torch.arange(256)
    read = dequantise(rows, layout)[:, 0, 0]
    assert torch.equal(read[1:255], (torch.arange(1, 255, dtype=torch.int32) << 23).view(torch.float32))
    assert read[0] == 2.0**-127
    assert read[255].isnan()


def test_rows_may_lie_anywhere_and_are_not_written() -> None:
    layout = RowLayout(34, 16, "bf16", Scale("ue8m0", 8))
    flat = torch.zeros(1 + 3 * 34, dtype=torch.uint8)
    rows = flat[1:].view(3, 1, 34)  # an odd address
    rows[..., :32] = torch.full((3, 1, 16), 3.0, dtype=torch.bfloat16).view(torch.uint8)
    rows[..., 32:] = 128
    before = flat.clone()
    assert torch.equal(dequantise(rows, layout), torch.full((3, 1, 16), 6.0))
    assert torch.equal(dequantise(rows[::2], layout), torch.full((2, 1, 16), 6.0))
    assert torch.equal(flat, before)
    fp32 = torch.ones(1, 1, 4, 4)
    raw = fp32.flatten(2).view(torch.uint8)
    dequantise(raw, RowLayout(64, 16, "fp32")).zero_()
    assert fp32.all()
    with pytest.raises(InvalidArgument, match="rows"):
        dequantise(rows, BF16)


def test_the_demo_form_is_the_demonstration_codes() -> None:
    """Linear layers, RMSNorm modules and Conv1d, put together as the published code does for one branch."""
    model = engram()
    fusion = EngramFusion.build(model, HIDDEN, seed=3, delta_rms=1.0)
    part, hidden, rows = fusion.state_dict(), hidden_states(), random_rows()
    wkv, conv_weight = part["parts.2.wkv"], part["parts.2.conv"]
    conv = nn.Conv1d(HIDDEN, HIDDEN, 4, groups=HIDDEN, bias=False, padding=9, dilation=3)
    conv.weight.data = conv_weight.unsqueeze(1)
    with torch.no_grad():
        embedded = rows.view(torch.bfloat16).float().flatten(1)
        key, value = embedded @ wkv[:HIDDEN].T, embedded @ wkv[HIDDEN:].T
        gate = (nn.RMSNorm(HIDDEN)(key) * nn.RMSNorm(HIDDEN)(hidden)).sum(-1) / math.sqrt(HIDDEN)
        gate = (gate.abs().clamp_min(1e-6).sqrt() * gate.sign()).sigmoid().unsqueeze(-1)
        gated = gate * value
        normed = nn.RMSNorm(HIDDEN, eps=1e-5)(gated)
        expected = gated + nn.functional.silu(conv(normed.T.unsqueeze(0))[0, :, :TOKENS].T)
    kv = sequence(fusion)
    got = fusion(2, hidden, rows, None, [0, TOKENS], [kv])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    assert 0.5 < got.square().mean().sqrt() < 2.0


def test_the_v41_form_is_deepseeks() -> None:
    fusion = EngramFusion.build(engram("v4.1"), HIDDEN, seed=3, delta_rms=1.0)
    part = fusion.state_dict()  # the weights themselves, not copies
    part["parts.0.query_weight"] *= 1.5
    part["parts.0.key_weight"] *= -0.5
    hidden, rows = hidden_states(), random_rows()
    kv = rows.view(torch.bfloat16).float().flatten(1) @ part["parts.0.wkv"].T
    key, value = kv[:, :HIDDEN], kv[:, HIDDEN:]
    dot = (hidden * 1.5 * -0.5 * key).sum(-1)
    dot = dot * (hidden.square().mean(-1) + 1e-6).rsqrt() * (key.square().mean(-1) + 1e-6).rsqrt() / math.sqrt(HIDDEN)
    root = dot.abs().clamp_min(1e-6).sqrt()
    gate = torch.where(dot < 0, -root, root).sigmoid()
    assert fusion.history_widths == {}
    torch.testing.assert_close(fusion(0, hidden, rows), gate.unsqueeze(-1) * value, atol=1e-4, rtol=1e-4)


def test_a_token_that_is_not_live_gets_nothing_even_where_its_rows_are_garbage() -> None:
    fusion = EngramFusion.build(engram(), HIDDEN, conv=False)
    hidden, rows = hidden_states(), random_rows()
    expected = fusion(0, hidden, rows)
    rows[3] = 0xFF  # NaN
    live = torch.ones(TOKENS, dtype=torch.bool)
    live[3] = False
    got = fusion(0, hidden, rows, live)
    assert not got[3].any()
    assert torch.equal(got[live], expected[live])


def test_random_weights_give_a_delta_of_the_asked_size_and_depend_on_the_seed_alone() -> None:
    model = engram()
    fusion = EngramFusion.build(model, HIDDEN, seed=5, delta_rms={0: 0.1, 2: 0.4})
    for layer, asked in ((0, 0.1), (2, 0.4)):
        kv = sequence(fusion)
        delta = fusion(layer, hidden_states(400), random_rows(400), None, [0, 400], [kv])
        assert 0.8 * asked < float(delta.square().mean().sqrt()) < 1.25 * asked
    assert fusion.to_bytes() == EngramFusion.build(model, HIDDEN, seed=5, delta_rms={0: 0.1, 2: 0.4}).to_bytes()
    assert fusion.to_bytes() != EngramFusion.build(model, HIDDEN, seed=6, delta_rms={0: 0.1, 2: 0.4}).to_bytes()


def test_the_convolution_gives_the_same_numbers_in_any_chunks_and_batches_and_after_a_prefix_cache() -> None:
    fusion = EngramFusion.build(engram(), HIDDEN, delta_rms=1.0)
    hidden, rows = hidden_states(), random_rows()
    whole = sequence(fusion)
    expected = fusion(2, hidden, rows, None, [0, TOKENS], [whole])
    whole.advance(TOKENS)

    pieces, kv = [], sequence(fusion)
    for start, end in ((0, 1), (1, 3), (3, 14), (14, 15), (15, 30)):
        company = sequence(fusion)
        mixed = [torch.cat((x[7:11], x[start:end])) for x in (hidden, rows)]
        pieces.append(fusion(2, *mixed, None, [0, 4, 4 + end - start], [company, kv])[4:])
        kv.advance(end - start)
    torch.testing.assert_close(torch.cat(pieces), expected, atol=1e-5, rtol=1e-5)

    cached = sequence(fusion)
    for start in range(0, 16, 4):
        cached.extend_from(whole.block(start, start + 4))
    torch.testing.assert_close(fusion(2, hidden[16:], rows[16:], None, [0, 14], [cached]), expected[16:], atol=1e-5, rtol=1e-5)


def test_a_fused_model_gives_the_same_log_probs_whole_and_in_chunks(tiny: CausalLM) -> None:
    fusion = EngramFusion.build(engram(), tiny.config.hidden, delta_rms=0.3)
    rows, ids = random_rows(40), torch.arange(40)

    def run(sizes: list[int]) -> Tensor:
        kv, parts, at = tiny.new_kv(fusion.history_widths), [], 0
        for size in sizes:
            span = slice(at, at + size)

            def fuse(layer: int, hidden: Tensor, span: slice = span, starts: tuple[int, int] = (0, size)) -> Tensor:
                return hidden + fusion(layer, hidden, rows[span], None, starts, [kv]) if layer in (0, 2) else hidden

            parts.append(tiny.forward(ids[span], ids[span], [0, size], [kv], fuse))
            at += size
        return tiny.logits(torch.cat(parts)).log_softmax(-1)

    whole = run([40])
    assert (run([7, 1, 20, 1, 11]) - whole).abs().max() < 1e-4
    plain = tiny.logits(tiny.forward(ids, ids, [0, 40], [tiny.new_kv()])).log_softmax(-1)
    assert (whole - plain).abs().max() > 1e-2


def test_saved_weights_come_back_and_other_bytes_are_refused(tmp_path: Path) -> None:
    fusion = EngramFusion.build(engram(), HIDDEN, seed=9)
    digest = fusion.save(tmp_path / "fusion.safetensors")
    assert digest == hashlib.sha256((tmp_path / "fusion.safetensors").read_bytes()).hexdigest()
    assert [path.name for path in tmp_path.iterdir()] == ["fusion.safetensors"]
    model = engram("demo", digest)
    assert EngramFusion.load(tmp_path / "fusion.safetensors", model, HIDDEN).to_bytes() == fusion.to_bytes()

    for other, hidden in ((model, HIDDEN + 2), (replace(model, fusion=Fusion("v4.1", digest)), HIDDEN)):
        with pytest.raises(FingerprintMismatch) as refused:
            EngramFusion.load(tmp_path / "fusion.safetensors", other, hidden)
        assert refused.value.field == "fusion.shape"
    with pytest.raises(InvalidArgument, match="names no weights"):
        EngramFusion.load(tmp_path / "fusion.safetensors", engram(), HIDDEN)
    EngramFusion.build(engram(), HIDDEN, seed=10).save(tmp_path / "fusion.safetensors")
    with pytest.raises(FingerprintMismatch) as refused:
        EngramFusion.load(tmp_path / "fusion.safetensors", model, HIDDEN)
    assert refused.value.field == "fusion.weights"
    with pytest.raises(NotFound):
        EngramFusion.load(tmp_path / "absent", model, HIDDEN)


def test_a_file_with_the_right_digest_that_is_no_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fusion").write_bytes(b"not safetensors")
    model = engram("demo", hashlib.sha256(b"not safetensors").hexdigest())
    with pytest.raises(DataLoss, match="not a file of fusion weights"):
        EngramFusion.load(tmp_path / "fusion", model, HIDDEN)


def test_what_does_not_fit_is_refused_by_name() -> None:
    fusion = EngramFusion.build(engram(), HIDDEN)
    hidden, rows = hidden_states(), random_rows()
    with pytest.raises(InvalidArgument, match="layer 1"):
        fusion(1, hidden, rows)
    with pytest.raises(InvalidArgument, match="history_widths"):
        fusion(0, hidden, rows)
    with pytest.raises(InvalidArgument, match="hidden"):
        fusion(0, hidden[:-1], rows)
    with pytest.raises(InvalidArgument, match="columns"):
        fusion(0, hidden, rows[:, :3], None, [0, TOKENS], [sequence(fusion)])
    with pytest.raises(InvalidArgument, match="live"):
        fusion(0, hidden, rows, torch.ones(TOKENS), [0, TOKENS], [sequence(fusion)])
    with pytest.raises(InvalidArgument, match="no fusion form"):
        EngramFusion.build(replace(engram(), fusion=None), HIDDEN)


@pytest.mark.parametrize(
    "row",
    [RowLayout(32, 32, "fp8_e4m3", Scale.of_all_rows(0.000199)), RowLayout(20, 32, "nf4", Scale("fp32", 32))],
    ids=["fp8-one-scale", "nf4"],
)
def test_rows_of_a_qwen_ple_are_fused_as_the_numbers_that_they_stand_for(row: RowLayout) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randint(0, 120, (TOKENS, 4, row.bytes), dtype=torch.uint8, generator=generator)
    if row.inline_scale is not None:
        rows[..., row.value_bytes :] = torch.rand(TOKENS, 4, 1, generator=generator).view(torch.uint8)
    numbers = dequantise(rows, row)
    assert numbers.abs().max() > 0
    packed, plain = (
        EngramFusion.build(replace(engram("v4.1"), row=layout), HIDDEN, seed=3) for layout in (row, RowLayout(128, 32, "fp32"))
    )
    expected = plain(0, hidden_states(), numbers.view(torch.uint8))
    assert torch.equal(packed(0, hidden_states(), rows), expected)
    assert expected.abs().max() > 0


def test_bf16_hidden_states_get_a_bf16_delta() -> None:
    fusion = EngramFusion.build(engram("v4.1"), HIDDEN)
    delta = fusion(0, hidden_states().to(torch.bfloat16), random_rows())
    assert delta.dtype == torch.bfloat16


def test_weights_of_a_bf16_file_keep_their_bytes_and_give_what_their_values_in_fp32_give(tmp_path: Path) -> None:
    whole = EngramFusion.build(engram("v4.1"), HIDDEN, seed=4, delta_rms=1.0)
    short = whole.to(torch.bfloat16)
    digest = short.save(tmp_path / "short")
    loaded = EngramFusion.load(tmp_path / "short", engram("v4.1", digest), HIDDEN)
    assert loaded.to_bytes() == (tmp_path / "short").read_bytes()
    digest = short.to(torch.float32).save(tmp_path / "whole")
    expected = EngramFusion.load(tmp_path / "whole", engram("v4.1", digest), HIDDEN)
    for tokens in (1, 3, TOKENS):
        hidden, rows = hidden_states(tokens), random_rows(tokens)
        torch.testing.assert_close(loaded(2, hidden, rows), expected(2, hidden, rows), atol=1e-6, rtol=1e-6)


def test_sixteen_bit_weights_are_multiplied_in_fp32_and_others_are_left_to_the_plain_product() -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * 0.02
    rows = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    assert not HalfLinear.fits(weight)
    assert not HalfLinear.fits(torch.full((2, 2), 1e5))
    assert not HalfLinear.fits(torch.full((2, 2), float("nan")))
    short = weight.to(torch.bfloat16)
    if not HalfLinear.fits(short):
        pytest.skip("this processor has no such kernel")
    exact = (rows.double() @ short.double().T + 1.0).to(torch.float32)
    torch.testing.assert_close(HalfLinear(short, torch.ones(96))(rows), exact, atol=1e-6, rtol=1e-6)


def test_packed_weights_do_without_the_plain_ones_which_then_cannot_be_written() -> None:
    kept, alone = (EngramFusion.build(engram("v4.1"), HIDDEN, seed=4).to(torch.bfloat16) for _ in range(2))
    kept.pack()
    alone.pack(keep=False)
    assert torch.equal(alone(2, hidden_states(), random_rows()), kept(2, hidden_states(), random_rows()))
    assert kept.to_bytes()
    with pytest.raises(InvalidArgument, match="keep=True"):
        alone.to_bytes()

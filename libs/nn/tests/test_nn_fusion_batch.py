"""Several memories in one step: each token gets what its own memory gives it alone."""

import pytest
import torch
from torch import Tensor

from treadle.contract import EngramModel, Fusion, RowLayout, Scale
from treadle.contract.errors import InvalidArgument
from treadle.contract.families import demo_model
from treadle.nn.config import ModelConfig
from treadle.nn.fusion import EngramFusion
from treadle.nn.fusion_batch import FusionGroup, fuse_groups
from treadle.nn.kv import SequenceKV

HIDDEN = 48
BF16 = RowLayout(64, 32, "bf16")
FP8 = RowLayout(33, 32, "fp8_e4m3", Scale("ue8m0", 32))
CONFIG = ModelConfig.from_json({
    "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100, "max_position_embeddings": 512,
})  # fmt: skip


def engram(form: str, row: RowLayout, heads: int = 2) -> EngramModel:
    return demo_model(
        "tiny", layers=(0, 2), token_map="0" * 64, compressed_vocab_size=100, pad_id=0, prime_base=50, heads=heads, row=row,
        fusion=Fusion(form),
    )  # fmt: skip


def memory(seed: int, form: str = "v4.1", row: RowLayout = BF16, *, short: bool = False, heads: int = 2) -> EngramFusion:
    """A memory with weights of its own, those of the norms too."""
    fusion = EngramFusion.build(engram(form, row, heads), HIDDEN, seed, delta_rms=1.0)
    for layer in (0, 2):
        generator = torch.Generator().manual_seed(seed)
        for weight in (fusion.part(layer).query_weight, fusion.part(layer).key_weight):
            weight.mul_(torch.rand(HIDDEN, generator=generator) + 0.5)
    return fusion.to(torch.bfloat16) if short else fusion


def rows_of(fusion: EngramFusion, tokens: int, seed: int) -> Tensor:
    """Rows that are numbers in each layout, never NaN."""
    values = torch.randn(tokens, fusion.shape.inputs // fusion.row.dim, 32, generator=torch.Generator().manual_seed(seed)) * 0.055
    if fusion.row.dtype == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    scales = torch.full((*values.shape[:2], 1), 127, dtype=torch.uint8)
    return torch.cat((values.to(torch.float8_e4m3fn).view(torch.uint8), scales), dim=-1)


def group(fusion: EngramFusion, first: int, tokens: int, *, live: Tensor | None = None) -> FusionGroup:
    kv = [SequenceKV(CONFIG, history=fusion.history_widths)]
    return FusionGroup(fusion, first, rows_of(fusion, tokens, first), live, [0, tokens], kv)


def alone(layer: int, hidden: Tensor, one: FusionGroup) -> Tensor:
    kv = [SequenceKV(CONFIG, history=one.fusion.history_widths)]
    return one.fusion.forward(layer, hidden[one.tokens], one.rows, one.live, one.starts, kv)


def check(hidden: Tensor, groups: list[FusionGroup]) -> None:
    for layer in (0, 2):
        for one, delta in zip(groups, fuse_groups(layer, hidden, groups), strict=True):
            torch.testing.assert_close(delta, alone(layer, hidden, one), atol=1e-5, rtol=1e-5)


HIDDEN_STATES = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)) * 3.0


@pytest.mark.parametrize("form", ["v4.1", "demo"])
@pytest.mark.parametrize("short", [False, True])
def test_memories_of_one_kind_give_each_token_what_its_own_gives_alone(form: str, short: bool) -> None:
    sizes, groups, first = (1, 1, 7, 1), [], 3  # three tokens before them use none
    for seed, size in enumerate(sizes):
        groups.append(group(memory(seed, form, short=short), first, size))
        first += size
    check(HIDDEN_STATES, groups)


def test_memories_of_other_forms_layouts_and_columns_share_a_step() -> None:
    kinds = [
        memory(0),
        memory(1, "demo"),
        memory(2, row=FP8),
        memory(3, short=True),
        memory(4, heads=3),
        memory(5, row=FP8),
        memory(6, "demo"),
    ]
    check(HIDDEN_STATES, [group(fusion, 5 * index, 3) for index, fusion in enumerate(kinds)])


def test_a_token_that_is_not_live_gets_nothing_and_its_neighbours_all() -> None:
    one, two = group(memory(0), 0, 2), group(memory(1), 2, 3, live=torch.tensor([True, False, True]))
    two.rows[1] = 0xFF  # NaN
    first, second = fuse_groups(0, HIDDEN_STATES, [one, two])
    assert not second[1].any()
    assert first.any(dim=1).all()
    assert second[::2].any(dim=1).all()


def test_the_delta_has_the_hidden_states_dtype() -> None:
    deltas = fuse_groups(0, HIDDEN_STATES.to(torch.bfloat16), [group(memory(0), 0, 2), group(memory(1), 2, 2)])
    assert [delta.dtype for delta in deltas] == [torch.bfloat16] * 2


def test_a_group_that_does_not_fit_is_refused_by_name() -> None:
    one, two = group(memory(0), 0, 2), group(memory(1), 2, 2)
    with pytest.raises(InvalidArgument, match="layer 1"):
        fuse_groups(1, HIDDEN_STATES, [one, two])
    with pytest.raises(InvalidArgument, match="hidden"):
        fuse_groups(0, HIDDEN_STATES[:3], [one, two])
    assert fuse_groups(0, HIDDEN_STATES, []) == []

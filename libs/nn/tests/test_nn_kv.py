"""The KV of one sequence: growth, its limit, and blocks."""

import pytest
import torch

from treadle.contract.errors import InvalidArgument, ResourceExhausted
from treadle.nn.kv import CAPACITY_STEP, SequenceKV
from treadle.nn.model import CausalLM


def filled(model: CausalLM, tokens: int, history: dict[int, int] | None = None) -> SequenceKV:
    """A sequence whose keys count upwards, whose values are their negatives, and whose history is the token's number."""
    kv = model.new_kv(history)
    kv.reserve(tokens)
    counted = torch.arange(1.0, tokens + 1).view(-1, 1, 1, 1).expand(-1, 1, model.config.kv_heads, model.config.head_dim)
    for layer in range(model.config.layers):
        keys, values = kv.append(layer, torch.cat((counted + layer * 1000, -counted), dim=1))
        assert keys.shape == values.shape == (tokens, model.config.kv_heads, model.config.head_dim)
    for layer, width in (history or {}).items():
        kv.append_history(layer, torch.arange(1.0, tokens + 1).unsqueeze(1).expand(-1, width))
    kv.advance(tokens)
    return kv


def test_capacity_grows_in_steps_keeps_what_was_there_and_ends_at_positions_max(tiny: CausalLM) -> None:
    kv = filled(tiny, 10)
    assert kv.capacity == CAPACITY_STEP
    kv.reserve(CAPACITY_STEP + 1)
    assert kv.capacity == 2 * CAPACITY_STEP
    assert torch.equal(kv.keys(2)[:, 0, 0], torch.arange(2001.0, 2011.0))
    assert torch.equal(kv.values(0)[:, 1, 3], -torch.arange(1.0, 11.0))
    kv.reserve(200)
    assert kv.capacity == tiny.config.positions_max
    with pytest.raises(ResourceExhausted, match="positions_max"):
        kv.reserve(tiny.config.positions_max + 1)
    assert kv.nbytes == tiny.config.positions_max * tiny.config.kv_values_per_token * 4


def test_appended_tokens_count_only_once_the_step_is_done(tiny: CausalLM) -> None:
    kv = filled(tiny, 4)
    kv.append(0, torch.zeros(2, 2, tiny.config.kv_heads, tiny.config.head_dim))
    assert kv.length == 4
    assert kv.keys(0).shape[0] == 4
    with pytest.raises(InvalidArgument, match="advance"):
        kv.advance(CAPACITY_STEP)


def test_blocks_carry_keys_values_and_history_and_say_their_size(tiny: CausalLM) -> None:
    source = filled(tiny, 20, {1: 6})
    block = source.block(4, 12)
    assert block.nbytes == 8 * (tiny.config.kv_values_per_token + 6) * 4
    copy = tiny.new_kv({1: 6})
    copy.extend_from(source.block(0, 4))
    copy.extend_from(block)
    assert copy.length == 12
    for layer in range(tiny.config.layers):
        assert torch.equal(copy.keys(layer), source.keys(layer)[:12])
        assert torch.equal(copy.values(layer), source.values(layer)[:12])
    assert torch.equal(copy.history(1, 3)[:, 0], torch.tensor([10.0, 11.0, 12.0]))


def test_history_before_the_sequence_is_zeros(tiny: CausalLM) -> None:
    assert torch.equal(filled(tiny, 2, {0: 1}).history(0, 4), torch.tensor([[0.0], [0.0], [1.0], [2.0]]))
    assert torch.equal(tiny.new_kv({0: 1}).history(0, 2), torch.zeros(2, 1))


def test_a_buffer_that_grew_in_a_forward_can_be_written_outside_of_one(tiny: CausalLM) -> None:
    kv = tiny.new_kv()
    tiny.forward(torch.arange(5), torch.arange(5), [0, 5], [kv])
    other = filled(tiny, 9)
    kv.extend_from(other.block(5, 9))
    assert kv.length == 9


def test_blocks_that_do_not_continue_the_sequence_are_refused(tiny: CausalLM) -> None:
    source = filled(tiny, 8)
    kv = tiny.new_kv()
    with pytest.raises(InvalidArgument, match="begins at 4"):
        kv.extend_from(source.block(4, 8))
    with pytest.raises(InvalidArgument, match="does not fit"):
        SequenceKV(tiny.config, torch.bfloat16).extend_from(source.block(0, 4))
    with pytest.raises(InvalidArgument, match="history of layers"):
        tiny.new_kv({1: 6}).extend_from(source.block(0, 4))
    with pytest.raises(InvalidArgument, match="history_widths"):
        kv.history(1, 3)
    for start, end in ((0, 9), (3, 3), (-1, 4)):
        with pytest.raises(InvalidArgument, match="block"):
            source.block(start, end)
    with pytest.raises(InvalidArgument, match="truncate"):
        source.truncate(9)
    assert kv.length == 0

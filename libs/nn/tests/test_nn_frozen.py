"""The frozen model's two directions: the same hidden states as the engine's forward, and the gradient that autograd finds."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from treadle.contract.errors import InvalidArgument
from treadle.nn import frozen
from treadle.nn.frozen import FrozenLM, training_dtype
from treadle.nn.model import CausalLM

BLOCKS, LENGTH = 2, 24


def tokens(vocabulary: int = 160) -> Tensor:
    return torch.randint(0, vocabulary, (BLOCKS, LENGTH), generator=torch.Generator().manual_seed(3))


def engine_hidden(folder: Path, blocks: Tensor, before: dict[int, Tensor] | None = None) -> Tensor:
    """What the engine's forward leaves behind its final norm, each block a sequence of its own."""
    model = CausalLM.load(folder)
    starts = list(range(0, BLOCKS * LENGTH + 1, LENGTH))
    added = before or {}
    return model.forward(
        blocks.reshape(-1), torch.arange(LENGTH).repeat(BLOCKS), starts, [model.new_kv() for _ in range(BLOCKS)],
        lambda layer, hidden: hidden + added[layer] if layer in added else hidden,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2"])
def test_blocks_give_the_hidden_states_of_the_engine(make_tiny: Callable[[str], Path], name: str) -> None:
    model, blocks = FrozenLM.load(make_tiny(name), torch.float32), tokens()
    hidden = model.run(model.embed(blocks), LENGTH, 0, 1)
    hidden = model.run(hidden, LENGTH, 1, model.config.layers)
    normed = torch.nn.functional.rms_norm(hidden, model.norm.shape, model.norm, model.config.norm_eps)
    torch.testing.assert_close(normed, engine_hidden(make_tiny(name), blocks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2"])
@pytest.mark.parametrize("query_rows", [8, 256])
def test_the_gradient_is_the_slope_of_the_loss(
    make_tiny: Callable[[str], Path], name: str, query_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frozen, "QUERY_ROWS", query_rows)
    model, blocks = FrozenLM.load(make_tiny(name), torch.float32), tokens()
    targets = torch.cat((blocks[:, 1:], torch.full((BLOCKS, 1), -1)), dim=1).reshape(-1)
    draw = torch.Generator().manual_seed(5)
    start = model.run(model.embed(blocks), LENGTH, 0, 1)
    direction = torch.randn(start.shape, generator=draw)
    direction /= direction.norm()

    def loss_at(distance: float) -> Tensor:
        return model.loss(model.run(start + distance * direction, LENGTH, 1, model.config.layers), targets)

    hidden = start.clone().requires_grad_()
    model.loss(model.run(hidden, LENGTH, 1, model.config.layers), targets).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None
    step = 5e-3
    slope = (float(loss_at(step)) - float(loss_at(-step))) / (2 * step)
    assert float((hidden.grad * direction).sum()) == pytest.approx(slope, rel=2e-2, abs=2e-3)


def test_a_gradient_flows_through_every_layer_between_two_additions(make_tiny: Callable[[str], Path]) -> None:
    """The written-out backward against autograd over torch's own attention, element by element."""
    model, blocks = FrozenLM.load(make_tiny("llama"), torch.float32), tokens()
    ours = model.embed(blocks).requires_grad_()
    model.run(ours, LENGTH, 0, 1).square().sum().backward()  # type: ignore[no-untyped-call]
    theirs = model.embed(blocks).requires_grad_()
    _plain_layer(make_tiny("llama"), theirs).square().sum().backward()  # type: ignore[no-untyped-call]
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_the_loss_over_chosen_tokens_leaves_the_others_out(make_tiny: Callable[[str], Path]) -> None:
    model, blocks = FrozenLM.load(make_tiny("llama"), torch.float32), tokens()
    hidden, targets = model.run(model.embed(blocks), LENGTH, 0, model.config.layers), blocks.reshape(-1).clone()
    targets[::5] = -1
    every = torch.arange(model.config.vocab)
    torch.testing.assert_close(model.loss(hidden, targets, model.head[every]), model.loss(hidden, targets))
    torch.testing.assert_close(
        model.losses(hidden, targets).sum(dtype=torch.float64), model.loss(hidden, targets), rtol=1e-4, atol=1e-3
    )
    few = torch.unique(targets[targets >= 0])
    numbers = torch.full((model.config.vocab,), -1).scatter(0, few, torch.arange(len(few)))
    narrow = model.loss(hidden, torch.where(targets < 0, -1, numbers[targets.clamp_min(0)]), model.head[few])
    assert float(narrow) < float(model.loss(hidden, targets))


def test_blocks_do_not_see_each_other(make_tiny: Callable[[str], Path]) -> None:
    model, blocks = FrozenLM.load(make_tiny("llama"), torch.float32), tokens()
    both = model.run(model.embed(blocks), LENGTH, 0, model.config.layers)
    alone = model.run(model.embed(blocks[1:]), LENGTH, 0, model.config.layers)
    torch.testing.assert_close(both[LENGTH:], alone, rtol=1e-5, atol=1e-5)


def test_a_model_with_norms_on_queries_is_refused(make_tiny: Callable[[str], Path]) -> None:
    with pytest.raises(InvalidArgument, match="Qwen3"):
        FrozenLM.load(make_tiny("qwen3"))


@pytest.mark.parametrize(("native", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_without_a_dtype_it_computes_in_the_narrowest_that_is_not_emulated(
    make_tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, native: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: native)
    assert training_dtype(torch.device("cpu")) == dtype
    assert training_dtype(torch.device("cuda")) == torch.bfloat16
    monkeypatch.undo()
    assert FrozenLM.load(make_tiny("llama")).dtype == training_dtype(torch.device("cpu"))


def test_rows_that_are_no_whole_blocks_are_refused(make_tiny: Callable[[str], Path]) -> None:
    model = FrozenLM.load(make_tiny("llama"), torch.float32)
    with pytest.raises(InvalidArgument, match="no blocks of 24"):
        model.run(model.embed(tokens())[:-1], LENGTH, 0, 1)


def test_on_another_device_nothing_stays_behind(make_tiny: Callable[[str], Path]) -> None:
    """Torch's meta device has shapes and no numbers, and refuses to add its tensors to a CPU's: a GPU's place without a GPU."""
    blocks, device = tokens(), torch.device("meta")
    model = FrozenLM.load(make_tiny("llama"), torch.float32, device)
    start = model.embed(blocks).requires_grad_()
    hidden = model.run(start, LENGTH, 0, model.config.layers)
    loss = model.loss(hidden, blocks.reshape(-1))
    loss.backward()  # type: ignore[no-untyped-call]
    assert start.grad is not None
    assert {tensor.device for tensor in (hidden, loss, start.grad, model.losses(hidden.detach(), blocks.reshape(-1)))} == {device}


def _plain_layer(folder: Path, hidden: Tensor) -> Tensor:
    """Layer 0 by transformers, differentiable by autograd."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").model
    batch = hidden.view(BLOCKS, LENGTH, -1)
    positions = torch.arange(LENGTH).unsqueeze(0)
    out = theirs.layers[0](batch, position_ids=positions, position_embeddings=theirs.rotary_emb(batch, positions))
    after: Tensor = out[0] if isinstance(out, tuple) else out
    return after.reshape(-1, hidden.shape[1])

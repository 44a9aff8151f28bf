"""One pass over a corpus: forward, backward, two optimisers, again. Resumable, and the same for the same seed.

Owns the order of steps and their state. Does not read text (`corpus`), write memories (`folder`), print or decide how often to
save. Memory: the frozen model twice in bf16, what one step's backward keeps (about 1.4 GB for SmolLM2-135M and steps of four
blocks of 512 tokens), fp32 rows with one number more each, and three copies of the projections.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engram_pool.growing.corpus import Corpus
from engram_pool.growing.evaluation import targets_of
from engram_pool.growing.memory import Memory, delta
from engram_pool.growing.optimiser import Adam, RowAdagrad
from engram_pool.growing.recipe import Recipe, schedule
from treadle.contract.errors import InvalidArgument
from treadle.nn.frozen import FrozenLM

SPREAD_BLOCKS = 4  # blocks on which the hidden state's size is measured


@dataclass(frozen=True, slots=True)
class Report:
    """One step. loss: nats a token, before the step's own update; mix: it was on other text, and rows did not change."""

    step: int
    steps: int
    tokens: int
    loss: float
    mix: bool
    seconds: float


class Grower:
    """Trains `memory` beside `model` on `corpus`."""

    def __init__(self, model: FrozenLM, memory: Memory, corpus: Corpus, recipe: Recipe) -> None:
        self.model, self.memory, self.corpus, self.recipe = model, memory.to(model.device), corpus, recipe
        memory = self.memory
        if memory.hidden != model.config.hidden:
            raise InvalidArgument(
                f"memory {memory.template.name}: made for hidden size {memory.hidden}, the model has {model.config.hidden}"
            )
        self.plan = _plan(corpus, recipe)
        self.step_done, self.tokens_done = 0, 0
        vocabulary = corpus.vocabulary()
        self._numbers = np.full(model.config.vocab, -1, dtype=np.int64)
        self._numbers[vocabulary] = np.arange(len(vocabulary))
        # The softmax goes over the tokens that occur: a third of the vocabulary costs a third, and the rest never was a target.
        self._chosen = model.head[torch.from_numpy(vocabulary).to(model.device)].contiguous()
        self._rows = {layer: RowAdagrad(part.rows, recipe.row_rate, recipe.row_floor) for layer, part in memory.layers.items()}
        self._adam = Adam([tensor for part in memory.layers.values() for tensor in part.projections], recipe.projection_rate)

    def run(self) -> Iterator[Report]:
        """Take the steps that are left; a report after each. Stop by not asking for the next; go on by calling again."""
        while self.step_done < len(self.plan):
            yield self._step()

    def state(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, as tensors; those of the memory are shared, not copied."""
        state = {"steps": torch.tensor(self.step_done), "tokens": torch.tensor(self.tokens_done)}
        state |= {f"adam.{name}": value for name, value in self._adam.state().items()}
        for layer, part in self.memory.layers.items():
            tensors = {"rows": part.rows, "wkv": part.wkv, "query_weight": part.query_weight, "key_weight": part.key_weight}
            state |= {f"{layer}.{name}": value for name, value in tensors.items()}
            state |= {f"{layer}.adagrad.{name}": value for name, value in self._rows[layer].state().items()}
        return state

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was taken. Raises InvalidArgument if it is of another shape."""
        try:
            for layer, part in self.memory.layers.items():
                part.rows.copy_(state[f"{layer}.rows"])
                part.wkv.copy_(state[f"{layer}.wkv"])
                part.query_weight.copy_(state[f"{layer}.query_weight"])
                part.key_weight.copy_(state[f"{layer}.key_weight"])
                self._rows[layer].restore({name: state[f"{layer}.adagrad.{name}"] for name in ("sums", "mean")})
            self._adam.restore({name.removeprefix("adam."): value for name, value in state.items() if name.startswith("adam.")})
            self.step_done, self.tokens_done = int(state["steps"]), int(state["tokens"])
        except (KeyError, RuntimeError) as error:
            raise InvalidArgument(f"checkpoint: not of this memory: {error}") from error

    def _step(self) -> Report:
        began = time.monotonic()
        mix, blocks = self.plan[self.step_done]
        text = (self.corpus.mix if mix else self.corpus.train)[blocks]
        loss, predicted = self._learn(text, mix, schedule(self.step_done / len(self.plan)))
        self.step_done += 1
        self.tokens_done += 0 if mix else text.size
        return Report(self.step_done, len(self.plan), self.tokens_done, loss / predicted, mix, time.monotonic() - began)

    def _learn(self, text: NDArray[np.int64], mix: bool, factor: float) -> tuple[float, int]:
        """One step on blocks [B, L]: (summed loss, predicted tokens)."""
        length, at, looked_up = text.shape[1], 0, {}
        projections = self._adam.parameters if self._adam.rate else []
        for tensor in projections:
            tensor.requires_grad_(True)
        hidden = self.model.embed(torch.from_numpy(text))
        for layer, part in self.memory.layers.items():
            hidden = self.model.run(hidden, length, at, layer)
            ids = self.memory.ids(layer, text)
            rows = part.rows[ids].flatten(1).requires_grad_(not mix)
            looked_up[layer] = ids, rows
            hidden, at = hidden + delta(part, hidden, rows), layer
        hidden = self.model.run(hidden, length, at, self.model.config.layers)
        targets = torch.from_numpy(np.where((wanted := targets_of(text).numpy()) < 0, -1, self._numbers[wanted]))
        loss = self.model.loss(hidden, targets, self._chosen)
        predicted = int((targets >= 0).sum())
        if not math.isfinite(float(loss.detach())):  # before it is in every row
            raise InvalidArgument(
                f"step {self.step_done + 1}: the loss is {float(loss.detach())}; grow again with --restart and another --seed or text"
            )
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for layer, (ids, rows) in looked_up.items():
                if rows.grad is not None:
                    self._rows[layer].step(ids, rows.grad, factor)
            for tensor in projections:
                tensor.requires_grad_(False)
            if projections:
                self._adam.step([tensor.grad / predicted for tensor in projections if tensor.grad is not None], factor)
                for tensor in projections:
                    tensor.grad = None
        return float(loss.detach()), predicted


def spread_of(model: FrozenLM, blocks: NDArray[np.int64], layers: tuple[int, ...]) -> dict[int, float]:
    """Median over tokens of the hidden state's root mean square before each layer, on a few blocks."""
    spread, at = {}, 0
    some = blocks[:SPREAD_BLOCKS]
    with torch.no_grad():
        hidden = model.embed(torch.from_numpy(some))
        for layer in layers:
            hidden, at = model.run(hidden, some.shape[1], at, layer), layer
            spread[layer] = float(hidden.to(torch.float32).square().mean(1).sqrt().median())
    return spread


def _plan(corpus: Corpus, recipe: Recipe) -> list[tuple[bool, NDArray[np.int64]]]:
    """(on other text, block numbers) of each step: a fixed shuffle for each pass, steps on other text in between."""
    wanted = len(corpus.train) if not recipe.tokens_max else min(len(corpus.train), -(-recipe.tokens_max // recipe.block_tokens))
    if wanted == 0:
        raise InvalidArgument("text: no whole block to learn from")
    order = np.random.default_rng([recipe.seed, 1])
    chosen = order.permutation(len(corpus.train))[:wanted]
    other = np.random.default_rng([recipe.seed, 2])
    mixing = recipe.mix_every and len(corpus.mix)
    plan: list[tuple[bool, NDArray[np.int64]]] = []
    for number in range(recipe.passes):
        blocks = chosen if number == 0 else order.permutation(chosen)
        for at in range(0, len(blocks), recipe.blocks_per_step):
            plan.append((False, blocks[at : at + recipe.blocks_per_step]))
            if mixing and len(plan) % recipe.mix_every == recipe.mix_every - 1:
                plan.append((True, other.integers(0, len(corpus.mix), recipe.mix_blocks)))
    return plan

"""The operator at which a layer waits for its rows: opaque, so that a compiled graph calls it like an eager one."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class RunningStep(Protocol):
    """A step whose rows are on their way."""

    def wants(self, layer: int) -> bool:
        """Whether any of its memories has a table at this layer."""

    def before_layer(self, layer: int, hidden: Tensor, residual: Tensor | None) -> Tensor:
        """What goes into the layer: `hidden` with the rows of this layer fused, in memory of its own."""


class _Process:
    """The step that this process's model runs now; a process runs one model, one step at a time."""

    step: RunningStep | None = None


def run(step: RunningStep | None) -> None:
    """From now on the model's Engram layers take their rows from `step`; None: they do nothing, as in runs without requests."""
    _Process.step = step


def is_wanted(layer: int) -> bool:
    """Whether the operator would do anything; so that an eager layer need not call it."""
    return _Process.step is not None and _Process.step.wants(layer)


@torch.library.custom_op("treadle::engram_fuse", mutates_args=())
def engram_fuse(hidden: Tensor, residual: Tensor | None, layer: int) -> Tensor:
    """`hidden` [T, width], with the step's rows of `layer` fused; the stream is hidden + residual. A copy in runs without a step.

    Waits for rows without the GIL. Raises what keeps the step from going on; rows that are late or gone do not.
    """
    step = _Process.step
    return hidden.clone() if step is None or not step.wants(layer) else step.before_layer(layer, hidden, residual)


@engram_fuse.register_fake
def _(hidden: Tensor, residual: Tensor | None, layer: int) -> Tensor:
    return torch.empty_like(hidden)

"""The two optimisers of a memory: row-wise Adagrad with a floor for rows, Adam for projections.

Owns their state. The floor matters: without it a token that is already predicted well moves a fresh row by a full step.
State is plain tensors, so that a checkpoint is a safetensors file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MEAN_KEPT = 0.95  # of the running mean of touched rows' squares at each step
BETA_1, BETA_2, EPS = 0.9, 0.98, 1e-8


class RowAdagrad:
    """row -= rate G / sqrt(acc + floor x mean): G the row's gradient of the summed loss, acc its sum of mean(G^2) so far.

    sums: fp32 [N], acc of each row; mean: running mean of mean(G^2) over touched rows, of which 0 says that none was yet
    """

    def __init__(self, rows: Tensor, rate: float, floor: float) -> None:
        self.rows, self.rate, self.floor = rows, rate, floor
        self.sums = torch.zeros(rows.shape[0], device=rows.device)
        self.mean = torch.zeros((), device=rows.device)

    def step(self, ids: Tensor, grad: Tensor, factor: float) -> None:
        """One step. ids: int64 [T, C]; grad: fp32 [T, C x dim], of the rows as they were looked up; factor: on the rate."""
        touched, inverse = torch.unique(ids.reshape(-1), return_inverse=True)
        total = torch.zeros(len(touched), self.rows.shape[1], device=self.rows.device)
        total.index_add_(0, inverse, grad.reshape(-1, self.rows.shape[1]))
        squares = total.square().mean(1)
        moved = squares > 0
        if not bool(moved.any()):
            return
        now = squares[moved].mean()
        self.mean = now if float(self.mean) == 0.0 else MEAN_KEPT * self.mean + (1 - MEAN_KEPT) * now
        sums = self.sums[touched] + squares
        self.sums[touched] = sums
        self.rows[touched] -= self.rate * factor * total / (sums + self.floor * self.mean).sqrt().unsqueeze(1)

    def state(self) -> dict[str, Tensor]:
        """What goes into a checkpoint."""
        return {"sums": self.sums, "mean": self.mean}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.sums, self.mean = (state[name].to(self.rows.device, copy=True) for name in ("sums", "mean"))


class Adam:
    """Adam on the gradient of the mean loss."""

    def __init__(self, parameters: Sequence[Tensor], rate: float) -> None:
        self.parameters, self.rate, self.steps = list(parameters), rate, 0
        self.first = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.second = [torch.zeros_like(parameter) for parameter in self.parameters]

    def step(self, grads: Sequence[Tensor], factor: float) -> None:
        """One step; grads in the order of the parameters; factor: on the rate."""
        self.steps += 1
        size = self.rate * factor / (1 - BETA_1**self.steps)
        correction = (1 - BETA_2**self.steps) ** 0.5
        for parameter, grad, first, second in zip(self.parameters, grads, self.first, self.second, strict=True):
            first.mul_(BETA_1).add_(grad, alpha=1 - BETA_1)
            second.mul_(BETA_2).addcmul_(grad, grad, value=1 - BETA_2)
            parameter.sub_(size * first / (second.sqrt() / correction + EPS))

    def state(self) -> dict[str, Tensor]:
        """What goes into a checkpoint."""
        moments = {f"first.{i}": value for i, value in enumerate(self.first)}
        return moments | {f"second.{i}": value for i, value in enumerate(self.second)} | {"steps": torch.tensor(self.steps)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        self.steps = int(state["steps"])
        self.first = [state[f"first.{i}"].to(parameter.device, copy=True) for i, parameter in enumerate(self.parameters)]
        self.second = [state[f"second.{i}"].to(parameter.device, copy=True) for i, parameter in enumerate(self.parameters)]

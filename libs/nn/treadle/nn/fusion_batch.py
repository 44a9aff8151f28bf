"""The fusion of one step in which tokens use different Engram memories.

Owns what several memories can share in one layer: rows of one layout are read together and gates of one form computed
together; each memory's own projection and convolution remain. The mathematics is `fusion`'s; which token uses what is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from treadle.nn.dequantise import dequantise
from treadle.nn.fusion import EngramFusion, gate
from treadle.nn.kv import KeepsHistory


@dataclass(frozen=True, slots=True, eq=False)
class FusionGroup:
    """Tokens of a step that lie side by side and use one memory.

    fusion:     of that memory
    first:      of them in the step's hidden state
    rows:       [t, C, row.bytes] uint8, borrowed, as gathered
    live:       [t] bool or None, False where a token is dead or its rows are missing: its gate is 0
    starts, kv: of the group's own sequences, starts[0] = 0; as in EngramFusion.forward
    """

    fusion: EngramFusion
    first: int
    rows: Tensor
    live: Tensor | None = None
    starts: Sequence[int] = ()
    kv: Sequence[KeepsHistory] = ()

    @property
    def tokens(self) -> slice:
        """Where they are in the step's hidden state."""
        return slice(self.first, self.first + self.rows.shape[0])


@torch.inference_mode()
def fuse_groups(layer: int, hidden: Tensor, groups: Sequence[FusionGroup]) -> list[Tensor]:
    """What is to be added to the hidden state before `layer`, for each group [t, hidden] of hidden's dtype.

    hidden: [T, hidden] of the whole step
    The same numbers as EngramFusion.forward for each group alone, up to the last bits of a projection with other row counts.
    Raises what EngramFusion.forward does.
    """
    deltas: dict[int, Tensor] = {}
    for alike in _alike(groups).values():
        if len(alike) == 1:
            group = groups[alike[0]]
            deltas[alike[0]] = group.fusion.forward(layer, hidden[group.tokens], group.rows, group.live, group.starts, group.kv)
        else:
            deltas.update(zip(alike, _fuse_alike(layer, hidden, [groups[index] for index in alike]), strict=True))
    return [deltas[index] for index in range(len(groups))]


def _alike(groups: Sequence[FusionGroup]) -> dict[str, list[int]]:
    """Indices of the groups whose rows are read and gated in the same way."""
    alike: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        alike.setdefault(group.fusion.kind, []).append(index)
    return alike


def _fuse_alike(layer: int, hidden: Tensor, groups: Sequence[FusionGroup]) -> list[Tensor]:
    parts = [group.fusion.part(layer) for group in groups]
    for group in groups:
        group.fusion.check(hidden[group.tokens], group.rows, group.live)
    counts = [group.rows.shape[0] for group in groups]
    embedded = dequantise(torch.cat([group.rows for group in groups]), groups[0].fusion.row).flatten(1)
    projected = torch.cat([part.project(rows) for part, rows in zip(parts, torch.split(embedded, counts), strict=True)])
    key, value = projected.chunk(2, dim=-1)
    owner = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(counts))
    query_weight = torch.stack([part.query_weight for part in parts])[owner]
    key_weight = torch.stack([part.key_weight for part in parts])[owner]
    trust = gate(_taken(hidden, groups).to(torch.float32), key, query_weight, key_weight, groups[0].fusion.shape.form)
    gated = torch.split(trust.unsqueeze(-1) * value, counts)
    return [
        group.fusion.gated(layer, own, group.live, group.starts, group.kv).to(hidden.dtype)
        for group, own in zip(groups, gated, strict=True)
    ]


def _taken(hidden: Tensor, groups: Sequence[FusionGroup]) -> Tensor:
    """The groups' tokens, one after the other: a view where they follow each other in the step."""
    first, last = groups[0].tokens.start, groups[-1].tokens.stop
    if all(one.tokens.stop == two.first for one, two in pairwise(groups)):
        return hidden[first:last]
    return torch.cat([hidden[group.tokens] for group in groups])

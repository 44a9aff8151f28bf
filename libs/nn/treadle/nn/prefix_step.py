"""The attention of one forward step in which something stands before the requests' own keys: dictionaries, or one prefix for all.

Owns which rows look into which memory, sharing a lookup between requests with the same one, and merging what was found. Does not own
the layers (`model`), the mathematics (`attention`) or the search (`prefix_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.kernels import merge_states
from treadle.nn.attention import attention_state, merged_output
from treadle.nn.config import ModelConfig
from treadle.nn.kv import SequenceKV
from treadle.nn.own_keys import OwnKeys
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse
from treadle.nn.rope import Rope

Rows = slice | Tensor


class PrefixCollector(Protocol):
    """Takes, layer by layer, what a dictionary is made of."""

    def take(self, layer: int, queries: Tensor, rotated: Tensor, a: Tensor, log_z: Tensor) -> None:
        """All T rows of the step in one layer, in the order of its tokens.

        queries, rotated: [T, H, head_dim] of the model's dtype, before and after RoPE (q_norm done); views of larger tensors
        a, log_z:         fp32 [T, H, head_dim] and [T, H]: the attention state over the shared prefix alone
        Nobody writes them afterwards; who keeps a part keeps the whole alive unless it is copied.
        """


@dataclass(slots=True, eq=False)
class _Group:
    """The requests of a step that use one memory. rows: theirs, None: all; outside: bool [rows, B, G / c] of each layer looked up so far."""

    memory: PrefixMemory
    requests: list[int]
    uses: list[PrefixUse]
    rows: NDArray[np.int64] | None
    outside: list[NDArray[np.bool_]] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a lookup of this step failed: none follows it."""
        return any(use.failure is not None for use in self.uses)


class PrefixStep:
    """One step's memories. A row attends, beside its own keys, to its request's dictionary where that has the layer, else to `shared`."""

    def __init__(
        self, config: ModelConfig, rope: Rope, starts: Sequence[int], kv: Sequence[SequenceKV],
        prefixes: Sequence[PrefixUse | None] | None, shared: SequenceKV | None, collect: PrefixCollector | None,
    ) -> None:  # fmt: skip
        """Arguments as for `CausalLM.forward`. Raises InvalidArgument, and FingerprintMismatch naming what of the model differs."""
        requests = len(starts) - 1
        self._rope, self._starts, self._shared, self._collect = rope, starts, shared, collect
        self._uses = list(prefixes) if prefixes is not None else [None] * requests
        if len(self._uses) != requests:
            raise InvalidArgument(f"prefixes: one for each of {requests} requests (None: without), got {len(self._uses)}")
        if collect is not None and (shared is None or not shared.length):
            raise InvalidArgument("collect: states are over a prefix that all requests share; give its KV as `shared`")
        if any(sequence is shared for sequence in kv):
            raise InvalidArgument("shared: a request continues it by itself; give that request a sequence of its own")
        members: dict[int, list[int]] = {}
        for request, use in enumerate(self._uses):
            if use is not None:
                _check_model(use.memory, config)
                members.setdefault(id(use.memory), []).append(request)
        self._groups = [self._group(requests) for requests in members.values()]

    def attend(self, layer: int, query: Tensor, rotated: Tensor, new: Tensor, own: OwnKeys) -> Tensor:
        """The output of attention in one layer, fp32 [T, H, head_dim], in a buffer of `own`.

        query, rotated: [T, H, head_dim] before and after RoPE; new: [T, 2, kv_heads, head_dim], appended to the sequences
        """
        groups = [group for group in self._groups if layer in group.memory.layers and not group.failed]
        looking = {request for group in groups for request in group.requests}
        out, log_z = own.attend(layer, rotated, new, looking if self._shared is None else range(len(self._uses)))
        for group in groups:
            self._look_up(layer, group, query, rotated, out, log_z)
        if self._shared is not None:
            self._see_shared(layer, looking, query, rotated, out, log_z)
        return out

    def finish(self) -> None:
        """Count the lookups of a step that went through."""
        for group in self._groups:
            if group.failed:
                continue
            lookups = sum(each[0].size for each in group.outside)
            counts = np.sum([each.sum((1, 2)) for each in group.outside], axis=0)
            counted = 0
            for request, use in zip(group.requests, group.uses, strict=True):
                rows = self._starts[request + 1] - self._starts[request]
                use.count(lookups, counts[counted : counted + rows].tolist())
                counted += rows

    def _look_up(self, layer: int, group: _Group, query: Tensor, rotated: Tensor, out: Tensor, log_z: Tensor) -> None:
        whole = query, rotated
        if group.rows is not None:
            rows = torch.from_numpy(group.rows)
            query, rotated = query[rows], rotated[rows]
        try:
            found = group.memory.lookup(layer, query, rotated, self._rope)
        except Exception as error:
            if not all(use.contained for use in group.uses):
                raise
            if len(group.uses) == 1:
                group.uses[0].failure = error
                return
            for part in self._apart(group):  # requests are strangers to each other: what fails one alone ends that one alone
                self._look_up(layer, part, *whole, out, log_z)
            return
        assert found is not None
        merge_states(out.numpy(), log_z.numpy(), group.rows, found.states.contiguous().numpy(), found.log_z.contiguous().numpy())
        group.outside.append(found.outside.numpy())

    def _see_shared(self, layer: int, looking: set[int], query: Tensor, rotated: Tensor, out: Tensor, log_z: Tensor) -> None:
        assert self._shared is not None
        rest = self._rows([request for request in range(len(self._uses)) if request not in looking])
        if self._collect is None and len(looking) == len(self._uses):
            return
        rows = slice(None) if self._collect is not None else rest
        a, over_prefix = attention_state(rotated[rows], self._shared.keys(layer), self._shared.values(layer))
        if self._collect is not None:
            self._collect.take(layer, query, rotated, a, over_prefix)
            a, over_prefix = a[rest], over_prefix[rest]
        out[rest] = merged_output(out[rest], log_z[rest], a, over_prefix)

    def _group(self, requests: list[int]) -> _Group:
        uses = [use for request in requests if (use := self._uses[request]) is not None]
        rows = [row for request in requests for row in range(self._starts[request], self._starts[request + 1])]
        every = len(rows) == self._starts[-1]
        return _Group(uses[0].memory, requests, uses, None if every else np.array(rows, dtype=np.int64))

    def _apart(self, group: _Group) -> list[_Group]:
        """A group of one request for each of a group's: from now on they look up alone."""
        parts = [self._group([request]) for request in group.requests]
        ends = np.cumsum([self._starts[request + 1] - self._starts[request] for request in group.requests])[:-1]
        for each in group.outside:
            for part, own in zip(parts, np.split(each, ends), strict=True):
                part.outside.append(own)
        self._groups = [*(other for other in self._groups if other is not group), *parts]
        return parts

    def _rows(self, requests: list[int]) -> Rows:
        """The rows of rising requests: a view of the step where they lie together, as those of a step with one memory do."""
        if not requests:
            return slice(0, 0)
        if requests[-1] - requests[0] == len(requests) - 1:
            return slice(self._starts[requests[0]], self._starts[requests[-1] + 1])
        return torch.cat([torch.arange(self._starts[request], self._starts[request + 1]) for request in requests])


def _check_model(memory: PrefixMemory, config: ModelConfig) -> None:
    made_for = memory.dictionary.model
    for name in ("layers", "heads", "kv_heads", "head_dim"):
        if getattr(made_for, name) != getattr(config, name):
            raise FingerprintMismatch(f"model.{name}", getattr(made_for, name), getattr(config, name))

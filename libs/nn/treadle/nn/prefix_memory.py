"""A prefix as a dictionary of attention states: each token looks up, in every layer, what attention over the prefix would have given.

Owns the step from queries to states, and the count of lookups that found nothing like themselves. Does not know a batch (`prefix_step`),
how entries are searched and read (`treadle.kernels`), or where files come from (`treadle.client.asm`).
Source: arXiv 2605.18226, equations 6 and 7. The guard is not in the paper: docs/decisions/0033.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.dictionary import LOG_BASE, Dictionary, tensor_name
from treadle.contract.lookup_settings import GUARD_PERCENT, LISTS_PROBED, LookupIndex, LookupSettings
from treadle.kernels import EntryArrays, EntryStates, FoundEntries, entry_states_reference
from treadle.nn.entry_search import GraphSearch
from treadle.nn.lookup_keys import lookup_queries
from treadle.nn.matched_keys import MATCHED_PARTS, MatchedKeys
from treadle.nn.rope import Rope

OUTSIDE_SHARE_MAX = 0.9  # of a request's lookups; above it the request is off the dictionary's task (docs/decisions/0033)


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """What T tokens found in one layer.

    states:  fp32 [T, H, head_dim]; log_z: fp32 [T, H], -inf for an entry without samples; log_base: of log_z
    cosines: fp32 [T, B, G / c], of each lookup to the entry that it found
    outside: bool [T, B, G / c], True where the cosine lies below the guard's quantile of the calibration
    """

    states: Tensor
    log_z: Tensor
    cosines: Tensor
    outside: Tensor
    log_base: str = LOG_BASE


class _Layer(Protocol):
    """One layer's dictionary, looked up: `treadle.kernels.EntryStates`, or the same over a graph of the keys."""

    def find(self, queries: NDArray[np.float32], rows: NDArray[np.int64] | None = None) -> FoundEntries:
        """As `treadle.kernels.EntryStates`."""


class PrefixMemory:
    """One dictionary, its tensors borrowed where they lie (a mapped file will do); reads from any thread."""

    def __init__(
        self,
        dictionary: Dictionary,
        tensors: Mapping[str, NDArray[Any]],
        *,
        lists_probed: int = LISTS_PROBED,
        guard_percent: int = GUARD_PERCENT,
        index: LookupIndex | str = LookupIndex.SCAN,
    ) -> None:
        """tensors: as `map_tensors` gives them; they must outlive this object
        lists_probed, guard_percent, index: see LookupSettings; `hnsw` links the keys to a graph at once
        Raises InvalidArgument (a setting is out of range), NotFound (hnsw without hnswlib).
        """
        settings = LookupSettings(lists_probed, guard_percent, index)
        self.dictionary = dictionary
        self.layers = frozenset(dictionary.layers)
        opened = {layer: _opened(dictionary, tensors, layer, settings) for layer in dictionary.layers}
        self._layers = {layer: searched for layer, (searched, _) in opened.items()}
        self._graph_bytes = sum(graph_bytes for _, graph_bytes in opened.values())
        self._matched = {
            layer: MatchedKeys.at_rest(*(tensors[tensor_name(layer, name)] for name in MATCHED_PARTS))
            for layer in (dictionary.layers if dictionary.settings.matched_keys else ())
        }

    @property
    def copied_bytes(self) -> int:
        """Bytes that this object keeps beside the borrowed tensors: matched keys in fp32, and the graphs of `hnsw`."""
        return self._graph_bytes + sum(matched.nbytes for matched in self._matched.values())

    @property
    def position_offset(self) -> int:
        """The dictionary's."""
        return self.dictionary.position_offset

    def lookup(self, layer: int, queries: Tensor, rotated: Tensor, rope: Rope | None = None) -> Found | None:
        """What T tokens find in `layer`; None where it has no dictionary.

        queries, rotated: [T, H, head_dim] before and after RoPE, q_norm done; rope: the model's, for rope-unified keys alone
        Raises InvalidArgument where a query holds NaN, or rope-unified keys come without `rope`.
        """
        if layer not in self.layers:
            return None
        heads = lookup_queries(queries, rotated, rope, self.dictionary.settings)
        if heads.stride(2) != 1 or heads.stride(1) != heads.shape[2]:
            heads = heads.contiguous()
        found = self._layers[layer].find(heads.numpy())
        states, log_z, cosines, outside = map(torch.from_numpy, (found.states, found.log_z, found.cosines, found.outside))
        matched = self._matched.get(layer)
        if matched is not None:  # entries say what is missing in what these see
            seen, seen_log_z = matched.state(rotated)
            states += seen
            log_z += seen_log_z
        return Found(states, log_z, cosines, outside)


@dataclass(slots=True, eq=False)
class PrefixUse:
    """One request's use of a memory; of the thread that runs the forward alone.

    lookups: made by all its tokens in all layers; lookups_outside: those among them that the guard calls outside
    outside_of: of each token that was run, in order, how many of its `lookups_each` were outside
    contained: a lookup that fails does not end the step: `failure` holds the error then, and the request's own numbers are worth nothing;
               whoever runs the forward must look. Else the forward raises it
    """

    memory: PrefixMemory
    lookups: int = 0
    lookups_outside: int = 0
    lookups_each: int = 0
    outside_of: list[int] = field(default_factory=list)
    contained: bool = False
    failure: Exception | None = None

    def count(self, lookups_each: int, outside_of: list[int]) -> None:
        """Add the lookups of further tokens: how many each made, and how many of each were outside."""
        self.lookups_each = lookups_each
        self.outside_of += outside_of
        self.add(lookups_each * len(outside_of), sum(outside_of))

    def add(self, lookups: int, outside: int) -> None:
        """Add what was counted elsewhere, of tokens that this request takes over from another one."""
        self.lookups += lookups
        self.lookups_outside += outside

    def of_tokens(self, first: int, count: int) -> tuple[int, int]:
        """Lookups, and those outside, of `count` of the tokens that were run, from `first` on."""
        return self.lookups_each * count, sum(self.outside_of[first : first + count])

    def off_task(self, share_max: float = OUTSIDE_SHARE_MAX) -> bool:
        """Whether the request asks for other things than the dictionary was calibrated with: more than `share_max` lookups were outside."""
        return self.lookups_outside > share_max * self.lookups


def _opened(
    dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]], layer: int, settings: LookupSettings
) -> tuple[_Layer, int]:
    """A layer as it is looked up, and the bytes of its graph."""
    entries = EntryArrays.of_layer(
        dictionary, tensors, layer, guard_percent=settings.guard_percent, lists_probed=settings.lists_probed
    )
    if settings.index == LookupIndex.SCAN:
        return EntryStates(entries), 0
    graph = GraphSearch(entries.keys, entries.key_scales, dictionary.settings.seed)
    return entry_states_reference.EntryStates(entries, graph.find), graph.nbytes

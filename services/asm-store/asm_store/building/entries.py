"""The states of a cluster as one entry: sums that can be made anywhere, in any order and number of parts, and be joined.

Owns the two ways to aggregate. Associative and commutative up to rounding (fp64 here), so shards, workers and resumed builds agree.
Source: arXiv 2605.18226, equation 5, in log space; `geo` is ours, see docs/decisions/0033.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from treadle.contract.dictionary import Aggregation


@dataclass(frozen=True, slots=True, eq=False)
class Aggregated:
    """K entries. keys: fp32 [K, D], of length 1; a: fp32 [K, h, head_dim]; log_z: fp32 [K, h], -inf where counts is 0; counts: i64 [K]."""

    keys: Tensor
    a: Tensor
    log_z: Tensor
    counts: Tensor

    def taken(self, order: Tensor) -> Aggregated:
        """Entry order[i] at place i. order: int64 [K]."""
        return Aggregated(self.keys[order], self.a[order], self.log_z[order], self.counts[order])


class Entries(ABC):
    """Sums over the samples of K clusters: n of them, of their keys, and of their states as the aggregation wants them."""

    def __init__(self, entries: int, heads: int, head_dim: int) -> None:
        self.counts = torch.zeros(entries, dtype=torch.int64)
        self.keys = torch.zeros(entries, heads * head_dim, dtype=torch.float64)
        self.values = torch.zeros(entries, heads, head_dim, dtype=torch.float64)

    def add(self, index: Tensor, keys: Tensor, a: Tensor, log_z: Tensor) -> None:
        """Add samples. index: int64 [n], their clusters; keys: [n, D]; a: [n, h, head_dim]; log_z: [n, h], finite."""
        self.counts += torch.bincount(index, minlength=len(self.counts))
        self.keys.index_add_(0, index, keys.to(torch.float64))
        self._add_states(index, a.to(torch.float64), log_z.to(torch.float64))

    def merge(self, other: Entries) -> None:
        """Add the samples of another part, made with the same centroids and the same aggregation."""
        self.counts += other.counts
        self.keys += other.keys
        self._merge_states(other)

    def aggregated(self) -> Aggregated:
        """The entries. Keys of clusters without samples are zeros."""
        a, log_z = self._states()
        keys = torch.nn.functional.normalize(self.keys, dim=-1)
        return Aggregated(keys.to(torch.float32), a.to(torch.float32), log_z.to(torch.float32), self.counts.clone())

    @abstractmethod
    def _add_states(self, index: Tensor, a: Tensor, log_z: Tensor) -> None: ...
    @abstractmethod
    def _merge_states(self, other: Entries) -> None: ...
    @abstractmethod
    def _states(self) -> tuple[Tensor, Tensor]: ...


class Eq5Entries(Entries):
    """Z is the mean of the samples' Z, outputs are weighted by Z: (m, S, v) with m = max log Z, S = sum exp(log Z - m), v = sum exp(log Z - m) a."""

    def __init__(self, entries: int, heads: int, head_dim: int) -> None:
        super().__init__(entries, heads, head_dim)
        self.peak = torch.full((entries, heads), -torch.inf, dtype=torch.float64)
        self.weight = torch.zeros(entries, heads, dtype=torch.float64)

    def _add_states(self, index: Tensor, a: Tensor, log_z: Tensor) -> None:
        self._raise_peak(self.peak.scatter_reduce(0, index.unsqueeze(1).expand_as(log_z), log_z, "amax"))
        weight = (log_z - self.peak[index]).exp()
        self.weight.index_add_(0, index, weight)
        self.values.index_add_(0, index, weight.unsqueeze(-1) * a)

    def _merge_states(self, other: Entries) -> None:
        assert isinstance(other, Eq5Entries)
        self._raise_peak(torch.maximum(self.peak, other.peak))
        scale = _lowered(other.peak, self.peak)
        self.weight += other.weight * scale
        self.values += other.values * scale.unsqueeze(-1)

    def _raise_peak(self, peak: Tensor) -> None:
        scale = _lowered(self.peak, peak)
        self.weight *= scale
        self.values *= scale.unsqueeze(-1)
        self.peak = peak

    def _states(self) -> tuple[Tensor, Tensor]:
        filled = (self.counts > 0).unsqueeze(1)
        a = self.values / torch.where(filled, self.weight, 1.0).unsqueeze(-1)
        log_z = self.peak + self.weight.log() - self.counts.unsqueeze(1).log()
        return a, torch.where(filled, log_z, -torch.inf)


class GeoEntries(Entries):
    """log Z is the mean of the samples' log Z, the output their plain mean."""

    def __init__(self, entries: int, heads: int, head_dim: int) -> None:
        super().__init__(entries, heads, head_dim)
        self.log_z = torch.zeros(entries, heads, dtype=torch.float64)

    def _add_states(self, index: Tensor, a: Tensor, log_z: Tensor) -> None:
        self.log_z.index_add_(0, index, log_z)
        self.values.index_add_(0, index, a)

    def _merge_states(self, other: Entries) -> None:
        assert isinstance(other, GeoEntries)
        self.log_z += other.log_z
        self.values += other.values

    def _states(self) -> tuple[Tensor, Tensor]:
        counts = self.counts.clamp_min(1).unsqueeze(1)
        return self.values / counts.unsqueeze(-1), torch.where(self.counts.unsqueeze(1) > 0, self.log_z / counts, -torch.inf)


def new_entries(aggregation: Aggregation, entries: int, heads: int, head_dim: int) -> Entries:
    """Empty entries; heads: of one entry."""
    return (Eq5Entries if aggregation is Aggregation.EQ5 else GeoEntries)(entries, heads, head_dim)


def _lowered(before: Tensor, now: Tensor) -> Tensor:
    """exp(before - now), now being no less; 1 where there was nothing before and is nothing now."""
    return torch.where(before.isneginf(), torch.where(now.isneginf(), 1.0, 0.0), (before - now).exp())

"""How engines look a dictionary up: what they may choose and no dictionary says. Apart from what computes, so that settings are read without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from treadle.contract.checks import expect, is_int
from treadle.contract.dictionary import LISTS_MAX, QUANTILES

LISTS_PROBED = 16  # the paper's top-m
GUARD_PERCENT = 50  # a lookup is outside where its cosine is less than that of all but so many per cent of the calibration


class LookupIndex(StrEnum):
    """How the nearest entry is found."""

    SCAN = "scan"  # in place: all entries, or the probed lists of a dictionary of two levels
    HNSW = "hnsw"  # a graph over a copy of the keys, linked when a dictionary is opened; needs hnswlib


@dataclass(frozen=True, slots=True)
class LookupSettings:
    """Of one engine, for all its dictionaries. Raises InvalidArgument for a value out of range.

    lists_probed:  of a two-level lookup; a dictionary without lists scans all entries
    guard_percent: 0 to 100, which quantile of the layer's calibration a cosine must reach; 0: nearly nothing is outside
    """

    lists_probed: int = LISTS_PROBED
    guard_percent: int = GUARD_PERCENT
    index: LookupIndex | str = LookupIndex.SCAN

    def __post_init__(self) -> None:
        expect(is_int(self.lists_probed, 1, LISTS_MAX), f"lists_probed: 1 to {LISTS_MAX}, got {self.lists_probed!r}")
        expect(is_int(self.guard_percent, 0, QUANTILES - 1), f"guard_percent: 0 to {QUANTILES - 1}, got {self.guard_percent!r}")
        expect(self.index in list(LookupIndex), f"index: {' or '.join(LookupIndex)}, got {self.index!r}")

"""A plain n-gram model of token ids in a budget of bytes: what a memory of n-grams must beat.

Interpolated modified Kneser-Ney (Chen and Goodman 1999, section 3) over counts that fit a byte budget; the entries whose
loss matters least go first (weighted difference, Seymore and Rosenfeld 1996). Owns counting, pruning, the size that the
counts would have as a file, and probabilities. Does not know a language model (`mixture`).

As a file an entry is: token u16 and count u8 (u32 at order 1), and where it has continuations also where they begin u32 and
the sum of their counts u32. Probabilities are computed from counts: nothing is quantised, each context's sum is 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Kept = tuple[NDArray[np.bool_], NDArray[np.bool_]]

ENTRY_BYTES, CONTEXT_BYTES = 3, 8
FIRST_BYTES = 3  # more for an entry of order 1
ORDER_MAX = 6
BISECTIONS = 60  # of the threshold for pruning: to the last bit of a double
DISCOUNT_DEFAULT = (0.5, 1.0, 1.5)  # where a text is too small to estimate them
COUNT_MAX = 255  # of an entry; discounts are the same from 3 on, and a share of 255 is a share


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """The n-grams of one order, sorted by key.

    keys:   int64 [n], index of the prefix in the level below x vocabulary + token (the token alone at order 1)
    counts: int64 [n]; occurrences at the highest order, else how many different tokens stand before it
    seen:   int64 [n], occurrences; says what pruning costs, and is no part of the file
    totals: int64 [m], for each entry of the level below: sum of its continuations' counts before pruning (m = 1 at order 1)
    discounts: of counts 1, 2, and 3 or more
    """

    keys: Ints
    counts: Ints
    seen: Ints
    totals: Ints
    discounts: tuple[float, float, float]

    def kept(self) -> Floats:
        """Counts less their discount."""
        return np.asarray(self.counts - np.asarray((0.0, *self.discounts))[np.minimum(self.counts, 3)], dtype=np.float64)


class NgramModel:
    """Probabilities of the next token from the longest context that was counted, each order interpolated with the one below."""

    def __init__(self, vocabulary: int, levels: list[Level]) -> None:
        self.vocabulary, self.levels = vocabulary, levels
        self._shares = [_shares(level, vocabulary if depth else 0) for depth, level in enumerate(levels)]

    @classmethod
    def count(cls, blocks: Ints, vocabulary: int, order: int) -> NgramModel:
        """Count blocks [n, L] of token ids below `vocabulary`; no n-gram reaches across blocks. Nothing is pruned.

        Raises InvalidArgument (order, or ids out of range).
        """
        if not 1 <= order <= ORDER_MAX or blocks.ndim != 2 or not blocks.size:
            raise InvalidArgument(f"ngrams: order 1 to {ORDER_MAX} and blocks [n, L], got order {order} and {blocks.shape}")
        if blocks.min() < 0 or blocks.max() >= vocabulary or vocabulary >= 1 << 24:
            raise InvalidArgument(f"ngrams: token ids of 0 to {vocabulary - 1} expected")
        keys, places = _trie(blocks, vocabulary, order)
        levels = []
        for depth in range(order):
            seen = counts = _occurrences(places[depth], len(keys[depth]))
            if depth + 1 < order:
                counts = _left_contexts(places[depth], places[depth + 1], len(keys[depth]), len(keys[depth + 1]))
            counts = np.minimum(counts, COUNT_MAX) if depth else counts
            prefixes = keys[depth] // vocabulary if depth else np.zeros(len(keys[0]), dtype=np.int64)
            totals = np.bincount(prefixes, weights=counts, minlength=len(keys[depth - 1]) if depth else 1).astype(np.int64)
            levels.append(Level(keys[depth], counts, seen, totals, _discounts(counts)))
        return cls(vocabulary, levels)

    @property
    def bytes(self) -> int:
        """What it takes as a file (see the module)."""
        return _file_bytes(self._kept_all())

    def pruned(self, bytes_max: int) -> NgramModel:
        """The model in at most `bytes_max`: without the entries that carry least and have no continuations.

        Raises InvalidArgument if single tokens alone do not fit.
        """
        if self.bytes <= bytes_max:
            return self
        worth = [self._worth(depth) for depth in range(1, len(self.levels))]
        low, high = 0.0, max(float(each.max(initial=0.0)) for each in worth) + 1.0
        if _file_bytes(self._kept(worth, high)) > bytes_max:
            raise InvalidArgument(
                f"ngrams: single tokens alone take {_file_bytes(self._kept(worth, high))} bytes, {bytes_max} are allowed"
            )
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if _file_bytes(self._kept(worth, middle)) > bytes_max else (low, middle)
        return self._chosen(self._kept(worth, high))

    def _kept_all(self) -> list[Kept]:
        return self._kept([np.ones(len(level.keys)) for level in self.levels[1:]], 0.0)

    def _kept(self, worth: list[Floats], threshold: float) -> list[Kept]:
        """For each level, which entries stay, and which of all have continuations that stay."""
        kept: list[Kept] = []
        children = np.zeros(len(self.levels[-1].keys), dtype=np.bool_)
        for depth in range(len(self.levels) - 1, 0, -1):
            stays = children | (worth[depth - 1] >= threshold)
            kept.append((stays, children))
            children = np.zeros(len(self.levels[depth - 1].keys), dtype=np.bool_)
            children[self.levels[depth].keys[stays] // self.vocabulary] = True
        return [(np.ones_like(children), children), *reversed(kept)]

    def _chosen(self, kept: list[Kept]) -> NgramModel:
        """The model of the entries that stay; their indices move, and with them the keys of the order above."""
        levels: list[Level] = []
        moved = np.empty(0, dtype=np.int64)
        for depth, (level, (stays, _)) in enumerate(zip(self.levels, kept, strict=True)):
            keys, totals = level.keys[stays], level.totals
            if depth:
                keys = moved[keys // self.vocabulary] * self.vocabulary + keys % self.vocabulary
                totals = level.totals[kept[depth - 1][0]]
            levels.append(replace(level, keys=keys, counts=level.counts[stays], seen=level.seen[stays], totals=totals))
            moved = np.cumsum(stays) - 1
        return NgramModel(self.vocabulary, levels)

    def probabilities(self, blocks: Ints) -> tuple[Floats, Ints]:
        """For blocks [n, L]: probability of each token but the first, and how long a context of it was known, both [n, L-1].

        The first position is not predicted; history begins with the block.
        """
        count, length = blocks.shape
        flat, column = blocks.reshape(-1), np.tile(np.arange(length), count)
        probability = np.full(blocks.size, 1.0 / self.vocabulary)
        matched = np.zeros(blocks.size, dtype=np.int64)
        for depth in range(len(self.levels)):
            context = self._contexts(flat, column, depth)
            probability, known = self._refine(depth, context, flat, probability)
            matched[known] = depth
        shape = (count, length)
        return probability.reshape(shape)[:, 1:], matched.reshape(shape)[:, 1:]

    def distribution(self, history: Ints) -> Floats:
        """Probability of every token behind `history` [h]; [vocabulary], sum 1."""
        tokens = np.arange(self.vocabulary)
        probability = np.full(self.vocabulary, 1.0 / self.vocabulary)
        for depth in range(min(len(self.levels), len(history) + 1)):
            start = len(history) - depth
            line = np.concatenate((history[start:], [0])).astype(np.int64)
            context = self._contexts(line, np.arange(len(line)), depth)[-1]
            probability, _ = self._refine(depth, np.full(self.vocabulary, context), tokens, probability)
        return probability

    def _contexts(self, flat: Ints, column: Ints, depth: int) -> Ints:
        """Index, in level depth-1, of the `depth` tokens before each position; -1 where unknown or before the block."""
        context = np.where(column >= depth, 0, -1)
        for step in range(depth):
            behind = depth - step
            token = np.concatenate((np.zeros(behind, dtype=np.int64), flat[:-behind]))
            wanted = context * self.vocabulary + token if step else token
            found = _find(self.levels[step].keys, wanted)
            context = np.where(context >= 0, found, -1)
        return context

    def _refine(self, depth: int, context: Ints, token: Ints, lower: Floats) -> tuple[Floats, NDArray[np.bool_]]:
        """`lower` interpolated with one order; and where that order knows the context."""
        level, (share, rest) = self.levels[depth], self._shares[depth]
        known = context >= 0
        known &= np.where(known, level.totals[np.maximum(context, 0)] > 0, False)
        place = np.where(known, _find(level.keys, context * self.vocabulary + token if depth else token), -1)
        own = np.where(place >= 0, share[np.maximum(place, 0)], 0.0)
        return np.where(known, own + rest[np.maximum(context, 0)] * lower, lower), known

    def _worth(self, depth: int) -> Floats:
        """How much log-likelihood of the counted text each entry of an order carries beyond the order below."""
        level, (share, rest) = self.levels[depth], self._shares[depth]
        prefix = level.keys // self.vocabulary
        fallback = np.maximum(rest[prefix], np.finfo(np.float64).tiny) * self._lower(depth)
        return np.asarray(level.seen * np.log1p(share / fallback))

    def _lower(self, depth: int) -> Floats:
        """Probability of the last token of each entry by the orders below, that is without its first token."""
        prefix, token = np.divmod(self.levels[depth].keys, self.vocabulary)
        tokens = [token]
        for step in range(depth - 1, 0, -1):
            prefix, token = np.divmod(self.levels[step].keys[prefix], self.vocabulary)
            tokens.insert(0, token)
        line = np.stack(tokens, axis=1)  # [n, depth]: what follows the first token
        lower = NgramModel(self.vocabulary, self.levels[:depth])
        flat, column = line.reshape(-1), np.tile(np.arange(depth), len(line))
        probability = np.full(line.size, 1.0 / self.vocabulary)
        for below in range(depth):
            probability, _ = lower._refine(below, lower._contexts(flat, column, below), flat, probability)
        return probability.reshape(line.shape)[:, -1]


def _trie(blocks: Ints, vocabulary: int, order: int) -> tuple[list[Ints], list[Ints]]:
    """Sorted keys of each order, and for each order the index of the n-gram that ends at each position ([n, L], -1: none)."""
    keys: list[Ints] = []
    places: list[Ints] = []
    for depth in range(order):
        line = blocks[:, depth:]
        if depth:
            line = places[-1][:, depth - 1 : -1] * vocabulary + line
        unique, inverse = np.unique(line.reshape(-1), return_inverse=True)
        place = np.full(blocks.shape, -1, dtype=np.int64)
        place[:, depth:] = inverse.reshape(line.shape)
        keys.append(unique)
        places.append(place)
    return keys, places


def _file_bytes(kept: list[Kept]) -> int:
    entries = sum(int(stays.sum()) * ENTRY_BYTES + int(children.sum()) * CONTEXT_BYTES for stays, children in kept)
    return entries + int(kept[0][0].sum()) * FIRST_BYTES


def _occurrences(places: Ints, size: int) -> Ints:
    return np.bincount(places[places >= 0], minlength=size)


def _left_contexts(places: Ints, longer: Ints, size: int, longer_size: int) -> Ints:
    """How many different tokens stand before each n-gram; at a block's start stands one that is no token."""
    there = longer >= 0
    suffix = np.zeros(longer_size, dtype=np.int64)
    suffix[longer[there]] = places[there]
    counts = np.bincount(suffix, minlength=size)
    at_start = places[(places >= 0) & ~there]
    counts[np.unique(at_start)] += 1
    return counts


def _discounts(counts: Ints) -> tuple[float, float, float]:
    """Chen and Goodman's three, from how many n-grams have the counts 1 to 4."""
    one, two, three, four = (int((counts == number).sum()) for number in (1, 2, 3, 4))
    if min(one, two, three, four) == 0:
        return DISCOUNT_DEFAULT
    base = one / (one + 2 * two)
    found = (1 - 2 * base * two / one, 2 - 3 * base * three / two, 3 - 4 * base * four / three)
    usable = all(0 < value < number for number, value in enumerate(found, 1))
    return found if usable else DISCOUNT_DEFAULT


def _shares(level: Level, vocabulary: int) -> tuple[Floats, Floats]:
    """For each entry its discounted share of its context; for each context what is left for the order below. 0: one context."""
    prefixes = level.keys // vocabulary if vocabulary else np.zeros_like(level.keys)
    share = level.kept() / np.maximum(level.totals[prefixes], 1)
    return share, np.asarray(1.0 - np.bincount(prefixes, weights=share, minlength=len(level.totals)), dtype=np.float64)


def _find(keys: Ints, wanted: Ints) -> Ints:
    """Index of each wanted key, -1 where it is not there."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, place, -1)

"""A layer's tensors as a dictionary's file has them: entries in the order of their lists, rows at rest, what calibration found.

Owns the order of entries and the making of tensors; the shapes are treadle.contract.dictionary's. Does not cluster (`codebooks`) or
write the folder (`build`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asm_store.building.codebooks import LayerSamples, add_up, cosines, filled, fit
from asm_store.building.entries import Aggregated
from asm_store.building.matching import MATCH_TOKENS, match_keys
from asm_store.building.rows import Stored, stored
from treadle.contract.dictionary import QUANTILES, DictionarySettings, RowDtype
from treadle.kernels import as_numbers, entry_lists
from treadle.nn.matched_keys import MatchedKeys

LIST_ITERATIONS = 8
FIT_TOKENS_MAX = 2048  # whose cosines the quantiles are of: more than the traces that are held out mostly have
HELD_OUT_TOKENS_MIN = 200  # with fewer held out, the quantiles are those of the calibration itself

Parts = dict[str, Stored]


@dataclass(frozen=True, slots=True)
class Share:
    """Tokens of the spill: the first `learnt` are learnt from, `held_out` follow."""

    learnt: int
    held_out: int

    @property
    def fit(self) -> tuple[int, int]:
        """First and last token of those that the fit is measured on."""
        if self.held_out >= HELD_OUT_TOKENS_MIN:
            return self.learnt, self.learnt + min(self.held_out, FIT_TOKENS_MAX)
        return 0, min(self.learnt, FIT_TOKENS_MAX)


def make_layer(samples: LayerSamples, share: Share, prefix_keys: Tensor) -> Parts:
    """Tensors of one layer by part. Raises InvalidArgument where samples are too few for the entries.

    prefix_keys: the prefix's own in this layer, rotated, [tokens, KV, head_dim]; read for matched keys alone
    """
    settings = samples.settings
    matched: Parts = {}
    if settings.matched_keys:
        matched = _matched(samples, share, prefix_keys)
        samples = replace(samples, matched=MatchedKeys.at_rest(*(array for _, array in matched.values())))
    whitening = samples.whitening(share.learnt)
    centroids = fit(samples, share.learnt, whitening)
    sums = add_up(samples, centroids, 0, share.learnt, whitening)
    books, lists = [], list[tuple[NDArray[np.float32], NDArray[np.int32]]]()
    for entries, fitted in zip(sums, centroids, strict=True):
        found = entries.aggregated()
        keys = torch.where((found.counts > 0).unsqueeze(1), found.keys, fitted)  # without samples there is no mean of theirs
        book = filled(found, keys)
        if settings.lists:
            order, list_keys, list_starts = entry_lists(book.keys.numpy(), settings.lists, settings.seed, LIST_ITERATIONS)
            book = book.taken(torch.from_numpy(order.astype(np.int64)))
            lists.append((list_keys, list_starts))
        books.append(book)
    parts = _rows("keys", "key_scales", torch.stack([book.keys for book in books]), settings)
    if lists:
        parts["list_keys"] = "F32", np.stack([keys for keys, _ in lists])
        parts["list_starts"] = "I32", np.stack([starts for _, starts in lists])
    if whitening is not None:
        parts["whitening"] = "F32", whitening.numpy()
    return parts | matched | _states(books, settings) | _fit(samples, parts, share, whitening)


def extend_layer(samples: LayerSamples, share: Share, kept: Parts) -> Parts:
    """Tensors of one layer of a further chunk's dictionary: the states of its samples at the keys of a base.

    kept: what is taken over of the base (`Base.kept`)
    """
    whitening = torch.from_numpy(np.array(kept["whitening"][1])) if "whitening" in kept else None
    keys = _keys_at_rest(kept)
    sums = add_up(samples, keys, 0, share.learnt, whitening)
    books = [filled(entries.aggregated(), keys[book]) for book, entries in enumerate(sums)]
    return kept | _states(books, samples.settings) | _fit(samples, kept, share, whitening)


def _matched(samples: LayerSamples, share: Share, prefix_keys: Tensor) -> Parts:
    settings = samples.settings
    found = match_keys(*samples.references(share.learnt, MATCH_TOKENS), prefix_keys, settings.matched_keys)
    # Entries hold what these lack as they lie at rest, rounding included; int8 would cost the keys more than it saves.
    dtype = RowDtype.F32 if settings.dtype is RowDtype.F32 else RowDtype.BF16
    keys, values = (stored(rows.numpy(), dtype)[0] for rows in (found.keys, found.values))
    return {"matched_keys": keys, "matched_values": values, "matched_biases": ("F32", found.biases.numpy())}


def _rows(name: str, scales_name: str, rows: Tensor, settings: DictionarySettings) -> Parts:
    numbers, scales = stored(rows.numpy(), settings.dtype)
    return {name: numbers} | ({} if scales is None else {scales_name: scales})


def _states(books: list[Aggregated], settings: DictionarySettings) -> Parts:
    parts = _rows("states", "state_scales", torch.stack([book.a for book in books]), settings)
    parts["log_z"] = "F32", torch.stack([book.log_z for book in books]).numpy()
    parts["counts"] = "I32", torch.stack([book.counts for book in books]).numpy().astype(np.int32)
    return parts


def _fit(samples: LayerSamples, parts: Parts, share: Share, whitening: Tensor | None) -> Parts:
    found = cosines(samples, _keys_at_rest(parts), *share.fit, whitening)
    at = np.linspace(0.0, 1.0, QUANTILES)
    # A key rounded to int8 is a little longer or shorter than 1, and so is its product with a query that lies on it.
    quantiles = np.quantile(found, at, axis=1).T.clip(-1.0, 1.0)
    return {"cosine_quantiles": ("F32", quantiles.astype(np.float32))}


def _keys_at_rest(parts: Parts) -> Tensor:
    """fp32 [B, K, D], as lookups see them."""
    scales = parts.get("key_scales")
    return torch.from_numpy(as_numbers(parts["keys"][1], None if scales is None else scales[1]))

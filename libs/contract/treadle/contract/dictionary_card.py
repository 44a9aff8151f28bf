"""The card of a dictionary: what whoever made it says of it, one JSON object beside the manifest. No part of its version.

Owns the name of its form, and the figures of fit that every card has. Who reads one knows nothing but that it is an object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from treadle.contract.dictionary import Dictionary, tensor_name

CARD_SCHEMA = "treadle.dictionary-card/1"
MEDIAN, PERCENT1 = 50, 1  # places in cosine_quantiles


def fit_of(dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]]) -> dict[str, dict[str, float]]:
    """Layer -> cosines of calibration to the entries found, median and 1st percentile, of the worst codebook of the layer.

    tensors: by name, of which cosine_quantiles [B, 101] are read
    """
    quantiles = {layer: tensors[tensor_name(layer, "cosine_quantiles")] for layer in dictionary.layers}
    return {
        str(layer): {"median": round(float(of[:, MEDIAN].min()), 4), "percent1": round(float(of[:, PERCENT1].min()), 4)}
        for layer, of in quantiles.items()
    }

"""What a method keeps and reads of a prefix, both in per cent of the prefix's whole KV, numbers against numbers.

Storage: numbers kept. Traffic: numbers read for one token of one request. The paper's "same footprint" is equal traffic; an entry that
joins c heads is c of a key and c of a state against the one key and one value of a KV token, so both axes stand in every table.
"""

from __future__ import annotations

import math

from treadle.contract.dictionary import Dictionary, DictionaryModel, DictionarySettings, Grouping, RowDtype
from treadle.nn.config import ModelConfig
from treadle.nn.matched_keys import MATCHED_PARTS

Cost = tuple[float, float, int]  # storage and traffic in %, bytes at rest
KV_BYTES = 4  # of a number of KV, as this bench keeps it
_COUNTED = (
    "keys",
    "states",
    "log_z",
    "key_scales",
    "state_scales",
    "list_keys",
    "list_starts",
    "whitening",
    *MATCHED_PARTS,
)  # what a lookup needs


def entry_tokens(config: ModelConfig | DictionaryModel, settings: DictionarySettings) -> tuple[float, float]:
    """(storage, traffic) of one entry in KV tokens: its key, states and log Z; its key alone. Scales of int8 rows are numbers too."""
    joined = settings.heads_joined
    books = config.kv_heads if settings.grouping is Grouping.INDIVIDUAL else 1
    heads = joined * (1 if settings.grouping is Grouping.INDIVIDUAL else config.kv_heads)
    token, scales = 2 * config.kv_heads * config.head_dim, 1 if settings.dtype is RowDtype.I8 else 0
    key, state = heads * config.head_dim + scales, heads * (config.head_dim + 1 + scales)
    return books * (key + state) / token, books * key / token


def matched_tokens(matched_keys: int, config: ModelConfig | DictionaryModel) -> float:
    """KV tokens that matched keys are worth, in storage and in traffic: a key, a value and a bias for each head."""
    return matched_keys * (2 * config.head_dim + 1) / (2 * config.head_dim)


def of_kept(tokens: float, prefix_tokens: int, config: ModelConfig, *, biases: bool = False) -> Cost:
    """Of `tokens` keys and values in each head; biases: one more number for each key."""
    factor = (2 * config.head_dim + 1) / (2 * config.head_dim) if biases else 1.0
    share = 100 * tokens * factor / prefix_tokens
    return share, share, round(tokens * factor * config.kv_values_per_token * KV_BYTES)


def of_dictionary(dictionary: Dictionary, *, lists_probed: int | None = None) -> Cost:
    """Of a dictionary as it is. lists_probed: of its two-level lookup (lists are taken to be of equal length); None: all keys are read."""
    model, settings = dictionary.model, dictionary.settings
    whole = dictionary.prefix.tokens * 2 * model.kv_heads * model.head_dim * model.layers
    numbers = {name.rsplit(".", 1)[1]: 0 for name, _ in dictionary.tensor_shapes()}
    for name, (_, shape) in dictionary.tensor_shapes():
        numbers[name.rsplit(".", 1)[1]] += math.prod(shape)
    kept = sum(count for part, count in numbers.items() if part in _COUNTED)
    share = 1.0 if lists_probed is None or not settings.lists else min(1.0, lists_probed / settings.lists)
    found = dictionary.lookups / settings.entries  # of each codebook's states, read once they are found
    read = share * (numbers["keys"] + numbers.get("key_scales", 0)) + numbers.get("list_keys", 0) + numbers.get("whitening", 0)
    read += sum(numbers.get(part, 0) for part in MATCHED_PARTS)
    read += found * (numbers["states"] + numbers["log_z"] + numbers.get("state_scales", 0))
    return 100 * kept / whole, 100 * read / whole, dictionary.nbytes

"""The EngramModel of a Qwen PLE checkpoint (`qwen4_exp`), from its config.json.

Keys, defaults and the way from them to primes and multipliers as in Hugging Face's and vLLM's Qwen4-Exp code. Layers are counted
from 1 there and from 0 here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engram_pool.domain.config_keys import whole, wholes
from treadle.contract import EngramModel, InvalidArgument, RowLayout
from treadle.contract.engram_model import COLUMNS_MAX, LAYERS_MAX, ORDER_MAX, ROWS_MAX
from treadle.contract.families import PLE_SEED, qwen_ple_model

LAYERS_KEY = "ple_layer_ids"


def ple_keys(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of a config.json that describes a PLE, or None if it has none."""
    text = config.get("text_config")
    keys = text if isinstance(text, Mapping) and text.get(LAYERS_KEY) else config
    return keys if keys.get(LAYERS_KEY) else None


def ple_layers(keys: Mapping[str, Any]) -> tuple[int, ...]:
    """Decoder layers with a PLE, from 0. Raises InvalidArgument."""
    layers = sorted(set(wholes(keys, LAYERS_KEY)))
    if layers[0] < 1 or len(layers) > LAYERS_MAX:
        raise InvalidArgument(f"config.json: {LAYERS_KEY}: at most {LAYERS_MAX} layers counted from 1 expected, got {layers[:8]}")
    return tuple(layer - 1 for layer in layers)


def ple_dim(keys: Mapping[str, Any]) -> int:
    """Values of a row. Raises InvalidArgument."""
    width = whole(keys, "ple_embed_dim", default=None if keys.get("hidden_size") is None else whole(keys, "hidden_size"))
    columns = _columns(keys)
    if not width or width % columns:
        raise InvalidArgument(f"config.json: ple_embed_dim: {width} does not divide by {columns}, the rows of a token")
    return width // columns


def ple_template(keys: Mapping[str, Any], name: str, row: RowLayout) -> EngramModel:
    """A template for rows of `row`. Raises InvalidArgument naming the key that is missing or wrong."""
    layers, base = ple_layers(keys), whole(keys, "ngram_vocab_size_base", 20_000_000)
    _columns(keys)
    if not 2 <= base <= ROWS_MAX:
        raise InvalidArgument(f"config.json: ngram_vocab_size_base: 2 to {ROWS_MAX}, got {base}")
    vocabulary = whole(keys, "vocab_size", 248_320)
    if not vocabulary:
        raise InvalidArgument("config.json: vocab_size: the ids of the tokenizer, above 0")
    if keys.get("eos_token_id") is None:
        raise InvalidArgument("config.json: eos_token_id is missing: it ends the segments that are hashed; give a manifest instead")
    return qwen_ple_model(
        name, layers=layers, eos_id=wholes(keys, "eos_token_id")[0], vocabulary=vocabulary, prime_base=base,
        order_max=whole(keys, "ngram_size", 3), heads=whole(keys, "heads_per_ngram", 8), row=row, seed=whole(keys, "seed", PLE_SEED),
    )  # fmt: skip


def padded_rows(keys: Mapping[str, Any], model: EngramModel, layer: int) -> int:
    """Rows that the table of `layer` is stored with: those that the hash reaches, rounded up."""
    divisor = max(1, whole(keys, "make_ngram_vocab_size_divisible_by", 128))
    return -(-model.rows_hashed(layer) // divisor) * divisor


def _columns(keys: Mapping[str, Any]) -> int:
    """Rows of a token. Raises InvalidArgument for sizes that nobody has, before primes are sought for them."""
    order_max, heads = whole(keys, "ngram_size", 3), whole(keys, "heads_per_ngram", 8)
    if not (2 <= order_max <= ORDER_MAX and 1 <= heads * (order_max - 1) <= COLUMNS_MAX):
        raise InvalidArgument(
            f"config.json: ngram_size {order_max} with heads_per_ngram {heads}; orders are 2 to {ORDER_MAX}, "
            f"orders x heads at most {COLUMNS_MAX}"
        )
    return heads * (order_max - 1)

"""The EngramModel of a DeepSeek-V4.1 checkpoint, from its config.json (keys as vLLM's DeepSeek-V4.1 code reads them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engram_pool.domain.config_keys import model_name, whole, wholes
from engram_pool.domain.storing import TokenMap
from engram_pool.domain.token_maps import compressed_size, token_map_digest
from treadle.contract import EngramModel, FingerprintMismatch, Fusion, InvalidArgument
from treadle.contract.engram_model import COLUMNS_MAX, LAYERS_MAX, ORDER_MAX, ROWS_MAX
from treadle.contract.families import deepseek_v41_model, head_primes

V41_LAYERS_KEY = "engram_layer_ids"


def v41_template(config: Mapping[str, Any], name: str, token_map: TokenMap | None) -> EngramModel:
    """A template for the checkpoint folder `name`.

    Raises InvalidArgument naming the key that is missing or wrong, FingerprintMismatch if the token map has another size than
    `engram_compressed_vocab_size`: its multipliers would hash everything differently.
    """
    if token_map is None:
        raise InvalidArgument("token_map: missing; a DeepSeek-V4.1 checkpoint needs the map of its tokenizer")
    text = config.get("text_config")
    keys = text if isinstance(text, Mapping) and V41_LAYERS_KEY in text else config
    vocabulary = whole(keys, "engram_compressed_vocab_size")
    if compressed_size(token_map) != vocabulary:
        raise FingerprintMismatch("compressed_vocab_size", vocabulary, compressed_size(token_map))
    order_max, heads, layers = (
        whole(keys, "engram_max_ngram_size"),
        whole(keys, "engram_n_heads"),
        wholes(keys, V41_LAYERS_KEY),
    )
    _check_size(order_max, heads, layers)
    base = wholes(keys, "engram_vocab_size")
    base = base * (order_max - 1) if len(base) == 1 else base
    if len(base) != order_max - 1 or max(base) > ROWS_MAX:
        raise InvalidArgument(f"config.json: engram_vocab_size: one number, or one for each order 2 to {order_max}, got {base}")
    model = deepseek_v41_model(
        model_name(name), token_map=token_map_digest(token_map), pad_id=whole(keys, "engram_pad_token_id"),
        compressed_vocab_size=vocabulary, layers=layers, prime_base=base[0], order_max=order_max, heads=heads,
        head_dim=whole(keys, "engram_head_dim"), fusion=Fusion("v4.1"),
    )  # fmt: skip
    model = replace(model, primes=head_primes(base, len(layers), heads)) if len(set(base)) > 1 else model
    _check_rows(keys, model)
    return model


def _check_size(order_max: int, heads: int, layers: list[int]) -> None:
    """Before primes are sought for them."""
    if not (2 <= order_max <= ORDER_MAX and 1 <= heads * (order_max - 1) <= COLUMNS_MAX and len(layers) <= LAYERS_MAX):
        raise InvalidArgument(
            f"config.json: {order_max=} {heads=} with {len(layers)} layers; at most {ORDER_MAX}, {COLUMNS_MAX} columns, {LAYERS_MAX}"
        )


def _check_rows(keys: Mapping[str, Any], model: EngramModel) -> None:
    """The checkpoint says how many rows a layer has: the primes that we derive must give the same."""
    stated = wholes(keys, "engram_num_embeddings")
    stated = stated * len(model.layers) if len(stated) == 1 and len(model.layers) > 1 else stated
    for layer, rows in zip(model.layers, stated, strict=False):
        if rows < model.rows_hashed(layer):
            raise InvalidArgument(
                f"config.json: engram_num_embeddings: {rows} rows in layer {layer}, but its primes from engram_vocab_size on "
                f"add up to {model.rows_hashed(layer)}"
            )

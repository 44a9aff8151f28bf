"""What presses of kvpress keep of a prefix; runs in an environment that has kvpress, and imports nothing of treadle.

Reads {"model", "prefix", "presses": [[name, tokens], …], "out"} from standard input. Writes to `out` a numpy file of bool
[presses, layers, kv_heads, tokens], True where a key is kept, and prints {"versions", "seconds": […]}.
The model folder must have no chat template: kvpress would take the first tokens of a plain prefix for that of a chat, and drop them.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any
from unittest.mock import MagicMock


def main() -> None:
    """Press once for each entry."""
    # Presses that are not run here import these at once, for their own statistics; both would bring dozens of packages.
    sys.modules |= {name: MagicMock(name=name) for name in ("datasets", "fire")}
    import kvpress  # type: ignore[import-not-found]  # of the environment that runs this
    import numpy as np
    import torch
    import transformers

    asked = json.load(sys.stdin)
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32, attn_implementation="sdpa")
    tokens = torch.tensor([asked["prefix"]])
    whole, _ = pressed(model, tokens, None)
    kept, seconds = [], []
    for name, count in asked["presses"]:
        ratio = 1.0 - count / len(asked["prefix"])
        press = kvpress.KVzipPress(ratio, layerwise=True) if name == "kvzip" else kvpress.SnapKVPress(ratio)
        begun = time.process_time()
        layers, masked = pressed(model, tokens, press)
        seconds.append(time.process_time() - begun)
        kept.append([kept_keys(layers[index], whole[index], masked[index]) for index in range(len(whole))])
    np.save(asked["out"], np.array(kept, dtype=bool))
    names = {each.__name__: getattr(each, "__version__", "") for each in (transformers, torch)}
    print(json.dumps({"versions": names, "seconds": seconds}))


def pressed(model: Any, tokens: Any, press: Any) -> tuple[list[Any], list[Any]]:
    """(keys [KV, n, D] of each layer, and which of them a press marked as dropped: indices (head, place), or None)."""
    import contextlib

    import torch
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    with torch.no_grad(), press(model) if press is not None else contextlib.nullcontext():
        model.model(input_ids=tokens, past_key_values=cache)
    masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return [layer.keys[0] for layer in cache.layers], masked


def kept_keys(keys: Any, whole: Any, masked: Any) -> Any:
    """bool [KV, tokens]: by the marks where a press only marks, else by finding each key among all keys of its head."""
    import numpy as np

    heads, count = whole.shape[:2]
    if masked is not None:
        unmarked = np.ones((heads, count), dtype=bool)
        _, marked_heads, places = (np.asarray(each) for each in masked)
        unmarked[marked_heads, places] = False
        return unmarked
    kept = np.zeros((heads, count), dtype=bool)
    for head in range(heads):
        by_key = {row.tobytes(): place for place, row in enumerate(whole[head].numpy())}
        found = [by_key[row.tobytes()] for row in keys[head].contiguous().numpy()]
        kept[head, found] = True
    return kept


if __name__ == "__main__":
    main()

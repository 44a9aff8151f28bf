"""A half-grown memory on disk: tensors in safetensors, with the recipe and the corpus that they belong to.

Owns the file and its refusal for another run. Does not decide when to save. Written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engram_pool.growing.memory import Layer
from treadle.contract.errors import DataLoss, FingerprintMismatch, NotFound

SCHEMA = "treadle.engram-checkpoint/1"


def save(path: Path, state: Mapping[str, Tensor], identity: Mapping[str, str]) -> None:
    """Write `state` (Grower.state); identity: what must be the same for a run that goes on from it."""
    partial = path.with_name(path.name + ".partial")
    metadata = {"treadle": json.dumps({"schema": SCHEMA, "identity": dict(identity)}, sort_keys=True)}
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, partial, metadata)
    partial.rename(path)


def load(path: Path, identity: Mapping[str, str] | None = None) -> dict[str, Tensor]:
    """Read a state. identity None: whatever it is of.

    Raises NotFound, DataLoss (torn), FingerprintMismatch naming the first field that differs from `identity`.
    """
    if not path.is_file():
        raise NotFound(f"{path}: no such checkpoint")
    try:
        with safe_open(path, framework="pt") as file:
            found = json.loads(file.metadata()["treadle"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise DataLoss(f"{path}: not a whole checkpoint: {error}; delete it to begin again") from error
    if found.get("schema") != SCHEMA:
        raise DataLoss(f"{path}: schema {found.get('schema')!r}, {SCHEMA} expected")
    for name, wanted in (identity or {}).items():
        if found["identity"].get(name) != wanted:
            raise FingerprintMismatch(
                f"checkpoint {path}, which --restart forgets: {name}", wanted, str(found["identity"].get(name))
            )
    return state


def layers_of(state: Mapping[str, Tensor]) -> dict[int, Layer]:
    """The memory's tensors in a state, by layer; they stay the state's."""
    numbers = sorted({int(name.split(".")[0]) for name in state if name.endswith(".wkv")})
    return {
        layer: Layer(*(state[f"{layer}.{name}"] for name in ("rows", "wkv", "query_weight", "key_weight"))) for layer in numbers
    }

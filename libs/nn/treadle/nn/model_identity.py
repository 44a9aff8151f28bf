"""Which language model a folder holds, as a dictionary's manifest names it: digests of weights, of what is computed, of the tokenizer.

Owns what counts as the same model, and a record beside the weights that spares reading them again. Does not compare
(`Fingerprint.require`) or load models (`model`).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

from treadle.contract.dictionary import DictionaryModel
from treadle.contract.errors import NotFound
from treadle.contract.version import version_of
from treadle.nn.config import ModelConfig
from treadle.nn.weights import weight_files, weights_digest

RECORD = "weights.treadle.json"  # beside the weights; worth nothing elsewhere, harmless to delete
RECORD_BYTES_MAX = 1 << 20
SETTLED_NS = 2 * 10**9  # a file younger than this may be written again within the same tick of its file system's clock
_NOT_COMPUTED = ("positions_max", "eos_token_ids")  # limits and habits: attention states do not depend on them
_ROPE = ("head_dim", "rope_theta", "rope_scaling")


def dictionary_model(folder: Path, config: ModelConfig) -> DictionaryModel:
    """What a dictionary made with the model in `folder` says of it, and an engine with that model expects.

    config: as `ModelConfig.from_folder(folder)` reads it
    Reads the weights once (1 to 2 GB a second), and writes RECORD beside them where the folder can be written.
    Raises NotFound (no weights, no tokenizer.json), DataLoss (a torn index).
    """
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise NotFound(f"{tokenizer}: no such file; a dictionary names the tokenizer that cut its prefix")
    computed = {field.name: repr(getattr(config, field.name)) for field in fields(config) if field.name not in _NOT_COMPUTED}
    return DictionaryModel(
        digest=version_of({"config": computed, "weights": _weights_digest(folder)}),
        tokenizer=hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        rope=version_of({name: computed[name] for name in _ROPE}),
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
    )


def _weights_digest(folder: Path) -> str:
    """`weights_digest`, from the record where every file is still the one that was read then."""
    before = _stamps(folder)
    known = _recorded(folder / RECORD)
    if known is not None and known["files"] == before:
        return str(known["digest"])
    digest = weights_digest(folder)
    if _stamps(folder) == before and all(time.time_ns() - stamp["changed_ns"] > SETTLED_NS for stamp in before.values()):
        _record(folder / RECORD, {"files": before, "digest": digest})
    return digest


def _stamps(folder: Path) -> dict[str, dict[str, int]]:
    """What the file system says of each weight file. `changed_ns` moves with every write and rename, and no program can set it."""
    stamps = {}
    for path in weight_files(folder):
        stat = path.stat()
        stamps[path.name] = {
            "bytes": stat.st_size, "written_ns": stat.st_mtime_ns, "changed_ns": stat.st_ctime_ns, "inode": stat.st_ino,
            "device": stat.st_dev,
        }  # fmt: skip
    return stamps


def _recorded(path: Path) -> dict[str, Any] | None:
    try:
        if path.stat().st_size > RECORD_BYTES_MAX:
            return None
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None  # none, or a damaged one: the weights are read
    whole = isinstance(record, dict) and isinstance(record.get("files"), dict) and isinstance(record.get("digest"), str)
    return record if whole and len(record["digest"]) == 64 else None


def _record(path: Path, record: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(record), encoding="utf-8")
        beside.replace(path)
    except OSError:  # a folder that cannot be written: the weights are read each time
        with suppress(OSError):
            beside.unlink()

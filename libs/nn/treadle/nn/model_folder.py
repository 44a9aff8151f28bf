"""Finds a model folder: by path, or by a name that `model_fetch` knows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from treadle.contract.errors import DataLoss, NotFound
from treadle.nn import model_fetch


def find_model_folder(model: str, progress: Callable[[str, float], None] | None = None) -> tuple[Path, str]:
    """The folder and the name under which it is served unless told otherwise.

    A known name is fetched first if it is not in the cache. Raises NotFound for anything that is neither.
    """
    if model in model_fetch.MODELS:
        return model_fetch.fetch(model, progress=progress), model
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise NotFound(f"model {model!r}: neither one of {sorted(model_fetch.MODELS)} nor a folder with a config.json")
    return folder.resolve(), _recorded_name(folder) or folder.resolve().name


def _recorded_name(folder: Path) -> str:
    """The name under which `treadle model fetch` made this folder; empty for folders of other origin."""
    record = folder / model_fetch.RECORD
    try:
        return str(json.loads(record.read_text(encoding="utf-8")).get("name", "")) if record.is_file() else ""
    except (OSError, ValueError, AttributeError) as error:
        raise DataLoss(f"{record}: not the record of a fetched model: {error}") from error

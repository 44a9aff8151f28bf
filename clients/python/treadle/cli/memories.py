"""Grown memories on disk: the one that comes with the package, the text it is measured on, and what a folder was made for.

Owns finding and naming them. Reads manifests and cards, never rows; does not load anything (jobs).
"""

from __future__ import annotations

import importlib.util
import json
import lzma
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treadle.contract import EngramModel
from treadle.contract.engram_model import CARD_BYTES_MAX, MANIFEST_BYTES_MAX
from treadle.contract.errors import InvalidArgument, NotFound

SHIPPED = "kjv"
MANIFEST, CARD = "manifest.json", "card.json"
HELD_OUT = f"{SHIPPED}-held-out.txt.xz"
HELD_OUT_BYTES_MAX = 16 << 20
CONFIG_BYTES_MAX = 4 << 20


@dataclass(frozen=True, slots=True)
class GrownMemory:
    """A grown folder by its manifest and card."""

    folder: Path
    model: EngramModel
    card: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> GrownMemory:
        """Raises NotFound or InvalidArgument, naming the file."""
        model = EngramModel.from_json(
            _read(folder / MANIFEST, MANIFEST_BYTES_MAX, "is it a folder that `treadle engram grow` wrote?")
        )
        return cls(folder, model, _document(folder / CARD, CARD_BYTES_MAX))

    @property
    def name(self) -> str:
        """Under which requests choose it."""
        return self.model.name

    @property
    def made_for(self) -> str:
        """The language model that it was grown for, as its card says."""
        return str(_of(self.card, "model").get("name") or "another model")

    def misfit(self, model_dir: Path) -> str:
        """Why it cannot serve the model in this folder, as far as sizes tell; "": they fit. The worker compares the rest."""
        config, wanted = _document(model_dir / "config.json", CONFIG_BYTES_MAX), _of(self.card, "model")
        layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
        if (wanted.get("layers", layers), wanted.get("hidden", hidden)) == (layers, hidden):
            return ""
        return (
            f"{self.name} was made for {self.made_for} ({wanted.get('layers')} layers of {wanted.get('hidden')}), "
            f"{model_dir.name} has {layers} of {hidden}"
        )


def shipped_memory() -> GrownMemory | None:
    """The memory that comes with engram-pool; None where that is installed without it. Its package is not imported."""
    folder = _shipped_dir()
    return GrownMemory.read(folder / SHIPPED) if folder is not None and (folder / SHIPPED / MANIFEST).is_file() else None


def held_out_text() -> str:
    """Text of the same kind as the shipped memory's that it has not learnt. Raises NotFound."""
    folder = _shipped_dir()
    if folder is None or not (folder / HELD_OUT).is_file():
        raise NotFound(f"the installed engram-pool has no {HELD_OUT}; pip install --force-reinstall treadle-engram-pool")
    with lzma.open(folder / HELD_OUT) as file:
        data = file.read(HELD_OUT_BYTES_MAX)
    return data.decode()


def _shipped_dir() -> Path | None:
    found = importlib.util.find_spec("engram_pool")  # a top-level name: found, not imported
    places = found.submodule_search_locations if found is not None else None
    return Path(next(iter(places))) / "shipped" if places else None


def _document(path: Path, bytes_max: int) -> dict[str, Any]:
    try:
        document = json.loads(_read(path, bytes_max))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidArgument(f"{path}: an object expected, got {type(document).__name__}")
    return document


def _of(document: dict[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}


def _read(path: Path, bytes_max: int, advice: str = "") -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}" + (f"; {advice}" if advice else "")) from error
    if len(data) > bytes_max:
        raise InvalidArgument(f"{path} is larger than {bytes_max} bytes")
    return data

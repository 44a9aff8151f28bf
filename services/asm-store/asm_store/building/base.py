"""The dictionary that a further chunk of its prefix is built for: its keys are taken over as they are, so that entries fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from asm_store.building.recipe import Recipe
from asm_store.building.rows import Stored
from treadle.contract.checks import expect
from treadle.contract.dictionary import Dictionary, DictionaryModel, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, check_digests, map_tensors, read_manifest
from treadle.contract.errors import FingerprintMismatch
from treadle.nn.prefix_memory import PrefixMemory

KEPT = ("keys", "key_scales", "list_keys", "list_starts", "whitening")  # parts that both dictionaries have, byte for byte


@dataclass(frozen=True, slots=True, eq=False)
class Base:
    """A finished dictionary, mapped. memory: as requests look it up, for the traces of the further chunk to see it."""

    dictionary: Dictionary
    tensors: Mapping[str, NDArray[Any]]
    memory: PrefixMemory

    @classmethod
    def open(cls, folder: Path) -> Base:
        """Read a folder. Raises NotFound, InvalidArgument, DataLoss naming a tensor that is not the manifest's."""
        dictionary = read_manifest(folder)
        tensors = map_tensors(folder / TENSORS_FILE, dictionary)
        check_digests(tensors, dictionary)
        return cls(dictionary, tensors, PrefixMemory(dictionary, tensors))

    def require(self, recipe: Recipe, model: DictionaryModel) -> None:
        """Raise FingerprintMismatch, naming the field, unless a further chunk can be built by `recipe` with `model`.

        InvalidArgument for a base with matched keys: its entries are of one prefix, and do not add up with those of another chunk;
        and for one that is a further chunk itself.
        """
        self.dictionary.require_whole()
        expect(
            not self.dictionary.settings.matched_keys,
            f"{self.dictionary.name}: made with matched keys, which no further chunk can be added to; build it anew with --matched-keys 0",
        )
        self.dictionary.model.fingerprint.require(model.fingerprint.as_dict())
        if recipe.settings != self.dictionary.settings:
            raise FingerprintMismatch("settings", self.dictionary.settings, recipe.settings)
        if recipe.layers not in ((), self.dictionary.layers):
            raise FingerprintMismatch("layers", self.dictionary.layers, recipe.layers)

    def kept(self, layer: int) -> dict[str, Stored]:
        """What is taken over of one layer: (dtype, array) by part."""
        infos = dict(self.dictionary.tensors)
        names = {part: tensor_name(layer, part) for part in KEPT}
        return {part: (infos[name].dtype, self.tensors[name]) for part, name in names.items() if name in infos}

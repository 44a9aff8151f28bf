"""Dictionaries of one task's prefix by the builder's own parts, so that many settings share one run of the traces.

Owns which traces were run how. What a dictionary is made of is `asm_store.building`'s, the same code that `treadle asm build` runs;
here it stays in memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from asm_store.building.artifact import Share, make_layer
from asm_store.building.codebooks import LayerSamples
from asm_store.building.collection import Collection, positions_of
from asm_store.building.prefix import digest_of
from asm_store.building.recipe import HELD_OUT_EVERY
from asm_store.building.spill import Spill
from asm_store.building.stepping import Before, encode
from asm_store.building.traces import split
from treadle.contract.dictionary import (
    Calibration,
    ChunkMerge,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    KeyMode,
    Prefix,
    RowDtype,
    tensor_name,
)
from treadle.contract.dictionary_file import tensor_info
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model
from treadle_bench.asm.tasks import Task

Tick = Callable[[int], None]


@dataclass(frozen=True, slots=True, eq=False)
class Built:
    """A dictionary and its tensors by name."""

    dictionary: Dictionary
    tensors: dict[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Form:
    """What of a run of the traces settings depend on."""

    rotated: bool
    exact: bool
    chunk_tokens: int
    averaged: bool


class Builder:
    """Builds from one task's prefix and traces; keeps the last run of the traces in `folder`, some 70 KB a token for SmolLM2."""

    def __init__(self, model: CausalLM, model_folder: Path, task: Task, folder: Path) -> None:
        self._model, self._task, self._folder = model, task, folder
        self._made_with: DictionaryModel = dictionary_model(model_folder, model.config)
        self._traces = split(task.traces, HELD_OUT_EVERY)
        self._form: _Form | None = None
        self._spill: Spill | None = None
        self._kv: tuple[int, SequenceKV] | None = None

    def build(self, settings: DictionarySettings, *, chunk_tokens: int = 0) -> Built:
        """A dictionary. chunk_tokens: the prefix in chunks of so many tokens, each encoded by itself; 0: at once.

        Raises InvalidArgument where there are fewer calibration samples than entries.
        """
        spill = self._collected(settings, chunk_tokens)
        share = Share(self._traces.learnt_tokens, self._traces.tokens - self._traces.learnt_tokens)
        positions = positions_of(self._traces.all, len(self._task.prefix))
        kv = self.prefix_kv(chunk_tokens)
        tensors: dict[str, tuple[str, NDArray[Any]]] = {}
        for layer in range(self._model.config.layers):
            samples = LayerSamples(spill, layer, settings, self._made_with, self._model.rope, positions)
            tensors |= {tensor_name(layer, part): stored for part, stored in make_layer(samples, share, kv.keys(layer)).items()}
        prefix = self._task.prefix
        dictionary = Dictionary(
            name=self._task.name,
            model=self._made_with,
            layers=tuple(range(self._model.config.layers)),
            prefix=Prefix(digest_of(prefix), len(prefix), self._chunks(chunk_tokens)),
            calibration=Calibration(self._traces.learnt_digest, len(self._traces.learnt), self._traces.learnt_tokens),
            settings=settings,
            tensors=tuple((name, tensor_info(array, dtype)) for name, (dtype, array) in sorted(tensors.items())),
        )
        return Built(dictionary, {name: array for name, (_, array) in tensors.items()})

    def prefix_kv(self, chunk_tokens: int = 0) -> SequenceKV:
        """The prefix's whole KV, encoded in chunks or at once; the last one asked for is kept."""
        if self._kv is None or self._kv[0] != chunk_tokens:
            self._kv = chunk_tokens, encode(self._model, self._task.prefix, self._chunks(chunk_tokens))
        return self._kv[1]

    def _collected(self, settings: DictionarySettings, chunk_tokens: int) -> Spill:
        form = self._form_of(settings, chunk_tokens)
        if self._spill is None or self._form != form:
            self._collect(form, Before(len(self._task.prefix), self.prefix_kv(chunk_tokens)))
        assert self._spill is not None
        return self._spill

    def _collect(self, form: _Form, before: Before) -> None:
        shutil.rmtree(self._folder / "spill", ignore_errors=True)
        config = self._model.config
        self._spill = Spill(self._folder / "spill", tuple(range(config.layers)), config.heads, config.head_dim, exact=form.exact)
        self._spill.check_room(self._traces.tokens)
        chunks = len(self._chunks(form.chunk_tokens))
        key = KeyMode.OWN_POSITION if form.rotated else KeyMode.PRE_ROPE
        for _ in Collection(self._model, before, self._traces.all, self._spill, key, chunks if form.averaged else 1).run():
            pass
        self._form = form

    def _form_of(self, settings: DictionarySettings, chunk_tokens: int) -> _Form:
        averaged = settings.chunk_merge is ChunkMerge.MEAN and len(self._chunks(chunk_tokens)) > 1
        return _Form(settings.key is KeyMode.OWN_POSITION, settings.dtype is RowDtype.F32, chunk_tokens, averaged)

    def _chunks(self, chunk_tokens: int) -> tuple[int, ...]:
        count = len(self._task.prefix)
        size = chunk_tokens or count
        return tuple(min(size, count - first) for first in range(0, count, size))


def told(settings: DictionarySettings) -> dict[str, Any]:
    """Settings as a note of a cell."""
    names = (
        "key",
        "ridge_ppm",
        "heads_joined",
        "grouping",
        "aggregation",
        "chunk_merge",
        "dtype",
        "entries",
        "lists",
        "matched_keys",
    )
    return {name: (value if isinstance(value := getattr(settings, name), int) else str(value)) for name in names}

"""One build from prefix and traces to a dictionary's folder: the one place where the parts of the builder meet.

Owns the order of the work, when it is saved, and what the card says. Does not print (`asm_store.commands`). Memory beside the model
and the prefix's KV: one step's numbers, and of one layer the keys that centroids are fitted on and its entries.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from asm_store.building.artifact import HELD_OUT_TOKENS_MIN, Share, extend_layer, make_layer
from asm_store.building.base import Base
from asm_store.building.card import read_card, sizes
from asm_store.building.chat import known_chat_wrap
from asm_store.building.codebooks import LayerSamples
from asm_store.building.collection import Collection, positions_of
from asm_store.building.fidelity import measure, up_to
from asm_store.building.prefix import digest_of, load_tokenizer
from asm_store.building.prefix_kv import write_prefix_kv
from asm_store.building.recipe import Recipe
from asm_store.building.self_traces import write_traces
from asm_store.building.spill import Spill
from asm_store.building.stepping import Before, encode
from asm_store.building.traces import Trace, Traces, split
from asm_store.building.work_folder import VERSION, WorkFolder
from treadle.chassis.interrupts import interrupts_held
from treadle.contract.dictionary import Calibration, ChunkMerge, Dictionary, Prefix, RowDtype, tensor_name
from treadle.contract.dictionary_card import CARD_SCHEMA, fit_of
from treadle.contract.dictionary_file import read_manifest, tensor_info, write_folder
from treadle.contract.errors import InvalidArgument
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model
from treadle.nn.prefix_memory import PrefixMemory

CHECKPOINT_SECONDS = 20.0  # at most this much work is lost by a kill
FIDELITY_TOKENS = 512  # of held-out traces; three forwards each, so that measuring stays a small part of the build

Watch = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What to build.

    prefix:      its token ids; of the further chunk where there is a base
    traces:      token ids; empty: the model writes `recipe.self_traces` of them
    base:        folder of a dictionary that a further chunk is for: its keys, settings and layers are taken over
    source:      where the prefix comes from, for the card
    """

    recipe: Recipe
    model_folder: Path
    model_name: str
    prefix: tuple[int, ...]
    traces: tuple[Trace, ...]
    out: Path
    base: Path | None = None
    source: str = ""


class Build:
    """Carries out one order.

    watch: called as (what is being done, units done, of); model: the order's, where it is loaded already
    """

    def __init__(
        self, order: Order, watch: Watch = lambda what, done, of: None, *, restart: bool = False, model: CausalLM | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
    ) -> None:  # fmt: skip
        """Raises InvalidArgument (the order does not fit itself or the model), FingerprintMismatch (an unfinished other build is there)."""
        if not order.prefix:
            raise InvalidArgument("prefix: no tokens in it")
        if bool(order.traces) == bool(order.recipe.self_traces):
            raise InvalidArgument("traces: a file of them, or a number that the model writes itself: one of both")
        self.order, self._watch, self._checkpoint_seconds = order, watch, checkpoint_seconds
        self._interrupted: Callable[[], bool] = lambda: False
        self._seconds: dict[str, float] = {}
        self._tell("loading the model", 0, 1)
        self.model = CausalLM.load(order.model_folder) if model is None else model
        self.made_for = dictionary_model(order.model_folder, self.model.config)
        self._base = None if order.base is None else Base.open(order.base)
        if self._base is not None:
            self._base.require(order.recipe, self.made_for)
        self._layers = self._chosen_layers()
        if order.traces:
            self._check_samples(split(order.traces, order.recipe.held_out_every))
        self._work = WorkFolder(order.out, restart=restart)
        try:
            self._state = self._work.resume(self._identity())
        except BaseException:
            self._work.close()
            raise

    def run(self) -> tuple[Dictionary, dict[str, Any]]:
        """Do what is left; the manifest and the card of the folder, which is whole then.

        SIGINT and SIGTERM are heard between steps, the state is saved and KeyboardInterrupt raised: the same order goes on from there.
        """
        try:
            if self._work.finished:  # killed before the last of it was removed
                dictionary, card = read_manifest(self.order.out), read_card(self.order.out)
            else:
                with interrupts_held() as self._interrupted:
                    dictionary, card = self._make()
            self._work.remove()
            return dictionary, card
        finally:
            self._work.close()

    def _make(self) -> tuple[Dictionary, dict[str, Any]]:
        with self._timed("prefix"):
            prefix = self._encode()
        with self._timed("traces"):
            traces = self._get_traces(prefix)
        with self._timed("collection"):
            spill = self._collect(prefix, traces)
        with self._timed("clustering"):
            self._cluster(spill, traces, prefix)
        if not self._needs_exact(traces):
            return self._finish(prefix, traces)
        del prefix  # before it is read again: two whole ones would be the most that a build holds
        return self._finish(self._encode_exact(), traces)

    def _encode(self) -> SequenceKV:
        order, tokens = self.order, len(self.order.prefix)
        return encode(
            self.model,
            order.prefix,
            order.recipe.chunks(tokens),
            self._first,
            lambda done: self._tell("reading the prefix", done, tokens),
        )

    def _get_traces(self, prefix: SequenceKV) -> Traces:
        recipe, traces = self.order.recipe, self.order.traces or self._work.traces()
        if not traces:
            count, folder = recipe.self_traces, self.order.model_folder
            traces = write_traces(
                self.model, self._before(prefix), self.order.prefix, load_tokenizer(folder), known_chat_wrap(folder), count, recipe.settings.seed,
                lambda done: self._tell("writing traces", done, count),
            )  # fmt: skip
            self._work.keep_traces(traces)
        chosen = split(traces, recipe.held_out_every)
        self._check_samples(chosen)
        return chosen

    def _collect(self, prefix: SequenceKV, traces: Traces) -> Spill:
        settings, config = self.order.recipe.settings, self.model.config
        exact = settings.dtype is RowDtype.F32
        spill = Spill(self._work.path / "spill", self._layers, config.heads, config.head_dim, exact=exact)
        if all(self._work.has_layer(layer) for layer in self._layers):
            return spill
        spill.check_room(traces.tokens)
        averaged = len(self.order.recipe.chunks(len(self.order.prefix))) if settings.chunk_merge is ChunkMerge.MEAN else 1
        collection = Collection(self.model, self._before(prefix), traces.all, spill, settings.key, averaged)
        begun, saved = int(self._state.get("batches", 0)), time.monotonic()
        spill.cut(collection.tokens_of(begun))
        for done in collection.run(begun):
            last = done == len(collection.batches)
            if last or self._interrupted() or time.monotonic() - saved >= self._checkpoint_seconds:
                spill.flush()
                self._work.save(self._identity(), {"batches": done})
                saved = time.monotonic()
            self._tell("collecting states", collection.tokens_of(done), traces.tokens)
        return spill

    def _cluster(self, spill: Spill, traces: Traces, prefix: SequenceKV) -> None:
        share = Share(traces.learnt_tokens, traces.tokens - traces.learnt_tokens)
        positions = positions_of(traces.all, self._before(prefix).position)
        for number, layer in enumerate(self._layers, 1):
            if not self._work.has_layer(layer):
                samples = LayerSamples(spill, layer, self.order.recipe.settings, self.made_for, self.model.rope, positions)
                if self._base is None:
                    parts = make_layer(samples, share, prefix.keys(layer))
                else:
                    parts = extend_layer(samples, share, self._base.kept(layer))
                self._work.keep_layer(layer, parts)
            self._tell("clustering layers", number, len(self._layers))

    def _finish(self, exact: SequenceKV, traces: Traces) -> tuple[Dictionary, dict[str, Any]]:
        """exact: the prefix read in one piece, where that is needed."""
        order, recipe, out = self.order, self.order.recipe, self.order.out
        self._tell("writing", 0, 1)
        tokens, chunks = len(order.prefix), recipe.chunks(len(order.prefix))
        kv_digest = write_prefix_kv(out, self._work.path / "kv.npy", self.model, exact) if recipe.keep_prefix_kv else None
        stored = {tensor_name(layer, part): of for layer in self._layers for part, of in self._work.layer(layer).items()}
        dictionary = Dictionary(
            recipe.name, self.made_for, self._layers, Prefix(digest_of(order.prefix), tokens, chunks, first=self._first),
            Calibration(traces.learnt_digest, len(traces.learnt), traces.learnt_tokens), recipe.settings,
            tuple((name, tensor_info(array, dtype)) for name, (dtype, array) in sorted(stored.items())), kv_digest,
        )  # fmt: skip
        tensors = {name: array for name, (_, array) in stored.items()}
        with self._timed("fidelity"):
            fidelity = self._fidelity(exact, traces, PrefixMemory(dictionary, tensors))
        card = self._card(dictionary, tensors, traces, fidelity)
        self._work.save(self._identity(), {VERSION: dictionary.version})
        write_folder(out, dictionary, tensors, json.dumps(card, indent=1).encode())
        return dictionary, card

    def _needs_exact(self, traces: Traces) -> bool:
        """Whether a prefix in chunks is read in one piece, too."""
        recipe = self.order.recipe
        chunked = self._base is None and len(recipe.chunks(len(self.order.prefix))) > 1
        return chunked and (recipe.keep_prefix_kv or bool(traces.held_out))

    def _encode_exact(self) -> SequenceKV:
        """The prefix read in one piece: what answers are compared with, and what the guard sends requests back to."""
        tokens = len(self.order.prefix)
        return encode(
            self.model, self.order.prefix, (tokens,), 0, lambda done: self._tell("reading the prefix in one piece", done, tokens)
        )

    def _fidelity(self, exact: SequenceKV, traces: Traces, memory: PrefixMemory) -> dict[str, Any] | None:
        """None where no traces are held out; a further chunk by itself is no prefix, so there is nothing to compare then."""
        if not traces.held_out or self._base is not None:
            return None
        some = up_to(traces.held_out, FIDELITY_TOKENS)
        full, tokens = Before(exact.length, shared=exact), sum(map(len, some))
        others = {"dictionary": Before.dictionary(memory), "nothing": Before()}
        found = measure(self.model, full, others, some, lambda done: self._tell("measuring fidelity", done, tokens))
        return {name: figures.to_json() for name, figures in found.items()}

    def _card(
        self, dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]], traces: Traces, fidelity: dict[str, Any] | None
    ) -> dict[str, Any]:
        order = self.order
        held_out_tokens = traces.tokens - traces.learnt_tokens
        return {
            "schema": CARD_SCHEMA, "name": dictionary.name, "version": dictionary.version, "source": order.source,
            "model": {"name": order.model_name, "digest": self.made_for.digest},
            "prefix": {"tokens": dictionary.prefix.tokens, "chunks": len(dictionary.prefix.chunks)},
            "base": None if self._base is None else self._base.dictionary.version,
            "calibration": {
                "traces": len(traces.learnt), "tokens": traces.learnt_tokens, "held_out_traces": len(traces.held_out),
                "held_out_tokens": held_out_tokens, "written_by_the_model": bool(order.recipe.self_traces),
            },
            "sizes": sizes(dictionary),
            "fit": fit_of(dictionary, tensors),
            "fit_on": "held-out traces" if held_out_tokens >= HELD_OUT_TOKENS_MIN else "the calibration itself",
            "fidelity": fidelity,
            "seconds": {name: round(seconds, 2) for name, seconds in self._seconds.items()},
            "made_with": {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()},
        }  # fmt: skip

    def _before(self, prefix: SequenceKV) -> Before:
        if self._base is None:
            return Before(prefix.length, shared=prefix)
        return Before(self._first + prefix.length, shared=prefix, memory=self._base.memory)

    @property
    def _first(self) -> int:
        """Where the prefix's first token stands: behind what the base stands for."""
        return 0 if self._base is None else self._base.dictionary.prefix.tokens

    def _chosen_layers(self) -> tuple[int, ...]:
        if self._base is not None:
            return self._base.dictionary.layers
        count = self.model.config.layers
        chosen = self.order.recipe.layers or tuple(range(count))
        if chosen[-1] >= count:
            raise InvalidArgument(f"layers {list(chosen)}: the model has {count}, counted from 0")
        return chosen

    def _check_samples(self, traces: Traces) -> None:
        """Before hours of work: too few samples are known as soon as the traces are."""
        settings = self.order.recipe.settings
        if self.made_for.group % settings.heads_joined:
            raise InvalidArgument(
                f"heads_joined: divides the {self.made_for.group} query heads of a group, got {settings.heads_joined}"
            )
        if settings.matched_keys > len(self.order.prefix):
            raise InvalidArgument(
                f"matched_keys: {settings.matched_keys} of a prefix of {len(self.order.prefix)} tokens: at most as many"
            )
        samples = traces.learnt_tokens * (self.made_for.group // settings.heads_joined)
        if self._base is None and samples < settings.entries:
            raise InvalidArgument(
                f"{settings.entries} entries need as many calibration samples, {traces.learnt_tokens} tokens of traces give {samples}: "
                "give more traces, or fewer --entries"
            )

    def _identity(self) -> dict[str, str]:
        order = self.order
        return order.recipe.identity | {
            "model": self.made_for.digest, "tokenizer": self.made_for.tokenizer, "prefix": digest_of(order.prefix),
            "traces": split(order.traces, 0).digest if order.traces else "", "base": "" if self._base is None else self._base.dictionary.version,
        }  # fmt: skip

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._seconds[what] = time.monotonic() - began

    def _tell(self, what: str, done: int, of: int) -> None:
        """Every step comes by here: what it has saved is whole, so this is where an interrupt is obeyed."""
        self._watch(what, done, of)
        if self._interrupted():
            raise KeyboardInterrupt

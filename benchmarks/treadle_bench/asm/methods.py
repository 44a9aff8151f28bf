"""Which methods are compared on a prefix, at which sizes, and what each puts in the prefix's place.

Owns the choice of sizes: dictionaries of several sizes, and every rival at the storage and at the traffic of each of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from asm_store.building.recipe import matched_keys_of
from treadle.contract.dictionary import DictionarySettings
from treadle.contract.errors import InvalidArgument, Unavailable
from treadle.contract.lookup_settings import LISTS_PROBED
from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixMemory
from treadle_bench.asm import attention_matching, costs, dictionaries, kvpress_rivals
from treadle_bench.asm.answering import Before, before_prefix, encode_prefix
from treadle_bench.asm.compact_kv import kept_of
from treadle_bench.asm.heatmap import Watched
from treadle_bench.asm.tasks import Task

ENTRIES, QUICK_ENTRIES = (
    1024,
    64,
)  # of the large dictionary of every prefix, beside those that take so many per cent of its storage:
STORAGE_PERCENT = (20, 25)
PERCENT_STEP = 5
RIVAL_SHARE_MAX = 0.9  # of the prefix: what keeps more is the prefix
MATCHED_SHARE = 0.9  # of the storage of these; on validation questions entries gained less for the same bytes
WIDE = "wide"  # half as many matched keys again: three eighths of a prefix instead of a quarter


class Kind(StrEnum):
    """What stands for the prefix."""

    FULL = "full"
    CHUNKED = "chunks"
    NONE = "none"
    TRUNCATED = "icl"
    DICTIONARY = "asm"
    MATCHING = "am"
    KVZIP = "kvzip"
    SNAPKV = "snapkv"


RIVALS = (Kind.TRUNCATED, Kind.KVZIP, Kind.SNAPKV, Kind.MATCHING)


@dataclass(frozen=True, slots=True)
class Method:
    """size: entries of a dictionary, else KV tokens; 0 for those without. variant: of a dictionary's settings, in its name.

    chunk_tokens: the prefix is encoded in chunks of so many tokens; 0: at once. lists_probed: 0: the default
    """

    kind: Kind
    size: int = 0
    settings: DictionarySettings | None = None
    variant: str = ""
    chunk_tokens: int = 0
    lists_probed: int = 0

    def line(self, share: float) -> str:
        """What is one line of a table over prefixes of different lengths: those of one size in per cent, to the nearest five.

        share: numbers kept in per cent of the prefix's KV
        """
        percent = f"{round(share / PERCENT_STEP) * PERCENT_STEP}%"
        if self.kind is Kind.DICTIONARY:
            assert self.settings is not None
            if self.size < ENTRIES and self.settings.matched_keys and not self.variant:
                return f"{self.kind}-{percent}"
            parts = [f"{self.kind}-k{self.size}", "" if self.settings.matched_keys else "m0", self.variant]
            return "-".join(part for part in parts if part)
        return f"{self.kind}-{percent}" if self.size else self.name

    @property
    def name(self) -> str:
        """As cells and --only name it, such as asm-k256-m200 or kvzip-193."""
        if self.kind is Kind.DICTIONARY:
            assert self.settings is not None
            matched = f"-m{self.settings.matched_keys}" if self.settings.matched_keys else ""
            return f"{self.kind}-k{self.size}{matched}{f'-{self.variant}' if self.variant else ''}"
        size = self.size or self.chunk_tokens
        return f"{self.kind}-{size}" if size else str(self.kind)


@dataclass(frozen=True, slots=True)
class Placed:
    """A method in place. notes: what choosing or building took."""

    before: Before
    cost: costs.Cost
    notes: dict[str, Any]


class Bench:
    """One task's prefix, with a model: makes each method's stand-in, and shares what several of them need."""

    def __init__(self, model: CausalLM, folder: Path, task: Task, work: Path, methods: Iterable[Method] = ()) -> None:
        """folder: of the model; work: of what can be computed again; methods: all that will be asked for, so that kvpress runs once"""
        self.model, self.folder, self.task, self._work = model, folder, task, work
        self._pressing = [(str(each.kind), each.size) for each in methods if each.kind in (Kind.KVZIP, Kind.SNAPKV)]

    @cached_property
    def prefix_kv(self) -> SequenceKV:
        """The whole prefix's KV."""
        return encode_prefix(self.model, self.task.prefix)

    @cached_property
    def builder(self) -> dictionaries.Builder:
        """Builds dictionaries of the prefix; methods that differ in settings alone share a run of the traces."""
        return dictionaries.Builder(self.model, self.folder, self.task, self._work)

    @cached_property
    def _pressed(self) -> dict[tuple[str, int], kvpress_rivals.Pressed] | Unavailable:
        """All sizes at once, or why there are none: an environment that cannot be made is not tried again for each size."""
        try:
            return dict(zip(self._pressing, kvpress_rivals.press(self.folder, self.task.prefix, self._pressing), strict=True))
        except Unavailable as error:
            return error

    def place(self, method: Method) -> Placed:
        """What stands for the prefix by a method. Raises what it raises: Unavailable without kvpress."""
        count, config = len(self.task.prefix), self.model.config
        if method.kind is Kind.NONE:
            return Placed(Before(), (0.0, 0.0, 0), {})
        if method.kind is Kind.FULL:
            return Placed(Before(count, self.prefix_kv), costs.of_kept(count, count, config), {})
        if method.kind is Kind.CHUNKED:
            return Placed(Before(count, self.builder.prefix_kv(method.chunk_tokens)), costs.of_kept(count, count, config), {})
        if method.kind is Kind.TRUNCATED:
            shown = self.task.truncated(method.size)
            return Placed(before_prefix(self.model, shown), costs.of_kept(len(shown), count, config), {"tokens": len(shown)})
        if method.kind is Kind.DICTIONARY:
            return self._dictionary(method)
        begun = time.process_time()
        if method.kind is Kind.MATCHING:
            compact = attention_matching.match(self.model, self.prefix_kv, self.task.traces, method.size)
            notes: dict[str, Any] = {"cpu_seconds": time.process_time() - begun}
        else:
            if (key := (str(method.kind), method.size)) not in self._pressing:
                raise InvalidArgument(f"{method.name}: name it when the bench is made, so that kvpress runs once")
            if isinstance(self._pressed, Unavailable):
                raise self._pressed
            pressed = self._pressed[key]
            compact = kept_of(self.prefix_kv, config, pressed.kept, count)
            notes = {"cpu_seconds": pressed.cpu_seconds, "kept": compact.tokens}
        cost = costs.of_kept(compact.tokens, count, config, biases=method.kind is Kind.MATCHING)
        return Placed(Before(count, memory=compact), cost, notes)

    def _dictionary(self, method: Method) -> Placed:
        assert method.settings is not None
        begun = time.process_time()
        built = self.builder.build(method.settings, chunk_tokens=method.chunk_tokens)
        notes = {"cpu_seconds": time.process_time() - begun, "settings": dictionaries.told(method.settings)}
        probed = method.lists_probed or LISTS_PROBED
        memory = PrefixMemory(built.dictionary, built.tensors, lists_probed=probed)
        watched = None
        if method.lists_probed:
            watched = Watched(memory, PrefixMemory(built.dictionary, built.tensors, lists_probed=method.settings.lists))
        cost = costs.of_dictionary(built.dictionary, lists_probed=probed)
        return Placed(Before(memory.position_offset, memory=watched or memory), cost, notes)


def dictionaries_of(task: Task, model: CausalLM, settings: DictionarySettings, *, quick: bool) -> list[Method]:
    """A large dictionary, the same with whole groups joined, with half as many matched keys again and without any, and one for each
    share of the prefix's storage.

    settings: matched_keys 0 stands for as many as a build takes by itself
    """
    count, group = len(task.prefix), model.config.heads // model.config.kv_heads
    entries = QUICK_ENTRIES if quick else ENTRIES
    large = replace(settings, entries=entries, matched_keys=settings.matched_keys or matched_keys_of(count))
    found = [Method(Kind.DICTIONARY, entries, large)]
    if group != large.heads_joined:
        found.append(Method(Kind.DICTIONARY, entries, replace(large, heads_joined=group), f"c{group}"))
    found.append(Method(Kind.DICTIONARY, entries, replace(large, matched_keys=large.matched_keys * 3 // 2), WIDE))
    found.append(Method(Kind.DICTIONARY, entries, replace(large, matched_keys=0)))
    stored, _ = costs.entry_tokens(model.config, settings)
    for percent in () if quick else STORAGE_PERCENT:
        matched = max(1, int(count * percent / 100 * MATCHED_SHARE))
        small = max(1, int((count * percent / 100 - costs.matched_tokens(matched, model.config)) / stored))
        found.append(Method(Kind.DICTIONARY, small, replace(settings, entries=small, matched_keys=matched)))
    return found


def rival_tokens(task: Task, model: CausalLM, mine: Sequence[Method]) -> list[int]:
    """KV tokens that each of these dictionaries is worth in storage and in traffic, rising; without those of about the prefix's own size or more."""
    sizes = set[int]()
    for method in mine:
        assert method.settings is not None
        stored, read = costs.entry_tokens(model.config, method.settings)
        matched = costs.matched_tokens(method.settings.matched_keys, model.config)
        storage, traffic = round(matched + method.size * stored), round(matched + method.size * read)
        # What a small dictionary reads is hardly less than what it stores: one rival stands for both.
        sizes |= {storage} if traffic > 0.9 * storage else {storage, traffic}
    return sorted(size for size in sizes if 0 < size <= RIVAL_SHARE_MAX * len(task.prefix))


def methods_of(task: Task, model: CausalLM, settings: DictionarySettings, *, quick: bool) -> list[Method]:
    """Everything that a table holds, without repetition."""
    mine = dictionaries_of(task, model, settings, quick=quick)
    found = [Method(Kind.FULL), Method(Kind.NONE), *mine]
    for tokens in rival_tokens(task, model, mine):
        found += [Method(kind, tokens) for kind in RIVALS if _fits(kind, tokens, task)]
    return list(dict.fromkeys(found))


def named(methods: Sequence[Method], only: Sequence[str]) -> list[Method]:
    """Those whose names begin as one of `only` says; none given: all. The whole prefix is always among them: all is held against it."""
    if not only:
        return list(methods)
    chosen = [each for each in methods if each.kind is Kind.FULL or any(each.name.startswith(one) for one in only)]
    if len(chosen) < 2:
        raise InvalidArgument(f"--only {' '.join(only)}: there are {', '.join(each.name for each in methods)}")
    return chosen


def _fits(kind: Kind, tokens: int, task: Task) -> bool:
    if kind is Kind.SNAPKV and tokens < kvpress_rivals.SNAPKV_TOKENS_MIN:
        return False
    if kind is Kind.TRUNCATED and not task.truncated(tokens):
        return False
    return 0 < tokens < len(task.prefix)

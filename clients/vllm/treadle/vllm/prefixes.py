"""The long prefixes that are open in the process that runs the model: dictionaries of attention states, mapped, and the exact KV beside them.

Owns opening, the bound on open ones and who uses them. Opened by whoever runs the engine, before the first request: a step waits for
no store, and no request names a file. Does not look up (`treadle.nn.prefix_memory`) or merge (`prefix_step`).
"""

from __future__ import annotations

import logging
from functools import cached_property
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from treadle.client.asm import AsmStore, MappedDictionary, map_folder
from treadle.contract.dictionary import Dictionary, DictionaryModel
from treadle.contract.dictionary_file import check_numbers
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound, ResourceExhausted
from treadle.contract.lookup_settings import LookupIndex, LookupSettings
from treadle.nn.config import ModelConfig
from treadle.nn.entry_search import check_hnswlib
from treadle.nn.model_identity import dictionary_model
from treadle.nn.prefix_memory import PrefixMemory
from treadle.nn.rope import Rope
from treadle.vllm.config import KEY, Choice, MemoryConfig

log = logging.getLogger("treadle.vllm")
OPEN_SECONDS_MAX = 2.0  # a store that has the version here answers in milliseconds, and all requests wait meanwhile
KV_TENSOR = "kv"
_SHAPE = ("layers", "heads", "kv_heads", "head_dim")


class HeldPrefix:
    """One open version. holds: of those who opened it and have not let go of it; requests: that use it now.

    kv: the exact KV [layers, 2, kv_heads, tokens, head_dim], where it lies; None: none is kept
    """

    def __init__(self, mapped: MappedDictionary, lookup: LookupSettings) -> None:
        self._mapped = mapped
        self.dictionary: Dictionary = mapped.dictionary
        self.choice = Choice(mapped.name, mapped.version)
        self.memory = PrefixMemory(
            mapped.dictionary,
            mapped.tensors,
            lists_probed=lookup.lists_probed,
            guard_percent=lookup.guard_percent,
            index=lookup.index,
        )
        self.kv = None if mapped.prefix_kv_path is None else _map_kv(mapped.prefix_kv_path, mapped.dictionary)
        self.holds = self.requests = 0

    @property
    def tokens(self) -> int:
        """Tokens that it stands for."""
        return self.dictionary.prefix.tokens

    @property
    def lookups_each(self) -> int:
        """Lookups of one token in all layers."""
        return len(self.dictionary.layers) * self.dictionary.codebooks * self.dictionary.lookups

    def positions_before(self, *, exact: bool) -> int:
        """Positions before a request's own tokens, behind the exact KV or the dictionary."""
        return self.tokens if exact else self.memory.position_offset

    def close(self) -> None:
        """Let go of the version. No step may be using it."""
        self._mapped.close()


class Prefixes:
    """The open prefixes of one engine. One thread, that of the model.

    folder: of the model that the engine runs
    """

    def __init__(self, config: MemoryConfig, folder: Path) -> None:
        """Raises NotFound where the index that `config` names is not installed."""
        if config.lookup.index == LookupIndex.HNSW:
            check_hnswlib()
        self._config, self._folder = config, folder
        self._open: dict[Choice, HeldPrefix] = {}

    @cached_property
    def model(self) -> ModelConfig:
        """Of the engine. Raises NotFound, DataLoss, InvalidArgument for a folder that treadle's own forward would not run."""
        return ModelConfig.from_folder(self._folder)

    @cached_property
    def rope(self) -> Rope:
        """The model's."""
        return Rope(self.model)

    @cached_property
    def _whole_model(self) -> DictionaryModel:
        return dictionary_model(self._folder, self.model)  # may read all weights

    def open(self, what: str, *, checked: bool = False) -> str:
        """Open a version, and hold it until as many `let_go`; its NAME@VERSION.

        what:    NAME@VERSION of the store, or the path of a dictionary's folder, which begins with /
        checked: who asks has compared the version's files and model with their digests, and read its numbers; only shapes are looked at here
        Raises NotFound, DataLoss, FingerprintMismatch naming the field, ResourceExhausted, Unavailable, DeadlineExceeded.
        """
        choice = None if what.startswith("/") else _exact_choice(what, "prefix")
        held = self._open.get(choice) if choice is not None else None
        if held is None:
            held = self._adopted(self._mapped(what, choice, checked), checked)
        held.holds += 1
        return str(held.choice)

    def let_go(self, what: str) -> None:
        """One who opened a version needs it no more: without holds it is closed when no request uses it. Unknown ones are passed by."""
        held = self._open.get(_exact_choice(what, "prefix"))
        if held is not None and held.holds:
            held.holds -= 1

    def take(self, choice: Choice) -> HeldPrefix:
        """The prefix that a request uses from now on; to be given back with `release`. Raises NotFound for one that is not open here."""
        held = self._open.get(choice)
        if held is None:
            raise NotFound(
                f"prefix {choice} is not open in this engine; open it before: collective_rpc('open_treadle_prefix', ...)"
            )
        held.requests += 1
        return held

    def release(self, held: HeldPrefix) -> None:
        """A request is over."""
        held.requests -= 1

    def tidy(self) -> None:
        """Close those that were let go and that no request uses. Between steps."""
        for choice, held in list(self._open.items()):
            if not held.holds and not held.requests:
                del self._open[choice]
                held.close()
                log.info("prefix %s closed", choice)

    def close(self) -> None:
        """Close all. No step may be running."""
        for held in self._open.values():
            held.close()
        self._open.clear()

    def _make_room(self) -> None:
        self.tidy()
        held = sum(one.holds > 0 for one in self._open.values())  # others end with the last of their requests, all of them aborted
        if held >= self._config.prefixes_max:
            raise ResourceExhausted(f"{held} prefixes are open, the limit is {KEY}.prefixes_max; let go of one")

    def _mapped(self, what: str, choice: Choice | None, checked: bool) -> MappedDictionary:
        if choice is None:
            return map_folder(Path(what), verify=not checked)
        if not self._config.asm_store:
            raise InvalidArgument(f"prefix {what}: this engine knows no store; give additional_config.{KEY}.asm_store, or a folder")
        with AsmStore(self._config.asm_endpoint) as store:
            return store.open(choice.name, choice.version, verify=not checked, timeout_seconds=OPEN_SECONDS_MAX)

    def _adopted(self, mapped: MappedDictionary, checked: bool) -> HeldPrefix:
        known = self._open.get(Choice(mapped.name, mapped.version))
        if known is not None:  # a folder that was opened before
            mapped.close()
            return known
        try:
            self._make_room()
            self._check(mapped.dictionary.model, checked)
            if not checked:
                check_numbers(mapped.tensors, mapped.dictionary)
            held = HeldPrefix(mapped, self._config.lookup)
        except BaseException:
            mapped.close()
            raise
        self._open[held.choice] = held
        log.info("prefix %s opened: %d tokens, exact KV: %s", held.choice, held.tokens, held.kv is not None)
        return held

    def _check(self, made_with: DictionaryModel, checked: bool) -> None:
        for name in _SHAPE:
            if getattr(made_with, name) != getattr(self.model, name):
                raise FingerprintMismatch(f"model.{name}", getattr(self.model, name), getattr(made_with, name))
        if not checked:
            expected = self._whole_model.fingerprint.as_dict()
            whole = {"model.digest": expected.pop("model.digest")}  # differs whenever anything does: named last
            made_with.fingerprint.require(expected)
            made_with.fingerprint.require(whole)


def _exact_choice(what: str, field: str) -> Choice:
    choice = Choice.parse(what, field)
    if choice is None or not choice.version:
        raise InvalidArgument(f"{field}: NAME@VERSION expected, the version 64 hex digits; got {what!r}")
    return choice


def _map_kv(path: Path, dictionary: Dictionary) -> Tensor:
    """A view of the file. Raises NotFound, DataLoss."""
    model = dictionary.model
    shape = [model.layers, 2, model.kv_heads, dictionary.prefix.tokens, model.head_dim]
    try:
        kv: Tensor = safe_open(str(path), framework="pt").get_tensor(KV_TENSOR)  # type: ignore[no-untyped-call]
    except FileNotFoundError as error:
        raise NotFound(f"prefix KV: {path.name} is gone") from error
    except (OSError, SafetensorError) as error:
        raise DataLoss(f"prefix KV: {path.name} cannot be read: {error}") from error
    if list(kv.shape) != shape:
        raise DataLoss(f"prefix KV: {shape} expected, {path.name} holds {list(kv.shape)}")
    return kv

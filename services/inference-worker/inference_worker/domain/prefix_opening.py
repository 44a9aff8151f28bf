"""From a dictionary in the store to a prefix that steps can use: does it fit, its files mapped, its exact KV checked.

Owns the checks and the order of opening. Does not own when, how many or for whom (`prefix_catalogue`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from torch import Tensor

from inference_worker.domain.errors import PrefixMisfit
from inference_worker.domain.ports import DictionaryStore, MappedPrefix, OpeningObserver, PrefixHost, ResidentVersion
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_kv import PrefixKV
from treadle.contract.dictionary import Dictionary, DictionaryModel
from treadle.contract.dictionary_file import check_numbers
from treadle.contract.errors import DataLoss, DeadlineExceeded, FingerprintMismatch, NotFound, TreadleError, Unavailable
from treadle.contract.fingerprint import Fingerprint
from treadle.contract.lookup_settings import LookupSettings
from treadle.nn.prefix_memory import PrefixMemory

log = logging.getLogger("treadle.worker")
WHOLE_MODEL = "model.digest"  # differs whenever anything does: named only where nothing narrower is
OWN_TOKENS_MIN = 2  # positions behind a prefix: one token in, one out


@dataclass(frozen=True)
class PrefixOpener:
    """Opens prefixes for one language model. Any thread.

    language_model: says what it is, field by field; asked once, by the first check: it may read all weights
    positions_max:  positions of the language model
    map_kv:         maps the file of an exact KV whose sha256 it is given; raises DataLoss
    host:           the process that runs the model; None: this one
    lookup:         how the prefixes are looked up
    """

    language_model: Callable[[], DictionaryModel]
    positions_max: int
    map_kv: Callable[[Path, str], Tensor]
    host: PrefixHost | None = None
    lookup: LookupSettings = field(default_factory=LookupSettings)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What a dictionary must have been made with."""
        return self.language_model().fingerprint

    def check(self, dictionary: Dictionary) -> None:
        """Raise PrefixMisfit, naming the field, for a dictionary that was not made with this language model, leaves no positions or is of a further chunk alone."""
        expected, made_with = self.fingerprint.as_dict(), dictionary.model.fingerprint
        whole = {WHOLE_MODEL: expected.pop(WHOLE_MODEL)}
        try:
            made_with.require(expected)
            made_with.require(whole)
            if dictionary.prefix.first:
                raise FingerprintMismatch("prefix.first", "0, for a further chunk alone is no prefix", dictionary.prefix.first)
            if dictionary.prefix.tokens + OWN_TOKENS_MIN > self.positions_max:
                raise FingerprintMismatch(
                    "prefix.tokens", f"at most {self.positions_max - OWN_TOKENS_MIN}", dictionary.prefix.tokens
                )
        except FingerprintMismatch as error:
            raise PrefixMisfit(dictionary.name, error) from error

    def try_open(
        self, store: DictionaryStore, found: ResidentVersion[Dictionary], observer: OpeningObserver | None = None
    ) -> OpenPrefix | TreadleError:
        """`open`, logged and counted: the prefix, or why there is none. Raises nothing."""
        name, version, began = found.model.name, found.version, time.monotonic()
        opened: OpenPrefix | TreadleError
        try:
            opened = self.open(store, found.model, version)
        except DataLoss as error:
            opened = DataLoss(f"prefix {name!r}, version {version}, is damaged: {error}; publish it again")
        except NotFound as error:
            opened = NotFound(f"prefix.version: {name!r}, version {version}, is in the store no more: {error}")
        except FingerprintMismatch as error:
            opened = error if isinstance(error, PrefixMisfit) else PrefixMisfit(name, error)
        except DeadlineExceeded as error:  # of the store's call, not of a request: one that hangs is as good as away
            opened = Unavailable(f"prefix {name!r}: the store did not answer in time: {error}")
        except TreadleError as error:
            opened = error
        except Exception as error:
            log.exception("a prefix could not be opened", extra={"prefix": name, "version": version})
            opened = Unavailable(f"prefix {name!r} could not be opened ({type(error).__name__}); the worker's log has more")
        failed, seconds = isinstance(opened, TreadleError), time.monotonic() - began
        if observer is not None:
            observer.opened("refused" if isinstance(opened, FingerprintMismatch) else "failed" if failed else "ok", seconds)
        fields = {"prefix": name, "version": version, "seconds": round(seconds, 3)}
        if isinstance(opened, TreadleError):
            log.warning("prefix not opened", extra=fields | {"reason": str(opened)})
        else:
            told = {"tokens": opened.tokens, "mapped_bytes": opened.mapped_bytes, "copied_bytes": opened.copied_bytes}
            log.info("prefix opened", extra=fields | told)
        return opened

    def open(self, store: DictionaryStore, dictionary: Dictionary, version: str) -> OpenPrefix:
        """Open a version of the store. Raises what `check`, the store or the files raise; nothing stays open then."""
        self.check(dictionary)
        mapped = store.open(dictionary.name, version, self.fingerprint.as_dict())
        try:
            _check_aligned(mapped)
            check_numbers(mapped.tensors, mapped.dictionary)
            kv = self._exact(mapped)
            if self.host is None:
                return OpenPrefix(mapped, self._memory(mapped), kv)
            self.host.open(mapped)
            return OpenPrefix(mapped, None, kv, self.host)
        except BaseException:
            mapped.close()
            raise

    def _memory(self, mapped: MappedPrefix) -> PrefixMemory:
        chosen = self.lookup
        return PrefixMemory(
            mapped.dictionary, mapped.tensors, lists_probed=chosen.lists_probed, guard_percent=chosen.guard_percent,
            index=chosen.index,
        )  # fmt: skip

    def _exact(self, mapped: MappedPrefix) -> PrefixKV | None:
        path, digest = mapped.prefix_kv_path, mapped.dictionary.prefix_kv
        return None if path is None or digest is None else PrefixKV(self.map_kv(path, digest), mapped.dictionary)


def _check_aligned(mapped: MappedPrefix) -> None:
    """Raise DataLoss for tensors that no lookup can read where they lie."""
    for name, tensor in mapped.tensors.items():
        if not tensor.flags.aligned:
            raise DataLoss(f"tensor {name} does not begin at a multiple of its item's {tensor.itemsize} bytes")

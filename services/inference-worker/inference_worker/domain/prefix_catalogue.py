"""Which long prefixes there are, which of them are open, and who uses them: the dictionaries of one store.

Owns what is told of each. How versions are chosen, opened and closed is `open_versions`.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from inference_worker.domain.lease import Lease
from inference_worker.domain.open_versions import OpenVersions, Standing
from inference_worker.domain.ports import DictionaryStore, OpeningObserver
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.prefix_opening import PrefixOpener
from inference_worker.domain.resident_versions import PREFIX_WORDS, Choice
from treadle.contract.dictionary import Dictionary
from treadle.contract.errors import NotFound


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """A prefix of the store, as this worker sees it.

    version:      the one that new requests get; empty: its name points nowhere
    tokens:       that it stands for
    open:         whether that version is mapped; mapped_bytes: of all versions that are
    requests:     that use it now, whatever their version
    refusal:      why it cannot be chosen; empty: it can
    fallbacks:    requests that the guard sent to the exact KV since the start
    """

    name: str
    version: str
    tokens: int
    open: bool
    requests: int
    mapped_bytes: int
    refusal: str
    fallbacks: int


class PrefixCatalogue(OpenVersions[Dictionary, OpenPrefix]):
    """See OpenVersions; `opener` checks and opens them. There is no default prefix: a request that names none gets none."""

    def __init__(
        self, store: DictionaryStore, opener: PrefixOpener, *, open_max: int, observer: OpeningObserver | None = None
    ) -> None:
        super().__init__(
            store, opener.check, lambda found: opener.try_open(store, found, observer), PREFIX_WORDS, open_max=open_max,
            observer=observer,
        )  # fmt: skip

    @property
    def mapped_bytes(self) -> int:
        """Bytes of files that are mapped, of all open versions."""
        return sum(memory.mapped_bytes for standing in self.standings()[0] for memory in standing.open)

    @property
    def copied_bytes(self) -> int:
        """Bytes of open versions in this process's own memory."""
        return sum(memory.copied_bytes for standing in self.standings()[0] for memory in standing.open)

    def prefixes(self) -> list[PrefixStatus]:
        """Every prefix by name; where the store has never answered, one without a name that says why."""
        standings, unheard = self.standings()
        statuses = [_status(standing) for standing in standings]
        return [*statuses, PrefixStatus("", "", 0, False, 0, 0, unheard, 0)] if unheard else statuses


class NoPrefixes:
    """Where the worker was told of no store."""

    def take(self, choice: Choice | None) -> Future[Lease[OpenPrefix]]:
        """See OpenVersions: none, or NotFound."""
        if choice is not None and choice.model:
            raise NotFound(f"prefix.name: {choice.model!r} cannot be had, this worker was started without an asm_store")
        waiter: Future[Lease[OpenPrefix]] = Future()
        waiter.set_result(Lease())
        return waiter

    def prefixes(self) -> list[PrefixStatus]:
        """There are none."""
        return []


def _status(standing: Standing[Dictionary, OpenPrefix]) -> PrefixStatus:
    told = standing.current.model if standing.current is not None else None
    return PrefixStatus(
        standing.name, standing.version, told.prefix.tokens if told is not None else 0, standing.memory is not None,
        standing.requests, sum(memory.mapped_bytes for memory in standing.open), standing.refusal, standing.tally,
    )  # fmt: skip

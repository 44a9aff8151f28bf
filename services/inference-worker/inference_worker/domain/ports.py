"""What the domain needs from outside: somebody to answer to, a pool of Engram memories and their rows, a store of prefixes, and somebody who counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference_worker.domain.request import Piece
from treadle.contract.dictionary import Dictionary
from treadle.contract.engram_model import EngramModel
from treadle.contract.errors import TreadleError
from treadle.contract.policy import WaitPolicy
from treadle.contract.windows import Windows

if TYPE_CHECKING:
    from inference_worker.domain.report import StepReport


class Sink(Protocol):
    """Takes one request's answer. Called by whoever runs the engine's steps: must not block."""

    def deliver(self, piece: Piece) -> None:
        """Take the next piece; the one with `finish` is the last."""

    def fail(self, error: Exception) -> None:
        """Take the error that ended the request; nothing comes after it."""


class Observer(Protocol):
    """Counts what the engine does. Called by whoever runs the engine's steps, and by whoever submits."""

    def step(self, report: StepReport) -> None:
        """A step is over."""

    def hinted(self, tokens: int) -> None:
        """Rows of so many prompt tokens are being brought near before their step."""

    def prefix_used(self, outcome: str, lookups: int, lookups_outside: int) -> None:
        """A request with a long prefix is over: dictionary (it answered), exact (the exact KV did) or off_task (degraded)."""

    def ended(self, outcome: str) -> None:
        """A request is over: stop, length, cancelled, deadline, refused, memory_missing, failed."""


class LayerRows(Protocol):
    """Rows of one Engram layer of one step; `treadle.client.engram.LayerRows` fits."""

    @property
    def rows(self) -> NDArray[np.uint8]:
        """[T, C, row_bytes], zero where missing; valid until the next step begins."""

    @property
    def missing(self) -> NDArray[np.bool_] | None:
        """[T, C], True where a row did not come; None: all came."""

    @property
    def in_time(self) -> bool:
        """True if all rows were there when the layer asked."""

    @property
    def stall_seconds(self) -> float:
        """Seconds that the layer waited."""

    @property
    def slack_seconds(self) -> float:
        """Deadline minus completion; negative when late."""

    @property
    def gather_seconds(self) -> float:
        """Seconds from submission to the last row."""

    @property
    def cause(self) -> TreadleError | None:
        """The error that ended the lookup before all rows were there; None: it did not fail, at most it was late."""


class GroupRows(Protocol):
    """What came for one memory at one layer; `treadle.client.engram.GroupRows` fits."""

    @property
    def group(self) -> int:
        """Place of the memory among the step's groups."""

    @property
    def rows(self) -> LayerRows | None:
        """Its rows, or None where they can no longer come, and `error` says why."""

    @property
    def error(self) -> TreadleError | None:
        """What kept them from coming."""


class StepRows(Protocol):
    """The rows of one step; `treadle.client.engram.Step` fits."""

    def group_rows(self, layer: int, policies: Sequence[WaitPolicy]) -> Sequence[GroupRows]:
        """Wait for the rows of a layer, of all groups that have one there, as each group's policy says from now on."""

    def finish(self) -> None:
        """The step is over: what was not asked for is stopped."""


class RowHandle(Protocol):
    """One version of an Engram model whose rows can be had; `treadle.client.engram.EngramHandle` fits."""

    model: EngramModel
    version: str

    @property
    def transport(self) -> str:
        """How its rows come."""

    @property
    def wants_hints(self) -> bool:
        """False where rows are as near as they come."""

    def close(self) -> None:
        """Let go of the version. No step may be using it."""


class Named(Protocol):
    """The manifest of a memory, whatever its kind: an EngramModel, a Dictionary."""

    @property
    def name(self) -> str: ...


ModelT_co = TypeVar("ModelT_co", bound=Named, covariant=True)


class ResidentVersion(Protocol[ModelT_co]):
    """A version that a pool or store holds; `treadle.client.engram.pool_types.ResidentModel` fits."""

    @property
    def model(self) -> ModelT_co:
        """Its manifest."""

    @property
    def version(self) -> str: ...
    @property
    def current(self) -> bool:
        """True for the version of its name that those get who name none."""


class Source(Protocol[ModelT_co]):
    """Where versions of one kind of memory are kept. Called from threads that may wait; raises TreadleErrors."""

    @property
    def address(self) -> str:
        """What it is called in messages."""

    def resident(self) -> Sequence[ResidentVersion[ModelT_co]]:
        """What it holds now. Somebody waits for the answer: it comes within a second or so, or an error does."""


class MemoryPool(Source[EngramModel], Protocol):
    """Where Engram memories are opened. Called from threads that may wait; raises TreadleErrors."""

    def open(self, model: str, version: str) -> RowHandle:
        """Pin a version and make its rows reachable."""

    def read_fusion(self, model: str, version: str) -> bytes:
        """The fusion weights that a version's manifest names."""


class MappedPrefix(Protocol):
    """One version of a dictionary of attention states, mapped; `treadle.client.asm.MappedDictionary` fits."""

    @property
    def dictionary(self) -> Dictionary:
        """Its manifest."""

    @property
    def version(self) -> str: ...
    @property
    def tensors(self) -> Mapping[str, NDArray[Any]]:
        """Views of the mapped file, by name; bf16 comes as uint16. They hold until `close`."""

    @property
    def path(self) -> Path:
        """File of the tensors."""

    @property
    def prefix_kv_path(self) -> Path | None:
        """File of the exact prefix KV beside it; None: none is kept."""

    def close(self) -> None:
        """Let go of the version. Nobody may be looking anything up in it."""


class PrefixHost(Protocol):
    """Another process, which runs the model: it maps what this one has opened. Called from threads that may wait."""

    def open(self, mapped: MappedPrefix) -> None:
        """Map it there too. Raises why it cannot be."""

    def close(self, mapped: MappedPrefix) -> None:
        """It is needed no more. Waits for nothing and raises nothing."""


class DictionaryStore(Source[Dictionary], Protocol):
    """Where dictionaries are opened. Called from threads that may wait; raises TreadleErrors."""

    def open(self, name: str, version: str, expected: Mapping[str, str]) -> MappedPrefix:
        """Hold a version and map it. expected: fields that its fingerprint must have."""


class LayerFigures(Protocol):
    """Figures of one layer since the start; `treadle.client.engram.LayerFigures` fits. Seconds; bytes of rows."""

    @property
    def tickets(self) -> int: ...
    @property
    def tickets_in_time(self) -> int: ...
    @property
    def gather_seconds_p50(self) -> float: ...
    @property
    def gather_seconds_p99(self) -> float: ...
    @property
    def slack_seconds_p50(self) -> float: ...
    @property
    def slack_seconds_p01(self) -> float: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def row_bytes(self) -> int: ...
    @property
    def rows_missing(self) -> int: ...


class Prefetcher(Protocol):
    """Starts looking up all layers of all memories of a step at once; `treadle.client.engram.StepPrefetcher` fits.

    Handles are those that the pool opened: opaque here.
    """

    def begin_groups(self, groups: Sequence[tuple[Any, Windows]], token_count: int) -> StepRows:
        """Start a step of `token_count` tokens, with (handle, its tokens) of each memory; rows of the step before are not valid
        any more."""

    def hint(self, handle: Any, windows: Windows) -> int:
        """Say which tokens steps to come will look up; how many are taken. Any thread; returns at once."""

    def figures(self, handle: Any) -> Mapping[int, LayerFigures]:
        """Figures of a memory by layer. May be called while another thread runs a step."""

    def layer_figures(self) -> Mapping[int, LayerFigures]:
        """Figures of each layer, of all memories together since the start. May be called while another thread runs a step."""


class OpeningObserver(Protocol):
    """Counts the openings of memories, and choices that cannot be had. Called from the threads that open, and from those that ask."""

    def opened(self, outcome: str, seconds: float) -> None:
        """An opening is over: ok, refused (it does not fit the language model) or failed."""

    def choice_refused(self, reason: str) -> None:
        """A request chose in vain: unknown, misfit (made for another language model), full, no_pool or no_store, wrong (no such version)."""

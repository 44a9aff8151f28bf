"""What the domain needs from outside: somebody to answer to, rows of an Engram memory, and somebody who counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_worker.domain.request import Piece
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


class StepRows(Protocol):
    """The rows of one step; `treadle.client.engram.Step` fits."""

    def rows(self, layer: int, policy: WaitPolicy | None = None) -> LayerRows:
        """Wait for the rows of a layer, as the policy says. Raises a TreadleError if they can no longer come."""

    def finish(self) -> None:
        """The step is over: what was not asked for is stopped."""


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
    """Starts looking up all layers of a step at once; `treadle.client.engram.StepPrefetcher` fits."""

    def begin(self, windows: Windows) -> StepRows:
        """Start a step; rows of the step before are not valid any more. Raises a TreadleError if it cannot."""

    def figures(self) -> Mapping[int, LayerFigures]:
        """Figures by layer. May be called while another thread runs a step."""

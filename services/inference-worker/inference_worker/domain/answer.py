"""Whole answers without a thread or an event loop: for benchmarks, tests and scripts that run the steps themselves."""

from __future__ import annotations

from collections.abc import Iterable

from inference_worker.domain.engine import Engine
from inference_worker.domain.errors import StepFailed
from inference_worker.domain.report import StepReport
from inference_worker.domain.request import Piece


class Answer:
    """A Sink that keeps the whole answer: for whoever calls `step` himself."""

    def __init__(self) -> None:
        self.piece = Piece()
        self.error: Exception | None = None

    @property
    def done(self) -> bool:
        """True once the answer is whole or has failed."""
        return self.error is not None or self.piece.finish is not None

    def deliver(self, piece: Piece) -> None:
        """See Sink."""
        self.piece.add(piece)

    def fail(self, error: Exception) -> None:
        """See Sink."""
        self.error = error


def run_until_done(engine: Engine, answers: Iterable[Answer]) -> list[StepReport]:
    """Run steps until every answer is whole or failed; the reports of these steps. Raises StepFailed if the engine has no work left."""
    waiting, reports = list(answers), []
    while not all(answer.done for answer in waiting):
        report = engine.step()
        if report is not None:
            reports.append(report)
        elif not all(answer.done for answer in waiting):
            raise StepFailed("the engine has nothing to do, but an answer is not whole: was it cancelled?")
    return reports

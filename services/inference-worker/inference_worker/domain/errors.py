"""The worker's own errors; everything else it raises is in `treadle.contract.errors`.

TreadleError
├── Unavailable
│   ├── MemoryMissing   rows did not come in time and the request's policy is `fail`   UNAVAILABLE
│   └── Draining        the worker stops and takes no new work                         UNAVAILABLE
├── FingerprintMismatch
│   └── PrefixMisfit    a dictionary was made with another language model              FAILED_PRECONDITION
├── NoVectors           this engine makes no vectors of texts                          FAILED_PRECONDITION
└── StepFailed          our bug: a step raised; its requests end, the engine goes on   INTERNAL
"""

from __future__ import annotations

from treadle.contract.errors import FingerprintMismatch, TreadleError, Unavailable


class MemoryMissing(Unavailable):
    """Rows of a memory were not there within the request's longest wait, and the request asked to fail then."""


class Draining(Unavailable):
    """The worker is stopping: it finishes what it has and takes nothing new."""


class PrefixMisfit(FingerprintMismatch):
    """The dictionary of a prefix was made with another language model, or nothing can be answered behind it; `field` says why."""

    def __init__(self, name: str, cause: FingerprintMismatch) -> None:
        why = "was made with another language model" if cause.field.startswith("model.") else "is none to answer behind"
        self.args = (f"prefix {name!r} {why}: {cause}",)
        self.field = cause.field


class StepFailed(TreadleError):
    """The engine step that this request took part in raised an error; the cause is in the worker's log."""


class NoVectors(TreadleError):
    """The engine makes no vectors of texts; another one may."""

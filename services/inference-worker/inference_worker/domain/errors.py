"""The worker's own errors; everything else it raises is in `treadle.contract.errors`.

TreadleError
├── Unavailable
│   ├── MemoryMissing   rows did not come in time and the request's policy is `fail`   UNAVAILABLE
│   └── Draining        the worker stops and takes no new work                         UNAVAILABLE
└── StepFailed          our bug: a step raised; its requests end, the engine goes on   INTERNAL
"""

from __future__ import annotations

from treadle.contract.errors import TreadleError, Unavailable


class MemoryMissing(Unavailable):
    """Rows of a memory were not there within the request's longest wait, and the request asked to fail then."""


class Draining(Unavailable):
    """The worker is stopping: it finishes what it has and takes nothing new."""


class StepFailed(TreadleError):
    """The engine step that this request took part in raised an error; the cause is in the worker's log."""

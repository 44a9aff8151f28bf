"""The errors a caller of treadle can meet, as plain exceptions.

    TreadleError
    ├── InvalidArgument        bad shape, dtype or field          INVALID_ARGUMENT
    ├── RowOutOfRange          a row id outside its table         OUT_OF_RANGE
    ├── NotFound               unknown model, version or path     NOT_FOUND
    ├── FingerprintMismatch    what it was made for differs       FAILED_PRECONDITION
    ├── ProtocolMismatch       SDK and service do not fit         FAILED_PRECONDITION
    ├── ResourceExhausted      queue, quota or room is used up    RESOURCE_EXHAUSTED
    ├── DeadlineExceeded       it could not be there in time      DEADLINE_EXCEEDED
    ├── Overtaken              a compare-and-set that was lost    ABORTED
    ├── Unavailable            swapping, restarting or draining   UNAVAILABLE
    ├── AccessDenied           no key, or not the right one       UNAUTHENTICATED
    └── DataLoss               a checksum does not fit            DATA_LOSS

Domains raise these; each `server.py` maps them to gRPC codes in one table, and the SDK maps them back.
"""

from __future__ import annotations


class TreadleError(Exception):
    """Base of every error that treadle raises on purpose."""

    origin: str | None = None
    """Name of the class that a service raised, where this error stands for it; None: it was raised in this process."""


class InvalidArgument(TreadleError):
    """A shape, dtype or field is wrong; the message names it. Do not retry."""


class RowOutOfRange(TreadleError):
    """A row id lies outside its table: the caller's hash parameters differ from ours. Nothing was read."""


class NotFound(TreadleError):
    """No such model, version or path; the message lists what there is."""


class FingerprintMismatch(TreadleError):
    """A piece of memory was made for something else than what asks for it; `field` says in what they differ."""

    def __init__(self, field: str, expected: object, actual: object) -> None:
        super().__init__(f"fingerprint field {field!r} differs: expected {expected!r}, got {actual!r}")
        self.field = field


class ProtocolMismatch(TreadleError):
    """The SDK's protocol version does not fit the service's; the message names both."""


class ResourceExhausted(TreadleError):
    """A named limit is reached. `retry_after_seconds` says when to try again; None: only after making room."""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class DeadlineExceeded(TreadleError):
    """The answer could not be there in time. `predicted_finish_seconds` (from the call's start), where known."""

    def __init__(self, message: str, predicted_finish_seconds: float | None = None) -> None:
        super().__init__(message)
        self.predicted_finish_seconds = predicted_finish_seconds


class Overtaken(TreadleError):
    """A compare-and-set was lost: something else is there than was expected; the message names both. Read again, then decide."""


class Unavailable(TreadleError):
    """The service restarts, drains or cannot be reached. Retry soon, with backoff."""


class AccessDenied(TreadleError):
    """The call carried no key, or not the right one."""


class DataLoss(TreadleError):
    """Bytes do not fit their checksum, or a file is torn. They are never served."""

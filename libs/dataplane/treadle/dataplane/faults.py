"""The native side's numbers for what went wrong (src/fault.hpp), as the errors that callers act on."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum

from treadle.contract import (
    AccessDenied,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
)


class Fault(IntEnum):
    """Why a piece, a ticket or a request did not give its rows; the numbers stand in frames and rings."""

    NONE = 0
    DATA_LOSS = 1
    UNAVAILABLE = 2
    NOT_FOUND = 3
    OUT_OF_RANGE = 4
    INVALID = 5
    REFUSED = 6
    LATE = 7
    FORBIDDEN = 8
    MISMATCH = 9
    INTERNAL = 10


_ERRORS: dict[Fault, tuple[Callable[[str], TreadleError], str]] = {
    Fault.DATA_LOSS: (DataLoss, "the bytes of these rows are damaged: truncated, or a checksum does not fit"),
    Fault.UNAVAILABLE: (Unavailable, "the owner of these rows does not answer, or restarts; try again"),
    Fault.NOT_FOUND: (NotFound, "no such version or layer there"),
    Fault.OUT_OF_RANGE: (RowOutOfRange, "a row id lies outside the table, or the owner does not hold that row"),
    Fault.INVALID: (InvalidArgument, "shape, size or field"),
    Fault.REFUSED: (ResourceExhausted, "refused: no room, quota, or it could not have been there in time"),
    Fault.LATE: (DeadlineExceeded, "the deadline passed before the rows were there"),
    Fault.FORBIDDEN: (AccessDenied, "no token, or not the right one"),
    Fault.MISMATCH: (Unavailable, "another version or fingerprint answers there; open the model again"),
}


class NativeFailure(TreadleError):
    """The data plane met a bug of its own; its log has what there is to know."""


def error_of(fault: int, what: str, said: str = "") -> TreadleError:
    """The error that `fault` (not NONE) stands for; `what` names the ticket, owner or request, `said` is the other side's text."""
    try:
        make, text = _ERRORS[Fault(fault)]
    except (KeyError, ValueError):
        return NativeFailure(f"{what}: fault {fault} of the native side")
    if said and fault in (Fault.INVALID, Fault.REFUSED, Fault.FORBIDDEN):  # it names the limit or field, and the cure
        return make(f"{what}: {said}")
    return make(f"{what} ({said}): {text}" if said else f"{what}: {text}")

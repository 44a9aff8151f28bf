"""From domain errors to gRPC statuses: the part of the table that all services share, and how details travel.

Details go into the trailing metadata: `treadle-error` (class name), `treadle-field`, `treadle-retry-after-seconds`,
`treadle-predicted-finish-seconds`. The SDK holds the mirror table.
"""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from treadle.contract import errors

CONTRACT_STATUS: dict[type[Exception], grpc.StatusCode] = {
    errors.InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,  # fix the call
    errors.RowOutOfRange: grpc.StatusCode.OUT_OF_RANGE,  # caller's hash parameters differ from ours
    errors.NotFound: grpc.StatusCode.NOT_FOUND,  # wrong name or version: do not retry
    errors.FingerprintMismatch: grpc.StatusCode.FAILED_PRECONDITION,  # made for something else
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,  # update one side
    errors.ResourceExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,  # slow down, or make room
    errors.DeadlineExceeded: grpc.StatusCode.DEADLINE_EXCEEDED,  # too late
    errors.Overtaken: grpc.StatusCode.ABORTED,  # read again, then decide
    errors.Unavailable: grpc.StatusCode.UNAVAILABLE,  # retry soon, with backoff
    errors.AccessDenied: grpc.StatusCode.UNAUTHENTICATED,  # no key, or not the right one
    errors.DataLoss: grpc.StatusCode.DATA_LOSS,  # corrupt: never served
}


def status_of(error: Exception, table: Mapping[type[Exception], grpc.StatusCode]) -> grpc.StatusCode | None:
    """Code of the nearest class of `error` in `table`; None: not a known error, so our bug."""
    return next((table[cls] for cls in type(error).__mro__ if cls in table), None)


def trailing_details(error: Exception) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that carries the fields of `error` to the SDK."""
    details = [("treadle-error", type(error).__name__)]
    for attribute in ("field", "retry_after_seconds", "predicted_finish_seconds"):
        value = getattr(error, attribute, None)
        if value is not None:
            details.append((f"treadle-{attribute.replace('_', '-')}", str(value)))
    return tuple(details)

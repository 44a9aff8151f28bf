"""From gRPC statuses back to the errors of `treadle.contract`: the mirror of each service's table.

Raised always `from` the RpcError, so that the transport's own details stay in the traceback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import grpc

from treadle.contract import errors

_BY_CODE: dict[grpc.StatusCode, type[errors.TreadleError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidArgument,
    grpc.StatusCode.OUT_OF_RANGE: errors.RowOutOfRange,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.ResourceExhausted,
    grpc.StatusCode.ABORTED: errors.Overtaken,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,  # by somebody else, in the service's own words
    grpc.StatusCode.UNAUTHENTICATED: errors.AccessDenied,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.UNIMPLEMENTED: errors.ProtocolMismatch,
}


class InternalError(errors.TreadleError):
    """The service met a bug of its own; its log has the details."""


def from_rpc(error: grpc.RpcError, address: str) -> errors.TreadleError:
    """The error that `error` stands for, with the service's name for it as `origin`.

    `address` is named where the caller must know who did not answer.
    """
    metadata = cast("Iterable[tuple[str, str | bytes]]", error.trailing_metadata() or ())
    details = {name: value for name, value in metadata if isinstance(value, str)}
    mirrored = _mirrored(error.code(), error.details() or "", details, address)
    mirrored.origin = details.get("treadle-error")
    return mirrored


def _mirrored(code: grpc.StatusCode, text: str, details: dict[str, str], address: str) -> errors.TreadleError:
    if code is grpc.StatusCode.FAILED_PRECONDITION and "treadle-field" in details:
        return _with_text(errors.FingerprintMismatch(details["treadle-field"], None, None), text)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return errors.ProtocolMismatch(text)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return errors.ResourceExhausted(text, _number(details, "treadle-retry-after-seconds"))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{address}: {text}", _number(details, "treadle-predicted-finish-seconds"))
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED) and "treadle-error" not in details:
        return errors.Unavailable(f"{address} does not answer: {text}")
    make: Callable[[str], errors.TreadleError] = _BY_CODE.get(code, InternalError)
    return make(text)


def _number(details: dict[str, str], name: str) -> float | None:
    try:
        return float(details[name])
    except (KeyError, ValueError):
        return None


def _with_text(error: errors.FingerprintMismatch, text: str) -> errors.FingerprintMismatch:
    error.args = (text,)  # the service's words hold the values, which do not travel one by one
    return error

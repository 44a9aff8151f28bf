"""A long prefix on the wire: the choice of a request, what a worker says of its prefixes, and its refusals."""

from __future__ import annotations

from inference_gateway.domain.errors import PrefixDamaged, RequestRefused
from inference_gateway.domain.prefixes import FIELD, Prefix, PrefixChoice
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound, TreadleError
from treadle.inference.v1 import worker_pb2

_BEGINS = "prefix"  # how a worker begins what it says of a prefix: `prefix.name: …`, `prefix 'NAME' …`


def prefix_message(choice: PrefixChoice | None) -> worker_pb2.PrefixChoice | None:
    """None, an absent field: none."""
    return None if choice is None else worker_pb2.PrefixChoice(name=choice.name, version=choice.version)


def prefix_error(choice: PrefixChoice | None, error: TreadleError) -> TreadleError | None:
    """What a worker's refusal of a prefix is to the caller; None: it is not about one."""
    if choice is None or not str(error).startswith(_BEGINS):
        return None
    if isinstance(error, DataLoss):
        return PrefixDamaged(f"'{FIELD}': the worker cannot use it: {error}")
    codes = {NotFound: "prefix_not_found", FingerprintMismatch: "prefix_mismatch", InvalidArgument: "invalid_value"}
    code = next((code for kind, code in codes.items() if isinstance(error, kind)), None)
    return None if code is None else RequestRefused(f"'{FIELD}': {error}", param=FIELD, code=code)


def prefixes_of(response: worker_pb2.StatusResponse) -> tuple[Prefix, ...]:
    """What a worker says of its prefixes."""
    return tuple(
        Prefix(
            item.name, item.version, item.prefix_tokens, item.open, item.requests, item.mapped_bytes, item.fallbacks, item.refusal
        )
        for item in response.prefixes
    )

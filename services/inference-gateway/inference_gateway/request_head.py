"""How large the head of a request may be: lines and bytes of its headers, its target among them.

Owns the check of a head that came whole. One that is too large before it is whole is refused by the connection (head_timeout).
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

from inference_gateway.domain.errors import HeadTooLarge


@dataclass(frozen=True, slots=True)
class HeadLimits:
    """Named limits of a head; both are settings."""

    headers_max: int = 100
    header_bytes_max: int = 16384


def check_head(scope: Scope, limits: HeadLimits) -> None:
    """Raise HeadTooLarge for a request whose head is above a limit."""
    headers = scope["headers"]
    if len(headers) > limits.headers_max:
        raise HeadTooLarge(f"{len(headers)} header lines; {limits.headers_max} are taken, the limit headers_max")
    target = len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if target + sum(len(name) + len(value) for name, value in headers) > limits.header_bytes_max:
        raise HeadTooLarge(f"target and headers have more than {limits.header_bytes_max} bytes, the limit header_bytes_max")

"""How a lookup travels, and what the caller wants done when rows are not there in time."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from treadle.contract.errors import InvalidArgument

WAIT_SECONDS_MAX = 30.0  # the longest wait anyone may name: a missing row never hangs a token


class Transport(StrEnum):
    """Where the rows of a lookup come from; the metric label of the same name."""

    LOCAL = "local"  # a private copy in this process
    MAPPED = "mapped"  # the host's one copy, mapped read-only
    RING = "ring"  # a shared-memory ring to the host's pool
    SOCKET = "socket"  # the native data plane of a pool on this or another host
    MOONCAKE = "mooncake"  # Mooncake's Transfer Engine, gathered at the owner
    RPC = "rpc"  # gRPC, the compatible door
    FAKE = "fake"  # tests


class TransportChoice(StrEnum):
    """What may be asked for, in the SDK, `treadle up` and a worker alike. auto: mapped, else ring, else socket, else rpc."""

    AUTO = "auto"
    MAPPED = "mapped"
    LOCAL = "local"
    RING = "ring"
    SOCKET = "socket"
    MOONCAKE = "mooncake"
    RPC = "rpc"


class Late(StrEnum):
    """What to do with rows that have not come when the longest wait is over."""

    MASK = "mask"  # zero them, say which; the request is degraded
    FAIL = "fail"  # raise DeadlineExceeded


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Wait for rows up to `wait_seconds_max` past the moment they are asked for, then act as `late` says."""

    wait_seconds_max: float = 1.0
    late: Late = Late.MASK

    def __post_init__(self) -> None:
        if not 0 <= self.wait_seconds_max <= WAIT_SECONDS_MAX:
            raise InvalidArgument(f"wait_seconds_max: 0 to {WAIT_SECONDS_MAX}, got {self.wait_seconds_max}")

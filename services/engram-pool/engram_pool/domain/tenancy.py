"""Who asks for rows, what each caller may have, and the bandwidth that other traffic reserves: what gathering needs of them.

Tenants and queues of the data plane fit; `NoReserve` stands where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from treadle.contract import Unavailable


class TenantFigures(Protocol):
    """What one tenant has had since the start. refused: by reason; rows, row_bytes: by tier; slack: counts of a histogram."""

    @property
    def name(self) -> str: ...
    @property
    def admitted(self) -> int: ...
    @property
    def late(self) -> int: ...
    @property
    def refused(self) -> Mapping[str, int]: ...
    @property
    def rows(self) -> Mapping[str, int]: ...
    @property
    def row_bytes(self) -> Mapping[str, int]: ...
    @property
    def slack(self) -> Sequence[int]: ...
    @property
    def slack_seconds(self) -> float: ...


class TenantLimits(Protocol):
    """What one tenant may have."""

    @property
    def name(self) -> str: ...
    @property
    def rows_per_second_max(self) -> int: ...
    @property
    def admin(self) -> bool:
        """Whether it may change what all tenants use: load, remove, promote, verify, reserve."""


class Tenants(Protocol):
    """All tenants, by index. Any thread."""

    @property
    def limits(self) -> Sequence[TenantLimits]:
        """By index; 0 is whoever belongs to none."""

    def find(self, token: str | None, /) -> int:
        """Index of the tenant that shows this token. Raises AccessDenied for nobody's, where tokens are asked for."""

    def take(self, tenant: int, rows: int, row_bytes: int, /) -> None:
        """Take a request off its quotas. Raises ResourceExhausted, saying when to try again."""

    def served(self, tenant: int, rows: int, row_bytes: int, slack_seconds: float | None, /) -> None:
        """Count rows that were handed out. slack_seconds: None: they did not all come."""

    def figures(self, tenant: int, /) -> TenantFigures:
        """What it has had."""


class Reserved(Protocol):
    """Bytes copied a second: kept for others, and left to rows (0: not measured)."""

    @property
    def reserved_bytes_per_second(self) -> int: ...
    @property
    def left_bytes_per_second(self) -> int: ...


class Bandwidth(Protocol):
    """This host's memory, as rows may use it. Any thread."""

    def reserve(self, name: str, bytes_per_second: int, seconds: float, /) -> Reserved:
        """Keep some of it free for a while; 0 gives it back. The first of several measures, some 30 ms.

        Raises InvalidArgument, ResourceExhausted where rows would have too little.
        """

    def reserved(self) -> Reserved:
        """As it is now."""

    def pace_seconds(self, byte_count: int, /) -> float:
        """How long to wait before so many bytes are gathered."""


class _Nothing:
    reserved_bytes_per_second = left_bytes_per_second = 0


class NoReserve:
    """The Bandwidth of a pool without the native data plane."""

    def reserve(self, name: str, bytes_per_second: int, seconds: float) -> Reserved:
        """See Bandwidth."""
        raise Unavailable(
            "reserve: this pool runs without the native data plane, which paces rows; build it, then restart the pool"
        )

    def reserved(self) -> Reserved:
        """See Bandwidth."""
        return _Nothing()

    def pace_seconds(self, byte_count: int) -> float:
        """See Bandwidth."""
        return 0.0

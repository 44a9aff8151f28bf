"""Who asks, what each may have and what each has had: quotas, shares of an overloaded queue, counters.

One `Tenants` serves every door of a process: queues take from it, and so does whoever gathers on its own. Owns no token in clear,
only digests. Does not decide about deadlines (`admission`).
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from treadle.contract import AccessDenied, InvalidArgument
from treadle.dataplane.admission import NO_DEADLINE, Reason, Tier, Verdict, refusal
from treadle.dataplane.extension import IMPLEMENTATION, Implementation, native_module
from treadle.dataplane.faults import Fault

TENANTS_MAX = 256  # tokens are compared one by one, with every request
BURST_SECONDS = 0.25  # of a quota that may come at once
SHARE_NS = 100_000_000  # work granted is forgotten with this time constant
OVERLOAD_NS = 1_000_000_000  # how long after a refusal for want of time the load counts as too much
ACTIVE_PART = 0.001  # of a worker's time: who has had less is not among those who share
YIELD_NS_MIN = 1_000_000
SLACK_SECONDS = (-0.1, -0.01, -0.001, 0.0, 0.0001, 0.001, 0.01, 0.1, 1.0)  # bounds of the histogram; negative: late
NOBODY = 0  # index of whoever shows a token that belongs to no tenant, or none where none is asked for


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may have.

    share:    of the time of an overloaded queue, against the shares of the others who are active
    priority: of those over their share the lowest is refused first
    rows_per_second_max, bytes_per_second_max: quotas; 0: none
    admin:    may change what all tenants use; for whoever asks `Tenants` about it, the data plane changes nothing
    """

    name: str
    share: float = 1.0
    priority: int = 0
    rows_per_second_max: int = 0
    bytes_per_second_max: int = 0
    admin: bool = False

    def __post_init__(self) -> None:
        if not self.name or not 0 < self.share < math.inf or min(self.rows_per_second_max, self.bytes_per_second_max) < 0:
            raise InvalidArgument(f"tenant {self.name!r}: a name, a share above 0 and quotas of at least 0 expected")


@dataclass(frozen=True, slots=True)
class TenantFigures:
    """Since the start. refused: by reason; rows, row_bytes: by tier; slack: a count for each of SLACK_SECONDS and one beyond."""

    name: str
    admitted: int
    late: int
    refused: Mapping[str, int]
    rows: Mapping[str, int]
    row_bytes: Mapping[str, int]
    slack: Sequence[int]
    slack_seconds: float


class Ledger(Protocol):
    """Counts and quotas behind `Tenants`, native or in Python."""

    def find(self, token: bytes, /) -> int: ...
    def take(self, tenant: int, rows: int, byte_count: int, work_ns: int, workers: int, now_ns: int, /) -> Any: ...
    def overloaded(self, now_ns: int, /) -> None: ...
    def count_refused(self, tenant: int, reason: int, /) -> None: ...
    def count_served(self, tenant: int, tier: int, rows: int, byte_count: int, slack_ns: int, /) -> None: ...
    def counters(self, tenant: int, /) -> dict[str, Any]: ...


class Tenants:
    """The tenants of a process. Any thread.

    limits: index 1 and up; index 0 (NOBODY) is made here, without limits and as admin: it is the process's own
    tokens: sha256 of a token -> index of its tenant; none: callers need not show any
    implementation: for comparisons; a queue takes tenants of its own implementation
    """

    def __init__(
        self, limits: Sequence[TenantLimits] = (), tokens: Mapping[bytes, int] | None = None, *,
        implementation: Implementation = IMPLEMENTATION,
    ) -> None:  # fmt: skip
        self.limits = (TenantLimits("nobody", admin=True), *limits)
        if len(self.limits) > TENANTS_MAX + 1 or len({tenant.name for tenant in self.limits}) != len(self.limits):
            raise InvalidArgument(f"tenants: at most {TENANTS_MAX} of different names, and none called nobody")
        self.tokens = dict(tokens or {})
        if any(len(token) != 32 or not 0 <= index < len(self.limits) for token, index in self.tokens.items()):
            raise InvalidArgument("tokens: a sha256 of 32 bytes and the index of a tenant expected")
        self.ledger = _make_ledger(implementation, self.limits, self.tokens)

    def find(self, token: str | None) -> int:
        """Index of the tenant that shows this token. Raises AccessDenied for nobody's, where tokens are asked for."""
        digest = hashlib.sha256(token.encode()).digest() if token else bytes(32)
        index: int = self.ledger.find(digest)
        if index < 0:
            raise AccessDenied("show a token that this pool knows")
        return index

    def take(self, tenant: int, rows: int, row_bytes: int) -> None:
        """Take a request off the tenant's quotas. Raises ResourceExhausted, saying when to try again."""
        now_ns = time.monotonic_ns()
        verdict = self.ledger.take(tenant, rows, rows * row_bytes, 0, 1, now_ns)
        if verdict.fault:
            self.ledger.count_refused(tenant, verdict.reason)
            raise refusal(verdict, f"tenant {self.limits[tenant].name}", now_ns, NO_DEADLINE)

    def served(self, tenant: int, rows: int, row_bytes: int, slack_seconds: float | None) -> None:
        """Count rows that were handed out beside a queue. slack_seconds: None: there was no deadline, or they did not all come."""
        slack_ns = NO_DEADLINE if slack_seconds is None else round(slack_seconds * 1e9)
        self.ledger.count_served(tenant, Tier.MEMORY, rows, rows * row_bytes, slack_ns)

    def figures(self, tenant: int) -> TenantFigures:
        """What one tenant has had."""
        now = self.ledger.counters(tenant)
        return TenantFigures(
            self.limits[tenant].name, now["admitted"], now["late"],
            {reason.name.lower(): now["refused"][reason] for reason in Reason if reason},
            {tier.name.lower(): now["rows"][tier] for tier in Tier}, {tier.name.lower(): now["bytes"][tier] for tier in Tier},
            list(now["slack"]), now["slack_seconds"],
        )  # fmt: skip


class PythonLedger:
    """The ledger in Python: the same answers as src/tenants.hpp."""

    def __init__(self, limits: Sequence[TenantLimits], tokens: Mapping[bytes, int]) -> None:
        self._limits, self._tokens, self._lock = limits, dict(tokens), threading.Lock()
        self._states = [_State() for _ in limits]
        self._decayed_ns = self._overloaded_until_ns = 0

    def find(self, token: bytes) -> int:
        """Index; -1: nobody's. Digests are compared, not tokens: what their order leaks says nothing of a token."""
        return self._tokens.get(token, -1) if self._tokens else NOBODY

    def take(self, tenant: int, rows: int, byte_count: int, work_ns: int, workers: int, now_ns: int) -> Verdict:
        """Take off the quotas and grant `work_ns` of the workers' time (0: quotas only), or neither."""
        with self._lock:
            limits, state = self._limits[tenant], self._states[tenant]
            wait_ns = max(
                state.rows.wait_ns(limits.rows_per_second_max, now_ns), state.bytes.wait_ns(limits.bytes_per_second_max, now_ns)
            )
            if wait_ns > 0:
                return Verdict(Fault.REFUSED, 0, wait_ns, Reason.QUOTA)
            if len(self._limits) > 1 and work_ns > 0:
                self._decay(now_ns)
                yields_ns = self._yields_for_ns(tenant, work_ns, workers) if now_ns < self._overloaded_until_ns else 0
                if yields_ns > 0:
                    return Verdict(Fault.REFUSED, 0, yields_ns, Reason.SHARE)
                state.granted_ns += work_ns
            state.rows.take(limits.rows_per_second_max, rows)
            state.bytes.take(limits.bytes_per_second_max, byte_count)
            state.admitted += 1
            return Verdict()

    def overloaded(self, now_ns: int) -> None:
        """A ticket was refused for want of time that an idle queue would have had."""
        with self._lock:
            self._overloaded_until_ns = now_ns + OVERLOAD_NS

    def count_refused(self, tenant: int, reason: int) -> None:
        """Count a refusal."""
        with self._lock:
            self._states[tenant].refused[reason] += 1

    def count_served(self, tenant: int, tier: int, rows: int, byte_count: int, slack_ns: int) -> None:
        """Count rows. slack_ns NO_DEADLINE: there was none."""
        with self._lock:
            state = self._states[tenant]
            state.rows_served[tier] += rows
            state.bytes_served[tier] += byte_count
            if slack_ns == NO_DEADLINE:
                return
            seconds = slack_ns / 1e9
            state.late += slack_ns < 0
            state.slack_seconds += seconds
            state.slack[next((at for at, bound in enumerate(SLACK_SECONDS) if seconds <= bound), len(SLACK_SECONDS))] += 1

    def counters(self, tenant: int) -> dict[str, Any]:
        """Since the start."""
        with self._lock:
            state = self._states[tenant]
            return {
                "admitted": state.admitted, "late": state.late, "refused": list(state.refused), "rows": list(state.rows_served),
                "bytes": list(state.bytes_served), "slack": list(state.slack), "slack_seconds": state.slack_seconds,
            }  # fmt: skip

    def _decay(self, now_ns: int) -> None:
        kept = math.exp(-max(0, now_ns - self._decayed_ns) / SHARE_NS)
        for state in self._states:
            state.granted_ns *= kept
        self._decayed_ns = now_ns

    def _yields_for_ns(self, tenant: int, work_ns: int, workers: int) -> int:
        capacity, granted_ns = float(SHARE_NS * workers), self._states[tenant].granted_ns
        active = [state.granted_ns > capacity * ACTIVE_PART for state in self._states]
        shares = sum(limits.share for at, limits in enumerate(self._limits) if active[at] or at == tenant)

        def entitled_ns(index: int) -> float:
            return capacity * self._limits[index].share / shares

        over_ns = granted_ns + work_ns - entitled_ns(tenant)
        others = [at for at in range(len(self._limits)) if active[at] and at != tenant]
        lower = (at for at in others if self._limits[at].priority < self._limits[tenant].priority)
        if over_ns <= 0 or not others or any(self._states[at].granted_ns > entitled_ns(at) for at in lower):
            return 0
        return max(YIELD_NS_MIN, int(SHARE_NS * math.log1p(over_ns / max(1.0, granted_ns))))


class _Bucket:
    """A quota: what is owed beyond its rate."""

    def __init__(self) -> None:
        self.owed, self._at_ns = 0.0, 0

    def wait_ns(self, rate: int, now_ns: int) -> int:
        if rate == 0:
            return 0
        a_ns = rate / 1e9
        self.owed = max(0.0, self.owed - a_ns * max(0, now_ns - self._at_ns))
        self._at_ns = now_ns
        return int(max(0.0, math.ceil((self.owed - rate * BURST_SECONDS) / a_ns)))

    def take(self, rate: int, count: int) -> None:
        self.owed += count if rate else 0.0


class _State:
    def __init__(self) -> None:
        self.rows, self.bytes, self.granted_ns = _Bucket(), _Bucket(), 0.0
        self.admitted = self.late = 0
        self.refused, self.slack, self.slack_seconds = [0] * len(Reason), [0] * (len(SLACK_SECONDS) + 1), 0.0
        self.rows_served, self.bytes_served = [0] * len(Tier), [0] * len(Tier)


def _make_ledger(implementation: Implementation, limits: Sequence[TenantLimits], tokens: Mapping[bytes, int]) -> Ledger:
    if implementation == "python":
        return PythonLedger(limits, tokens)
    rows = [(t.name, t.share, t.priority, t.rows_per_second_max, t.bytes_per_second_max) for t in limits]
    made: Ledger = native_module().Tenants(rows, list(tokens.items()))
    return made

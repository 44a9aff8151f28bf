"""Quotas, shares, priorities and counters of tenants: the native ledger and the one in Python answer alike."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.contract import AccessDenied, Deadline, InvalidArgument, ResourceExhausted
from treadle.dataplane import IMPLEMENTATION, NOBODY, DeadlineQueue, Implementation, TenantLimits, Tenants, Tier
from treadle.dataplane.admission import NO_DEADLINE, Reason
from treadle.dataplane.tenants import OVERLOAD_NS, SHARE_NS

LIMITS = (
    TenantLimits("a", share=1.0),
    TenantLimits("b", share=3.0, priority=1),
    TenantLimits("quick", rows_per_second_max=1000, bytes_per_second_max=10**6),
)
A, B, QUICK = 1, 2, 3
MS = 1_000_000
needs_native = pytest.mark.skipif(
    IMPLEMENTATION != "native", reason="the native extension was not built: pip install needs a C++20 compiler"
)


@pytest.fixture(params=[pytest.param("native", marks=needs_native), "python"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    chosen: Implementation = request.param
    return chosen


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def test_a_token_names_its_tenant_and_a_strangers_is_refused(implementation: Implementation) -> None:
    tenants = Tenants(LIMITS, {digest("of a"): A, digest("of b"): B, digest("key"): NOBODY}, implementation=implementation)
    assert [tenants.find(token) for token in ("of a", "of b", "key")] == [A, B, NOBODY]
    for token in ("of c", "", None):
        with pytest.raises(AccessDenied):
            tenants.find(token)
    assert Tenants(implementation=implementation).find(None) == NOBODY, "where nobody needs a token"


def test_a_quota_lets_a_burst_pass_then_says_when_to_come_again(implementation: Implementation) -> None:
    ledger = Tenants(LIMITS, implementation=implementation).ledger
    assert not ledger.take(QUICK, 200, 0, 0, 1, 0).fault
    assert not ledger.take(QUICK, 300, 0, 0, 1, 0).fault  # beyond what is left of the burst of 250: passes once
    refused = ledger.take(QUICK, 1, 0, 0, 1, 0)
    assert refused.reason == Reason.QUOTA
    assert refused.retry_after_ns == 250 * MS
    assert ledger.take(QUICK, 1, 0, 0, 1, 249 * MS).fault
    assert not ledger.take(QUICK, 1, 0, 0, 1, 251 * MS).fault
    assert ledger.take(QUICK, 0, 10**6, 0, 1, 10_000 * MS).fault == 0
    assert ledger.take(QUICK, 0, 1, 0, 1, 10_000 * MS).reason == Reason.QUOTA, "bytes have a quota of their own"


def test_over_seconds_a_quota_is_what_passes(implementation: Implementation) -> None:
    ledger = Tenants(LIMITS, implementation=implementation).ledger
    passed = sum(16 for at_ms in range(10_000) if not ledger.take(QUICK, 16, 0, 0, 1, at_ms * MS).fault)
    assert passed == pytest.approx(10_000, rel=0.03)


def offer(ledger, tenant: int, work_ns: int, now_ns: int) -> bool:  # type: ignore[no-untyped-def]  # noqa: ANN001
    return not ledger.take(tenant, 1, 1, work_ns, 1, now_ns).fault


def test_shares_act_only_while_the_load_is_too_much(implementation: Implementation) -> None:
    ledger = Tenants(LIMITS, implementation=implementation).ledger
    offer(ledger, B, MS, 0)
    assert all(offer(ledger, A, MS, at * MS) for at in range(200)), "alone it may have all there is"
    ledger.overloaded(200 * MS)
    offer(ledger, B, MS, 200 * MS)
    assert not offer(ledger, A, MS, 200 * MS)
    assert offer(ledger, A, MS, 200 * MS + OVERLOAD_NS), "the load is over"


def test_when_the_load_is_too_much_each_tenant_gets_its_share(implementation: Implementation) -> None:
    ledger = Tenants((TenantLimits("a", share=1.0), TenantLimits("b", share=3.0)), implementation=implementation).ledger
    granted = {1: 0, 2: 0}
    for at in range(3000):  # both offer all the time of the one worker
        ledger.overloaded(at * MS)
        for tenant in granted:
            granted[tenant] += offer(ledger, tenant, MS, at * MS)
    assert granted[1] / 3000 == pytest.approx(0.25, rel=0.1)
    assert granted[2] / 3000 == pytest.approx(0.75, rel=0.1)


def test_of_those_over_their_share_the_lowest_priority_is_refused_first(implementation: Implementation) -> None:
    limits = (TenantLimits("low", priority=0), TenantLimits("high", priority=5))
    ledger = Tenants(limits, implementation=implementation).ledger
    for _ in range(100):
        offer(ledger, 1, MS, 0)
        offer(ledger, 2, MS, 0)
    ledger.overloaded(0)
    assert not offer(ledger, 1, MS, 0)
    assert offer(ledger, 2, MS, 0), "over its share, but so is the lower one"
    later = SHARE_NS  # both have been forgotten by a third; low keeps still, high asks on
    ledger.overloaded(later)
    for _ in range(20):
        offer(ledger, 2, MS, later)
    refused = ledger.take(2, 1, 1, MS, 1, later)
    assert refused.reason == Reason.SHARE, "the lower one is within its share now"
    assert 0 < refused.retry_after_ns < 2 * SHARE_NS


operations = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "overloaded", "served", "refused"]), st.integers(0, 3), st.integers(0, 5000),
        st.integers(0, 20 * MS), st.integers(0, 50 * MS),
    ),
    max_size=60,
)  # fmt: skip


@needs_native
@settings(max_examples=150, deadline=None)
@given(operations)
def test_both_ledgers_answer_alike(steps: list[tuple[str, int, int, int, int]]) -> None:
    native, python = (Tenants(LIMITS, implementation=chosen).ledger for chosen in ("native", "python"))
    now_ns = 1
    for what, tenant, rows, work_ns, passed_ns in steps:
        now_ns += passed_ns
        if what == "take":
            answers = [ledger.take(tenant, rows, rows * 320, work_ns, 2, now_ns) for ledger in (native, python)]
            assert answers[0].reason == answers[1].reason
            assert answers[0].retry_after_ns == pytest.approx(answers[1].retry_after_ns, abs=2)
        for ledger in (native, python):
            if what == "overloaded":
                ledger.overloaded(now_ns)
            elif what == "served":
                ledger.count_served(tenant, Tier.DISK, rows, rows * 320, work_ns - 10 * MS if rows % 5 else NO_DEADLINE)
            elif what == "refused":
                ledger.count_refused(tenant, Reason.LATE)
    for tenant in range(4):
        mine, theirs = native.counters(tenant), python.counters(tenant)
        assert mine.pop("slack_seconds") == pytest.approx(theirs.pop("slack_seconds"))
        assert {name: list(value) if isinstance(value, list | tuple) else value for name, value in mine.items()} == theirs


def test_a_queue_takes_tickets_off_their_tenants_quotas(implementation: Implementation) -> None:
    limits = (*LIMITS[:2], TenantLimits("quick", rows_per_second_max=10))  # minutes until it may again, whatever comes between
    tenants = Tenants(limits, implementation=implementation)
    table, rows = np.zeros((10, 64), np.uint8), np.zeros(2000, np.int64)
    with DeadlineQueue(tenants=tenants, implementation=implementation) as queue:
        out = np.zeros((2000, 64), np.uint8)
        assert queue.submit_gather(table, rows, out, Deadline.after(1.0), QUICK).wait(10)
        with pytest.raises(ResourceExhausted, match="quota") as refused:
            queue.submit_gather(table, rows, out, Deadline.after(1.0), QUICK)
        assert refused.value.retry_after_seconds == pytest.approx(199.75, abs=30)
        assert queue.submit_gather(table, rows, out, Deadline.after(1.0), A).wait(10), "the others have theirs"
        with pytest.raises(InvalidArgument, match="tenant"):
            queue.submit_gather(table, rows, out, Deadline.after(1.0), 4)
    figures = tenants.figures(QUICK)
    assert (figures.name, figures.admitted, figures.rows["memory"], figures.refused["quota"]) == ("quick", 1, 2000, 1)


@pytest.mark.parametrize("wrong", [{"share": 0.0}, {"rows_per_second_max": -1}, {"name": ""}])
def test_limits_that_make_no_sense_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="tenant"):
        TenantLimits(**{"name": "a", **wrong})  # type: ignore[arg-type]


def test_two_tenants_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="different names"):
        Tenants((TenantLimits("a"), TenantLimits("a")))

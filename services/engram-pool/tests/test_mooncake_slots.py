"""Slots of the mooncake door: leases end, generations protect, nothing queues."""

from __future__ import annotations

import numpy as np
import pytest

from engram_pool.adapters.mooncake_slots import SlotRing
from treadle.contract import ResourceExhausted


@pytest.fixture
def ring() -> SlotRing:
    return SlotRing(np.zeros(2 * 4096, dtype=np.uint8), 4096)


def test_a_released_slot_is_lent_again_and_a_third_caller_is_told_when_to_come(ring: SlotRing) -> None:
    first, second = ring.take(), ring.take()
    assert {first, second} == {0, 1}
    generation = ring.lend(first, 60)
    with pytest.raises(ResourceExhausted, match="all 2 slots") as refused:
        ring.take()
    assert refused.value.retry_after_seconds is not None
    assert ring.release(first, generation)
    assert ring.take() == first
    assert ring.in_use == 2


def test_a_slot_whose_lease_ended_goes_to_the_next_and_its_old_holder_cannot_release_it(ring: SlotRing) -> None:
    late, _ = ring.take(), ring.take()
    old = ring.lend(late, 0)
    assert ring.take() == late
    assert ring.leases_expired == 1
    new = ring.lend(late, 60)
    assert new != old
    assert not ring.release(late, old)
    assert ring.release(late, new)
    assert not ring.release(late, new)


def test_a_slot_that_is_being_filled_is_nobody_elses_however_long_it_takes(ring: SlotRing) -> None:
    taken = {ring.take(), ring.take()}
    with pytest.raises(ResourceExhausted):
        ring.take()
    ring.give_back(taken.pop())
    assert ring.in_use == 1


def test_views_do_not_overlap(ring: SlotRing) -> None:
    ring.view(0, 4096)[:] = 1
    ring.view(1, 4096)[:] = 2
    assert int(ring.view(0, 4096).max()) == 1
    assert ring.address(1) - ring.address(0) == 4096

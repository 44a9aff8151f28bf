"""How long a memory is waited for that did not answer before, with a clock of the test's; and that steps keep to it."""

from __future__ import annotations

import hashlib
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.client.engram import StepPrefetcher, fake_handle
from treadle.client.engram.patience import GIVEN_UP_SECONDS, IN_VAIN_SECONDS_MAX, PROBE_SECONDS, Patience
from treadle.contract import EngramModel, RowLayout, WaitPolicy, Windows
from treadle.contract.families import demo_model


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def patience(clock: Clock) -> Patience:
    return Patience(clock)


def test_a_memory_that_answers_is_waited_for_as_the_policy_says(patience: Patience) -> None:
    for _ in range(100):
        assert patience.allowed_seconds(1.0) == 1.0
        patience.waited(0.9, in_vain=False)


def test_waits_in_vain_are_few_however_many_layers_ask(patience: Patience) -> None:
    waited = 0.0
    for _ in range(50):
        seconds = patience.allowed_seconds(1.0)
        waited += seconds
        patience.waited(seconds, in_vain=True)
    assert waited == pytest.approx(IN_VAIN_SECONDS_MAX + 47 * GIVEN_UP_SECONDS)


def test_rows_that_come_again_are_waited_for_as_before(patience: Patience) -> None:
    patience.waited(IN_VAIN_SECONDS_MAX, in_vain=True)
    assert patience.given_up
    patience.waited(0.001, in_vain=False)
    assert patience.allowed_seconds(1.0) == 1.0


def test_a_memory_that_is_well_and_slow_is_found_by_a_probe(patience: Patience, clock: Clock) -> None:
    patience.waited(IN_VAIN_SECONDS_MAX, in_vain=True)
    assert patience.allowed_seconds(1.0) == GIVEN_UP_SECONDS
    clock.now += PROBE_SECONDS
    assert [patience.allowed_seconds(1.0) for _ in range(3)] == [1.0, GIVEN_UP_SECONDS, GIVEN_UP_SECONDS]


def test_no_wait_is_longer_than_the_policy_says(patience: Patience, clock: Clock) -> None:
    patience.waited(IN_VAIN_SECONDS_MAX, in_vain=True)
    assert patience.allowed_seconds(0.0) == 0.0
    clock.now += PROBE_SECONDS
    assert patience.allowed_seconds(0.0) == 0.0


def tiny() -> tuple[EngramModel, NDArray[np.int32]]:
    token_map = np.arange(50, dtype=np.int32)
    model = demo_model(
        "tiny",
        layers=(1, 2),
        token_map=hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest(),
        compressed_vocab_size=50,
        pad_id=2,
        prime_base=101,
        heads=2,
        row=RowLayout(32, 16, "bf16"),
    )
    return model, token_map


def test_steps_with_a_memory_that_never_answers_lose_a_few_seconds_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.client.engram.patience.IN_VAIN_SECONDS_MAX", 0.4)
    model, token_map = tiny()
    rows = {layer: np.zeros((model.rows_hashed(layer), 32), dtype=np.uint8) for layer in model.layers}
    windows = Windows(tokens=np.array([3]), starts=np.array([0, 1], dtype=np.int32), lookback=np.full((1, model.order_max - 1), -1))
    with fake_handle(model, token_map, rows, delay_seconds=30.0) as handle:
        prefetcher = StepPrefetcher(handle, policy=WaitPolicy(0.25))
        begun = time.monotonic()
        for _ in range(10):
            step = prefetcher.begin(windows)
            for layer in model.layers:
                missing = step.rows(layer).missing
                assert missing is not None
                assert missing.all()
            step.finish()
        # Two waits of 0.25 s, and 18 short ones: full waits at each would be 5 s.
        assert time.monotonic() - begun < 4.0

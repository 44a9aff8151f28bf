"""Choosing tokens: bias and penalties, greedy, temperature, min_p, top_k, nucleus, seeds; log-probabilities."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from inference_worker.domain.request import Sampling
from inference_worker.domain.sampling import NUCLEUS_FIRST, candidates, choose, generator_of, logprobs, nucleus, steered
from inference_worker.domain.text import Vocabulary

LOGITS = torch.tensor([0.6, 0.1, 0.25, 0.05]).log()


def draws(sampling: Sampling, count: int) -> list[int]:
    generator = generator_of(sampling)
    return [choose(LOGITS, sampling, generator) for _ in range(count)]


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert draws(Sampling(), 3) == [0, 0, 0]


def test_temperature_one_draws_by_probability() -> None:
    chosen = draws(Sampling(temperature=1.0, seed=5), 4000)
    for token, probability in enumerate((0.6, 0.1, 0.25, 0.05)):
        assert chosen.count(token) / 4000 == pytest.approx(probability, abs=0.03)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    sharp, flat = (draws(Sampling(temperature=t, seed=5), 1000).count(0) / 1000 for t in (0.2, 5.0))
    assert sharp > 0.95
    assert flat < 0.45


def test_the_nucleus_is_the_smallest_set_with_the_wanted_probability() -> None:
    probabilities = LOGITS.exp().double()
    assert nucleus(probabilities, 0.5)[1].tolist() == [0]
    assert nucleus(probabilities, 0.84)[1].tolist() == [0, 2]
    assert nucleus(probabilities, 0.86)[1].tolist() == [0, 2, 1]
    assert set(draws(Sampling(temperature=1.0, top_p=0.84, seed=1), 500)) == {0, 2}


def test_the_last_bits_of_near_ties_do_not_change_what_a_seed_draws() -> None:
    ties = torch.cat([torch.zeros(8), torch.full((4,), -20.0)])
    noise = 1e-6 * torch.randn(12, generator=torch.Generator().manual_seed(1))
    one, other = ties + noise, ties - noise
    assert nucleus(one.double().softmax(-1), 0.99)[1].tolist() != nucleus(other.double().softmax(-1), 0.99)[1].tolist()
    for seed in range(200):
        sampling = Sampling(temperature=1.0, top_p=0.99, seed=seed)
        assert choose(one, sampling, generator_of(sampling)) == choose(other, sampling, generator_of(sampling))


def test_a_flat_distribution_has_a_nucleus_larger_than_the_first_look() -> None:
    flat = torch.full((4 * NUCLEUS_FIRST,), 1 / (4 * NUCLEUS_FIRST), dtype=torch.float64)
    assert len(nucleus(flat, 0.5)[1]) == pytest.approx(2 * NUCLEUS_FIRST, abs=1)


def test_a_seed_repeats_itself_and_no_seed_does_not() -> None:
    seeded = Sampling(temperature=1.0, seed=42)
    assert draws(seeded, 50) == draws(seeded, 50)
    free = Sampling(temperature=1.0)
    assert draws(free, 64) != draws(free, 64)


def test_a_seed_of_64_bits_is_taken_whole() -> None:
    assert draws(Sampling(temperature=1.0, seed=(1 << 64) - 1), 40) != draws(Sampling(temperature=1.0, seed=1), 40)


def test_logprobs_are_natural_logarithms_at_temperature_one() -> None:
    vocabulary = Vocabulary((b"a", b"b", b"\xe4", b"d"))
    (entry,) = logprobs((LOGITS + 3.0).unsqueeze(0), [1], 2, vocabulary)
    assert entry.logprob == pytest.approx(math.log(0.1), abs=1e-6)
    assert [(top.token_id, top.text) for top in entry.top] == [(0, b"a"), (2, b"\xe4")]
    assert entry.top[0].logprob == pytest.approx(math.log(0.6), abs=1e-6)
    assert logprobs(LOGITS.unsqueeze(0), [1], 0, vocabulary)[0].top == ()


def test_what_asks_for_nothing_leaves_the_logits_alone() -> None:
    assert steered(LOGITS, Sampling(temperature=1.0, top_p=0.5), [0], [1]) is LOGITS


def test_a_bias_is_added_to_its_tokens_alone_and_decides_a_greedy_choice() -> None:
    sampling = Sampling(logit_bias={1: 5.0, 3: -100.0})
    got = steered(LOGITS, sampling, [], [])
    np.testing.assert_allclose(got.numpy(), LOGITS.numpy() + np.array([0, 5, 0, -100], dtype=np.float32), rtol=1e-6)
    assert choose(got, sampling, None) == 1


def test_presence_and_frequency_count_the_answer_and_not_the_prompt() -> None:
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0])
    got = steered(logits, Sampling(presence_penalty=0.5, frequency_penalty=0.25), [3, 3, 3], [1, 1, 2])
    assert got.tolist() == [1.0, 2.0 - 0.5 - 2 * 0.25, 3.0 - 0.5 - 0.25, 4.0]


def test_negative_penalties_favour_what_was_said() -> None:
    got = steered(torch.zeros(3), Sampling(presence_penalty=-1.0, frequency_penalty=-0.5), [], [2, 2])
    assert got.tolist() == [0.0, 0.0, 2.0]


def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, -2.0, 0.0])
    assert steered(logits, Sampling(repetition_penalty=2.0), [0, 0, 1], [4]).tolist() == [1.0, -4.0, 2.0, -2.0, 0.0]


def test_bias_repetition_frequency_and_presence_come_in_this_order() -> None:
    sampling = Sampling(logit_bias={0: 3.0}, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0)
    got = steered(torch.tensor([-1.0, 4.0]), sampling, [1], [0, 0])
    assert got.tolist() == [(-1.0 + 3.0) / 2 - 2 * 0.5 - 1.0, 4.0 / 2]


def test_top_k_keeps_the_k_most_likely() -> None:
    assert set(draws(Sampling(temperature=1.0, top_k=2, seed=3), 500)) == {0, 2}
    assert draws(Sampling(temperature=5.0, top_k=1, seed=3), 20) == [0] * 20
    assert set(draws(Sampling(temperature=1.0, top_k=99, seed=3), 2000)) == {0, 1, 2, 3}


def test_min_p_keeps_what_is_likely_enough_beside_the_most_likely() -> None:
    assert set(draws(Sampling(temperature=1.0, min_p=0.4, seed=3), 500)) == {0, 2}  # 0.25 / 0.6 = 0.42, 0.1 / 0.6 = 0.17
    assert draws(Sampling(temperature=1.0, min_p=1.0, seed=3), 20) == [0] * 20


def test_the_nucleus_is_taken_of_what_top_k_and_min_p_leave() -> None:
    probabilities = LOGITS.exp().double()
    weights, ids = candidates(probabilities, Sampling(temperature=1.0, top_k=2, top_p=0.7))
    assert ids.tolist() == [0]  # 0.6 of 0.85 is 0.706
    np.testing.assert_allclose(weights.numpy(), [0.6 / 0.85], rtol=1e-6)
    assert candidates(probabilities, Sampling(temperature=1.0, min_p=0.1, top_p=0.95))[1].tolist() == [0, 2, 1]
    assert candidates(probabilities, Sampling(temperature=1.0, min_p=0.1, top_k=3, top_p=0.6))[1].tolist() == [0]

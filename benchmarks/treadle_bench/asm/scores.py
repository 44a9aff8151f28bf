"""How near a method's answers come to those of the whole prefix, and how often they are right, with intervals.

Everything is the mean of one number a question, so that one bootstrap serves all: seeds drawn with replacement, and questions, the
same for every seed. Three seeds say little about the spread of seeds. Does not know where log-probabilities come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument

DRAWS = 4000
QUESTIONS_MIN = 8  # for an interval
METRICS = ("accuracy", "calibrated", "agreement", "kl")

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds and questions; its 95 % interval (None below QUESTIONS_MIN questions); the mean of each seed."""

    value: float
    interval: tuple[float, float] | None
    by_seed: tuple[float, ...]


def of_questions(log_probs: Floats, full: Floats, answers: Sequence[int]) -> dict[str, Floats]:
    """Each metric for each question, [n].

    log_probs, full: [n, labels], of the method and of the whole prefix, normalised over the labels
    accuracy:   the likeliest label is right
    calibrated: the same after the mean of each label over all questions is taken off (batch calibration, arXiv 2309.17249): raw
                accuracy of a small model is mostly its liking for some labels
    agreement:  the likeliest label is the whole prefix's
    kl:         KL(full || method), nats
    Raises InvalidArgument where shapes differ.
    """
    right = np.asarray(answers)
    if log_probs.shape != full.shape or right.shape != (len(full),):
        raise InvalidArgument(
            f"{log_probs.shape} log-probabilities against {full.shape} of the whole prefix and {len(right)} answers"
        )
    chosen = log_probs.argmax(1)
    return {
        "accuracy": (chosen == right).astype(np.float64),
        "calibrated": ((log_probs - log_probs.mean(0)).argmax(1) == right).astype(np.float64),
        "agreement": (chosen == full.argmax(1)).astype(np.float64),
        "kl": np.asarray((np.exp(full) * (full - log_probs)).sum(1)),
    }


def figure(by_seed: Sequence[Floats], *, seed: int = 0) -> Figure:
    """Of one metric: one array [n] for each prefix seed, all of the same n. Raises InvalidArgument where they differ."""
    values = _stacked(by_seed)
    interval = None
    if values.shape[1] >= QUESTIONS_MIN:
        low, high = np.percentile(_draws(values, seed), [2.5, 97.5])
        interval = float(low), float(high)
    return Figure(float(values.mean()), interval, tuple(float(each) for each in values.mean(1)))


def gap_recovered(method: Sequence[Floats], full: Sequence[Floats], none: Sequence[Floats], *, seed: int = 0) -> Figure:
    """(method - none) / (full - none) of one metric; draws where the prefix gains nothing are left out of the interval.

    Raises InvalidArgument where the prefix gains nothing at all: there is no gap to recover.
    """
    mine, whole, bare = map(_stacked, (method, full, none))
    gap = float(whole.mean() - bare.mean())
    if gap <= 0:
        raise InvalidArgument(f"the whole prefix gains {gap:.3f} over none: there is no gap to recover")
    interval = None
    if mine.shape[1] >= QUESTIONS_MIN:
        top, low_end, base = (_draws(each, seed) for each in (mine, bare, whole - bare))
        kept = base > 0
        low, high = np.percentile((top - low_end)[kept] / base[kept], [2.5, 97.5])
        interval = float(low), float(high)
    by_seed = (mine.mean(1) - bare.mean(1)) / np.where(whole.mean(1) > bare.mean(1), whole.mean(1) - bare.mean(1), np.nan)
    return Figure(float(mine.mean() - bare.mean()) / gap, interval, tuple(float(each) for each in by_seed))


def figures(by_seed: Sequence[Mapping[str, Floats]]) -> dict[str, Figure]:
    """`figure` of every metric."""
    return {metric: figure([each[metric] for each in by_seed]) for metric in METRICS}


def _stacked(by_seed: Sequence[Floats]) -> Floats:
    if not by_seed or len({len(each) for each in by_seed}) != 1:
        raise InvalidArgument(f"as many questions for each seed expected, got {[len(each) for each in by_seed]}")
    return np.stack(by_seed)


def _draws(values: Floats, seed: int) -> Floats:
    seeds, questions = values.shape
    draw = np.random.default_rng(seed)
    of_questions = draw.multinomial(questions, np.full(questions, 1 / questions), size=DRAWS) / questions  # weights
    of_seeds = draw.multinomial(seeds, np.full(seeds, 1 / seeds), size=DRAWS) / seeds
    return np.asarray(np.einsum("ds,sq,dq->d", of_seeds, values, of_questions, optimize=True))

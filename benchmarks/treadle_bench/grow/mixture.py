"""A frozen model's probabilities mixed with an n-gram model's: p = w p_ngram + (1 - w) p_model.

Owns the weights, which expectation maximisation finds on validation blocks: one for all, or one for each length of context
that the n-gram model knew. Works on the probability of the token that followed, so it needs no distribution.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 200
ROUNDS_CONVERGED = 1e-6

Floats = NDArray[np.float64]


def fit_weights(model: Floats, ngram: Floats, group: NDArray[np.int64]) -> Floats:
    """The n-gram's weight for each group, [groups], by maximum likelihood.

    model, ngram: [n] probabilities of the tokens that followed; group: [n], which weight each takes
    """
    size = int(group.max()) + 1
    members = np.maximum(np.bincount(group, minlength=size), 1)
    weights = np.full(size, 0.5)
    for _ in range(ROUNDS):
        own = weights[group] * ngram
        credit = own / (own + (1.0 - weights[group]) * model)
        moved = np.bincount(group, weights=credit, minlength=size) / members
        done = float(np.abs(moved - weights).max()) < ROUNDS_CONVERGED
        weights = moved
        if done:
            break
    return weights


def mixed_nll(model: Floats, ngram: Floats, group: NDArray[np.int64], weights: Floats) -> Floats:
    """Negative log-likelihood in nats of each token under the mixture; a group that was never fitted leaves the model alone."""
    known = np.concatenate((weights, np.zeros(max(0, int(group.max()) + 1 - len(weights)))))[group]
    return np.asarray(-np.log(known * ngram + (1.0 - known) * model))

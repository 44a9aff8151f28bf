"""From logits to tokens: greedy, temperature, nucleus, and log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from inference_worker.domain.request import Sampling, TokenLogprob
from inference_worker.domain.text import Vocabulary

NUCLEUS_FIRST = 256  # most nuclei lie within so many tokens: a partial sort is tens of times cheaper than a full one


def generator_of(sampling: Sampling) -> torch.Generator | None:
    """The request's own generator; None if it chooses greedily. Without a seed it starts from the system's randomness."""
    if sampling.temperature == 0:
        return None
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)
    return generator


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token.

    logits: [vocab] float32
    Takes exactly one number from the generator for each token, and draws in the order of token ids. A batch of another shape
    changes logits in their last bits, and order by probability would swap tokens that are all but equally likely. So a seed
    repeats its text in other batches, except where such a change matters by itself: the number falls on the border between two
    tokens, or a token at the border of the nucleus enters or leaves it.
    """
    if generator is None:
        return int(torch.argmax(logits))
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    point = float(torch.rand((), generator=generator, dtype=torch.float64))
    if sampling.top_p >= 1:
        return _at(probabilities, point)
    kept, ids = nucleus(probabilities, sampling.top_p)
    ids, order = torch.sort(ids)
    return int(ids[_at(kept[order], point)])


def nucleus(probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The smallest set of most likely tokens that has at least `top_p` together: (probabilities [n], ids [n]), best first.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration (arXiv 1904.09751), section 3.1.
    """
    size = min(NUCLEUS_FIRST, probabilities.shape[-1])
    best, ids = torch.topk(probabilities, size)
    if float(best.sum()) < top_p and size < probabilities.shape[-1]:
        best, ids = torch.sort(probabilities, descending=True)
    before = torch.cumsum(best, dim=-1) - best
    count = max(1, int((before < top_p).sum()))
    return best[:count], ids[:count]


def _at(weights: Tensor, point: float) -> int:
    """The place where the cumulated weights pass `point` (0 <= point < 1) of their sum."""
    cumulated = torch.cumsum(weights, dim=-1)
    place = int(torch.searchsorted(cumulated, cumulated[-1] * point, right=True))
    return min(place, weights.shape[-1] - 1)


def logprobs(logits: Tensor, chosen: list[int], top: int, vocabulary: Vocabulary) -> list[TokenLogprob]:
    """Natural log-probabilities at temperature 1 of the chosen tokens, and of the `top` most likely ones at each place.

    logits: [n, vocab] float32; chosen: n token ids
    """
    table = torch.log_softmax(logits, dim=-1)
    own = table.gather(1, torch.tensor(chosen, dtype=torch.int64).unsqueeze(1)).squeeze(1).tolist()
    best, ids = torch.topk(table, top, dim=-1) if top else (table[:, :0], table[:, :0])
    rows = zip(chosen, own, best.tolist(), ids.tolist(), strict=True)
    return [
        TokenLogprob(token, vocabulary.bytes_of(token), value, _top(values, tokens, vocabulary))
        for token, value, values, tokens in rows
    ]


def _top(values: list[float], tokens: list[int], vocabulary: Vocabulary) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(int(token), vocabulary.bytes_of(int(token)), value) for value, token in zip(values, tokens, strict=True)
    )

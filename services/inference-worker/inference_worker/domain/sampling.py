"""From logits to tokens: bias and penalties, greedy, temperature, min_p, top_k, nucleus, and log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

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


def steered(logits: Tensor, sampling: Sampling, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """The logits with the request's bias and penalties; the same tensor where it asks for none.

    logits: [vocab] float32, left as it is; prompt, answer: token ids so far
    In vLLM's order and over the same tokens: bias, repetition (prompt and answer), frequency and presence (answer alone).
    """
    penalised = sampling.repetition_penalty != 1 or sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
    if not sampling.logit_bias and not penalised:
        return logits
    logits = logits.clone()
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype)
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *answer}), dtype=torch.int64)
        kept = logits[seen]
        logits[seen] = torch.where(kept > 0, kept / sampling.repetition_penalty, kept * sampling.repetition_penalty)
    if answer and (sampling.frequency_penalty or sampling.presence_penalty):
        said, counts = torch.unique(torch.tensor(answer, dtype=torch.int64), return_counts=True)
        logits[said] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    return logits


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator | None) -> int:
    """The next token.

    logits: [vocab] float32, as `steered` gives them
    Takes exactly one number from the generator for each token, and draws in the order of token ids. A batch of another shape
    changes logits in their last bits, and order by probability would swap tokens that are all but equally likely. So a seed
    repeats its text in other batches, except where such a change matters by itself: the number falls on the border between two
    tokens, or a token at the border of the nucleus enters or leaves it.
    """
    if generator is None:
        return int(torch.argmax(logits))
    probabilities = torch.softmax(logits.double() / sampling.temperature, dim=-1)
    point = float(torch.rand((), generator=generator, dtype=torch.float64))
    if sampling.top_p >= 1 and sampling.min_p == 0 and sampling.top_k == 0:
        return _at(probabilities, point)
    kept, ids = candidates(probabilities, sampling)
    ids, order = torch.sort(ids)
    return int(ids[_at(kept[order], point)])


def candidates(probabilities: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """What min_p, top_k and top_p, in this order, leave to choose among: (probabilities [n], ids [n]), best first.

    probabilities: [vocab] float64 that sum to 1
    """
    if sampling.min_p > 0:
        least = sampling.min_p * probabilities.max()
        probabilities = torch.where(probabilities >= least, probabilities, torch.zeros_like(probabilities))
    top_k = min(sampling.top_k or probabilities.shape[-1], probabilities.shape[-1])
    if top_k == probabilities.shape[-1]:
        return nucleus(probabilities / probabilities.sum(), sampling.top_p)
    best, ids = torch.topk(probabilities, top_k)
    kept, places = nucleus(best / best.sum(), sampling.top_p)
    return kept, ids[places]


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

"""Questions behind a prefix: the likelihood of every label, whatever stands for the prefix. One path for all methods.

Owns batches and labels of several tokens. Does not know what a method keeps of a prefix.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.nn.kv import SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import PrefixMemory, PrefixUse
from treadle.nn.prefix_step import PrefixCollector
from treadle_bench.asm.compact_kv import CompactKV
from treadle_bench.asm.heatmap import Watched
from treadle_bench.asm.tasks import Tokens

ROWS_AT_ONCE = 512  # of one forward, unless a single question has more
ENCODE_ROWS = 256  # of a prefix at once


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """What stands before a question. offset: position of its first token; shared: exact KV; memory: what takes its place where given."""

    offset: int = 0
    shared: SequenceKV | None = None
    memory: PrefixMemory | CompactKV | Watched | None = None


def encode_prefix(model: CausalLM, prefix: Sequence[int]) -> SequenceKV:
    """A prefix's whole KV, at positions from 0 on."""
    kv = model.new_kv()
    kv.reserve(max(len(prefix), 1))
    for first in range(0, len(prefix), ENCODE_ROWS):
        tokens = torch.tensor(prefix[first : first + ENCODE_ROWS])
        model.forward(tokens, torch.arange(first, first + len(tokens)), [0, len(tokens)], [kv])
    return kv


def before_prefix(model: CausalLM, prefix: Sequence[int]) -> Before:
    """The exact prefix; an empty one is none at all."""
    return Before(len(prefix), encode_prefix(model, prefix)) if prefix else Before()


def label_log_probs(
    model: CausalLM, questions: Sequence[Tokens], labels: Sequence[Tokens], before: Before, uses: list[PrefixUse] | None = None
) -> NDArray[np.float64]:
    """Log-probability of each label after each question, normalised over the labels: [questions, labels].

    A label of several tokens has the product of theirs. uses: gets, question by question, what a memory counted
    """
    following = _following(labels)
    found = np.zeros((len(questions), len(labels)))
    for batch in _batches(questions):
        asked = [questions[number] for number in batch]
        kv = [model.new_kv() for _ in asked]
        counted = [_use(before) for _ in asked]
        last = _step(model, asked, kv, before, counted)
        if uses is not None:
            uses += [use for use in counted if use is not None]
        at: dict[Tokens, tuple[list[SequenceKV], NDArray[np.float64]]] = {(): (kv, _next(model, last, following[()]))}
        for path in sorted(following, key=len)[1:]:
            longer = [_copy(model, sequence) for sequence in at[path[:-1]][0]]
            rows = _step(model, [path[-1:]] * len(longer), longer, before, [_use(before) for _ in longer])
            at[path] = longer, _next(model, rows, following[path])
        for place, label in enumerate(labels):
            for depth, token in enumerate(label):
                found[batch, place] += at[label[:depth]][1][:, following[label[:depth]].index(token)]
    return np.asarray(found - np.logaddexp.reduce(found, axis=1, keepdims=True))


def run_all(model: CausalLM, texts: Sequence[Tokens], before: Before, collect: PrefixCollector) -> None:
    """Run texts behind a prefix for what `collect` takes of every layer; needs before.shared."""
    for batch in _batches(texts):
        _step(
            model,
            [texts[number] for number in batch],
            [model.new_kv() for _ in batch],
            before,
            [_use(before) for _ in batch],
            collect,
        )


def _step(
    model: CausalLM, new: Sequence[Tokens], kv: Sequence[SequenceKV], before: Before, uses: Sequence[PrefixUse | None],
    collect: PrefixCollector | None = None,
) -> Tensor:  # fmt: skip
    """Continue every sequence; returns the last hidden state of each, [R, hidden]."""
    starts = [0, *accumulate(map(len, new))]
    positions = torch.cat(
        [torch.arange(sequence.length, sequence.length + len(each)) for sequence, each in zip(kv, new, strict=True)]
    )
    tokens = torch.tensor([token for each in new for token in each])
    hidden = model.forward(
        tokens, positions + before.offset, starts, kv, prefixes=list(uses), shared=before.shared, collect=collect
    )
    return hidden[torch.tensor(starts[1:]) - 1]


def _next(model: CausalLM, hidden: Tensor, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Log-probabilities of some next tokens among all, [R, len(tokens)]."""
    return np.asarray(model.logits(hidden).log_softmax(-1)[:, list(tokens)].numpy(), np.float64)


def _following(labels: Sequence[Tokens]) -> dict[Tokens, list[int]]:
    """For each beginning of a label: which tokens may come next."""
    following: dict[Tokens, list[int]] = defaultdict(list)
    for label in labels:
        for depth, token in enumerate(label):
            if token not in following[label[:depth]]:
                following[label[:depth]].append(token)
    return dict(following)


def _batches(texts: Sequence[Tokens]) -> Iterator[list[int]]:
    """Numbers of texts that run together."""
    batch, rows = list[int](), 0
    for number, text in enumerate(texts):
        if batch and rows + len(text) > ROWS_AT_ONCE:
            yield batch
            batch, rows = [], 0
        batch.append(number)
        rows += len(text)
    if batch:
        yield batch


def _use(before: Before) -> PrefixUse | None:
    # A CompactKV answers what a PrefixMemory answers, and stands in its place for the rivals alone.
    return None if before.memory is None else PrefixUse(cast(PrefixMemory, before.memory))


def _copy(model: CausalLM, sequence: SequenceKV) -> SequenceKV:
    copied = model.new_kv()
    copied.extend_from(sequence.block(0, sequence.length))
    return copied

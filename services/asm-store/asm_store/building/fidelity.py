"""How near a dictionary comes to its prefix, token by token: next-token predictions beside those with the exact prefix.

Owns the figures of a card. Questions with answers are `evaluation`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from asm_store.building.collection import batches
from asm_store.building.stepping import STEP_ROWS, Before, step
from asm_store.building.traces import Trace
from treadle.contract.errors import InvalidArgument
from treadle.nn.model import CausalLM

ROWS_AT_ONCE = 64  # of logits over the vocabulary


@dataclass(frozen=True, slots=True)
class Fidelity:
    """tokens: predictions compared; agreement: share with the same likeliest token; kl: mean KL(full || this), nats a token."""

    tokens: int
    agreement: float
    kl: float

    def to_json(self) -> dict[str, float]:
        """For a card."""
        return {"tokens": self.tokens, "agreement": round(self.agreement, 4), "kl": round(self.kl, 4)}


def measure(
    model: CausalLM,
    full: Before,
    others: Mapping[str, Before],
    traces: Sequence[Trace],
    tick: Callable[[int], None] = lambda done: None,
) -> dict[str, Fidelity]:
    """Every token of `traces` predicted behind `full` and behind each of `others`; tick: tokens done. Raises InvalidArgument without traces."""
    if not traces:
        raise InvalidArgument("fidelity: no traces to measure on")
    agreed, kl, done = dict.fromkeys(others, 0), dict.fromkeys(others, 0.0), 0
    for batch in batches(traces):
        some = [traces[number] for number in batch]
        kv = {name: [model.new_kv() for _ in some] for name in ("", *others)}
        for first in range(0, max(map(len, some)), STEP_ROWS):
            new = [trace[first : first + STEP_ROWS] for trace in some]
            exact = step(model, full, new, kv[""])
            for name, before in others.items():
                same, far = _compare(model, exact, step(model, before, new, kv[name]))
                agreed[name] += same
                kl[name] += far
            done += len(exact)
            tick(done)
    return {name: Fidelity(done, agreed[name] / done, kl[name] / done) for name in others}


def _compare(model: CausalLM, exact: Tensor, other: Tensor) -> tuple[int, float]:
    """hidden [T, hidden] twice: (rows with the same likeliest token, summed KL)."""
    same, far = 0, 0.0
    for first in range(0, len(exact), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        expected, got = model.logits(exact[rows]).log_softmax(-1), model.logits(other[rows]).log_softmax(-1)
        same += int((expected.argmax(-1) == got.argmax(-1)).sum())
        far += float((expected.exp() * (expected - got)).sum())
    return same, far


def up_to(traces: Sequence[Trace], tokens: int) -> tuple[Trace, ...]:
    """The first traces, `tokens` in all or a little more."""
    chosen, count = list[Trace](), 0
    for trace in traces:
        if count >= tokens:
            break
        chosen.append(trace)
        count += len(trace)
    return tuple(chosen)

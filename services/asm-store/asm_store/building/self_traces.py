"""Traces that the model writes itself behind the prefix, for those who have no traces of their own.

Owns the openings, sampling and its seeds. Source of the idea: self-study, arXiv 2506.06266, here without training. Requests differ
from what a model says by itself, so a file of real traces makes the better dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from tokenizers import Tokenizer

from asm_store.building.chat import Wrap
from asm_store.building.stepping import Before, check_room, step
from asm_store.building.traces import Trace
from treadle.nn.model import CausalLM

TEXT_TOKENS_MAX, QUESTION_TOKENS_MAX, ANSWER_TOKENS_MAX = 56, 24, 48  # that the model writes of each
TEMPERATURE = 0.7
TRACES_AT_ONCE = 16  # decoded together, so that weights are read once for all
OPENINGS = (
    "\n\nQuestion:", "\n\nIn short:", "\n", "\n\nExample:", "\n\nQ: What", "\n\nExplain:", "\n\nQ: How", "\n\nThis means that",
)  # fmt: skip
TOPIC, TOPIC_END, TOPIC_TOKENS = 'The text says "', '".', 12  # a chat begins with words of the prefix, else it is of anything
_HERE = "\u2042"  # stands for a prompt while the chat template is asked what it writes around one


def write_traces(
    model: CausalLM, before: Before, prefix: Sequence[int], tokenizer: Tokenizer, wrap: Wrap | None, count: int, seed: int,
    tick: Callable[[int], None] = lambda done: None,
) -> tuple[Trace, ...]:  # fmt: skip
    """`count` traces sampled behind `before`, the same for the same seed on the same machine.

    prefix: token ids of what stands there, for chats to be about
    wrap: how a chat writes a prompt (`chat_wrap`): every second trace is a chat then, question and answer; None: the model knows none
    tick: traces done
    """

    def ids(text: str) -> Trace:
        return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

    openings = [ids(text) for text in OPENINGS]
    head, _, tail = (ids(part) for part in wrap(_HERE).partition(_HERE)) if wrap else ((), (), ())
    texts, chats = (range(0, count, 2), range(1, count, 2)) if wrap else (range(count), range(0))
    around = len(head + ids(TOPIC) + ids(TOPIC_END) + tail) + TOPIC_TOKENS
    check_room(
        model, before.position, max(around + QUESTION_TOKENS_MAX + ANSWER_TOKENS_MAX, max(map(len, openings)) + TEXT_TOKENS_MAX)
    )
    written: list[Trace] = []
    for numbers in _groups(texts):
        chosen = [openings[place % len(openings)] for place in range(len(written), len(written) + len(numbers))]
        written += _write(model, before, chosen, _draws(seed, numbers), TEXT_TOKENS_MAX)
        tick(len(written))
    for numbers in _groups(chats):
        draws = _draws(seed, numbers)
        topics = [_some(prefix, draw) for draw in draws]
        chosen = [head + ids(TOPIC) + topic + ids(TOPIC_END) for topic in topics]
        asked = _write(model, before, chosen, draws, QUESTION_TOKENS_MAX)
        written += _write(model, before, [question + tail for question in asked], draws, ANSWER_TOKENS_MAX)
        tick(len(written))
    return tuple(written)


def _groups(numbers: range) -> Iterator[range]:
    return (numbers[first : first + TRACES_AT_ONCE] for first in range(0, len(numbers), TRACES_AT_ONCE))


def _draws(seed: int, numbers: range) -> list[torch.Generator]:
    return [torch.Generator().manual_seed((seed + number) % (1 << 63)) for number in numbers]


def _some(prefix: Sequence[int], draw: torch.Generator) -> Trace:
    """TOPIC_TOKENS neighbours."""
    first = int(torch.randint(0, max(1, len(prefix) - TOPIC_TOKENS + 1), (1,), generator=draw))
    return tuple(prefix[first : first + TOPIC_TOKENS])


def _write(
    model: CausalLM, before: Before, openings: Sequence[Trace], draws: Sequence[torch.Generator], tokens_max: int
) -> list[Trace]:
    """Each opening and what the model goes on with: `tokens_max` tokens, or fewer where it ends."""
    traces, new = [list(opening) for opening in openings], [list(opening) for opening in openings]
    kv, going = [model.new_kv() for _ in openings], list(range(len(traces)))
    for _ in range(tokens_max):
        if not going:
            break
        hidden = step(model, before, [new[place] for place in going], [kv[place] for place in going])
        last = torch.tensor([len(new[place]) for place in going]).cumsum(0) - 1
        chances = (model.logits(hidden[last]) / TEMPERATURE).softmax(-1)
        for place, row in zip(tuple(going), chances, strict=True):
            chosen = int(torch.multinomial(row, 1, generator=draws[place]))
            if chosen in model.config.eos_token_ids:
                going.remove(place)
            else:
                traces[place].append(chosen)
                new[place] = [chosen]
    return [tuple(trace) for trace in traces]

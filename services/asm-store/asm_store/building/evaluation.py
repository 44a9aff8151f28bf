"""Questions answered with the full prefix, with a dictionary and with nothing: what changes, and what is right.

Owns the questions file, and the scoring of choices and answers by their likelihood: nothing is generated. Figures for tokens of
traces are `fidelity`'s.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from asm_store.building.chat import Wrap
from asm_store.building.prefix import read_text
from asm_store.building.stepping import Before, check_room, step
from treadle.contract.errors import InvalidArgument
from treadle.nn.model import CausalLM

QUESTIONS_MAX, CHOICES_MAX, QUESTION_TOKENS_MAX = 100_000, 1024, 4096
FULL = "full prefix"


@dataclass(frozen=True, slots=True)
class Question:
    """Token ids. choices: possible answers, none: any text; answer: the right one's place in choices, or its ids, None: not known."""

    prompt: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...]
    answer: int | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Answers:
    """Of one way to answer.

    agreement: share of questions with the same likeliest choice (without choices: next token) as with the full prefix
    kl:        mean KL(full || this) over the choices (over the vocabulary), nats
    accuracy:  share of the questions with choices and an answer in which the answer is the likeliest; None: there are none
    answer_nats: mean of -log p of an answer's tokens, for answers without choices; None: there are none
    """

    questions: int
    agreement: float
    kl: float
    accuracy: float | None
    answer_nats: float | None

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "questions": self.questions, "agreement": round(self.agreement, 4), "kl": round(self.kl, 4),
            "accuracy": None if self.accuracy is None else round(self.accuracy, 4),
            "answer_nats": None if self.answer_nats is None else round(self.answer_nats, 4),
        }  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _Said:
    """log_probs: [choices] or [vocab], normalised; answer_nats: a token, None where no answer without choices is known."""

    log_probs: Tensor
    answer_nats: float | None


def read_questions(path: Path, tokenizer: Tokenizer, wrap: Wrap | None = None) -> tuple[Question, ...]:
    """A line each of JSON {"prompt", "choices"?, "answer"?}; wrap: how prompts are written (`chat_wrap`), None: as they are.

    Raises NotFound, InvalidArgument naming file and line.
    """
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    if len(lines) > QUESTIONS_MAX:
        raise InvalidArgument(f"{path}: {len(lines)} questions, at most {QUESTIONS_MAX}")
    return tuple(_question(f"{path} line {number}", line, tokenizer, wrap or str) for number, line in lines)


def ask(
    model: CausalLM,
    full: Before,
    others: Mapping[str, Before],
    questions: Sequence[Question],
    tick: Callable[[int], None] = lambda done: None,
) -> dict[str, Answers]:
    """Every question behind `full` and behind each of `others`, by name, FULL first; tick: questions done."""
    states = {FULL: full, **others}
    longest = max(len(question.prompt) + max(map(len, _endings(question)), default=0) for question in questions)
    for before in states.values():
        check_room(model, before.position, longest)
    said: dict[str, list[_Said]] = {name: [] for name in states}
    for done, question in enumerate(questions, 1):
        for name, before in states.items():
            said[name].append(_say(model, before, question))
        tick(done)
    return {name: _answers(questions, said[FULL], of_this) for name, of_this in said.items()}


def _say(model: CausalLM, before: Before, question: Question) -> _Said:
    kv = model.new_kv()
    first = model.logits(step(model, before, [question.prompt], [kv])[-1:]).log_softmax(-1)[0]
    likelihoods = []
    for ending in _endings(question):
        likelihood = float(first[ending[0]])
        if len(ending) > 1:
            rows = model.logits(step(model, before, [ending[:-1]], [kv])).log_softmax(-1)
            likelihood += float(rows.gather(1, torch.tensor(ending[1:]).unsqueeze(1)).sum())
            kv.truncate(len(question.prompt))
        likelihoods.append(likelihood)
    if question.choices:
        return _Said(torch.tensor(likelihoods).log_softmax(0), None)
    return _Said(first, -likelihoods[0] / len(_endings(question)[0]) if likelihoods else None)


def _endings(question: Question) -> tuple[tuple[int, ...], ...]:
    if question.choices:
        return question.choices
    return (question.answer,) if isinstance(question.answer, tuple) else ()


def _answers(questions: Sequence[Question], full: Sequence[_Said], said: Sequence[_Said]) -> Answers:
    agreed = [int(one.log_probs.argmax()) == int(other.log_probs.argmax()) for one, other in zip(full, said, strict=True)]
    far = [float((one.log_probs.exp() * (one.log_probs - other.log_probs)).sum()) for one, other in zip(full, said, strict=True)]
    right = [
        int(one.log_probs.argmax()) == question.answer
        for question, one in zip(questions, said, strict=True)
        if isinstance(question.answer, int)
    ]
    nats = [one.answer_nats for one in said if one.answer_nats is not None]
    return Answers(
        len(questions), sum(agreed) / len(agreed), math.fsum(far) / len(far),
        sum(right) / len(right) if right else None, math.fsum(nats) / len(nats) if nats else None,
    )  # fmt: skip


def _question(where: str, line: str, tokenizer: Tokenizer, wrap: Wrap) -> Question:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON: {error}") from error
    if not isinstance(fields, dict) or not {"prompt"} <= fields.keys() <= {"prompt", "choices", "answer"}:
        raise InvalidArgument(f'{where}: {{"prompt": …, "choices": […]?, "answer": …?}} expected')
    choices, answer = fields.get("choices", []), fields.get("answer")
    texts = [fields["prompt"], *choices, *([] if answer is None else [answer])] if isinstance(choices, list) else [None]
    if not all(isinstance(text, str) and text for text in texts) or len(choices) == 1 or len(choices) > CHOICES_MAX:
        raise InvalidArgument(f"{where}: prompt, answer and 2 to {CHOICES_MAX} choices are texts that are not empty")
    if choices and answer is not None and answer not in choices:
        raise InvalidArgument(f"{where}: the answer {answer!r} is none of the choices")

    def ids(text: str) -> tuple[int, ...]:
        encoded = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        if not 1 <= len(encoded) <= QUESTION_TOKENS_MAX:
            raise InvalidArgument(f"{where}: {len(encoded)} tokens in a text, 1 to {QUESTION_TOKENS_MAX} are taken")
        return encoded

    known = None if answer is None else choices.index(answer) if choices else ids(answer)
    return Question(ids(wrap(fields["prompt"])), tuple(map(ids, choices)), known)

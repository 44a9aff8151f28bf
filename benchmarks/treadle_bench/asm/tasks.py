"""Questions whose answer stands in a long prefix: prompts, prefixes by seed, calibration traces, and what is right.

Owns prompt forms and which examples are used for what. A prefix and the traces are of training examples, and no example is in both;
the questions are of a part that neither has seen: `val` to choose settings by, `test` to report. Reads local files alone (`--data`).
Sources: clinc150 (Larson et al. 2019), banking77 (Casanueva et al. 2020), RuleArena's NBA part (arXiv 2412.08972), prompt forms as ManyICLBench.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound

Tokens = tuple[int, ...]
INTENTS = 20  # of clinc150: the first whose name is one token, in alphabetical order
NBA_RULE_TOKENS = 6144  # what of the rulebook's 23 K tokens a model of 8,192 positions holds beside a question of up to 1,000


class Split(StrEnum):
    """Which questions are asked: `val` where settings are chosen, `test` where they are reported."""

    VAL = "val"
    TEST = "test"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of a task is used: examples in the prefix, traces, and questions at most."""

    examples: int
    traces: int
    questions: int

    def quick(self) -> Sizes:
        """A tenth or so: seconds instead of minutes."""
        return Sizes(max(self.examples // 4, 1), max(self.traces // 8, 1), max(self.questions // 12, 1))


@dataclass(frozen=True, slots=True)
class Task:
    """One task with one prefix. Tokens everywhere, made once.

    pieces:    the prefix in parts that may be left out from the end on, in order
    traces:    prompts with their answers, as users would send and get them
    questions: prompts; `labels` are what may follow, `answers` which of them is right, one for each question
    unrelated: prompts of another kind, for the guard; empty where the task has none
    """

    name: str
    seed: int
    pieces: tuple[Tokens, ...]
    traces: tuple[Tokens, ...]
    questions: tuple[Tokens, ...]
    labels: tuple[Tokens, ...]
    answers: tuple[int, ...]
    unrelated: tuple[Tokens, ...] = ()

    @property
    def prefix(self) -> Tokens:
        """All pieces in a row."""
        return tuple(token for piece in self.pieces for token in piece)

    def truncated(self, tokens: int) -> Tokens:
        """As many whole pieces from the start on as fit into `tokens`: what one would show a model that has room for no more."""
        kept: list[int] = []
        for piece in self.pieces:
            if len(kept) + len(piece) > tokens:
                break
            kept += piece
        return tuple(kept)


@dataclass(frozen=True, slots=True)
class Example:
    """A text and the name of its class."""

    text: str
    label: str


SIZES = {
    "clinc20": Sizes(65, 500, 300),
    "clinc20-permuted": Sizes(65, 500, 300),
    "banking77": Sizes(154, 770, 308),
    "nba": Sizes(1, 48, 61),
}
TASKS = tuple(SIZES)


def load_task(
    name: str, seed: int, data: Path, tokenizer: Tokenizer, *, split: Split = Split.TEST, sizes: Sizes | None = None
) -> Task:
    """A task with the prefix of one seed. sizes: None: those of a full run.

    Raises InvalidArgument for an unknown name, NotFound where a file of `data` is missing, DataLoss where one is torn.
    """
    if name not in SIZES:
        raise InvalidArgument(f"task {name!r}: one of {', '.join(TASKS)} expected")
    wanted = sizes or SIZES[name]
    if name == "nba":
        return _nba(seed, data / "rulearena_nba", tokenizer, split, wanted)
    if name == "banking77":
        return _banking(seed, data / "banking77", tokenizer, split, wanted)
    return _clinc(name, seed, data / "clinc150", tokenizer, split, wanted)


def load_tokenizer(model: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises NotFound."""
    path = model / "tokenizer.json"
    if not path.is_file():
        raise NotFound(f"{path}: no such file")
    return Tokenizer.from_file(str(path))


def encode(tokenizer: Tokenizer, text: str) -> Tokens:
    """Token ids, without any that mark a beginning."""
    return tuple(tokenizer.encode(text, add_special_tokens=False).ids)


def _clinc(name: str, seed: int, folder: Path, tokenizer: Tokenizer, split: Split, sizes: Sizes) -> Task:
    train = [Example(text, label) for text, label in _json(folder / "train.json")]
    intents = [label for label in sorted({each.label for each in train}) if len(encode(tokenizer, f" {label}")) == 1][:INTENTS]
    asked = [Example(text, label) for text, label in _json(folder / f"{_file_of(split)}.json")]
    words = dict(zip(intents, _deranged(intents, seed) if name.endswith("permuted") else intents, strict=True))
    others = [text for text, _ in _json(folder / ("oos_val.json" if split is Split.VAL else "oos_test_open.json"))]
    return _classification(name, seed, tokenizer, train, asked, words, sizes, others)


def _banking(seed: int, folder: Path, tokenizer: Tokenizer, split: Split, sizes: Sizes) -> Task:
    """77 intents under numbers, so that what a number means stands in the prefix alone."""
    names = [str(each) for each in _json(folder / "categories.json")]
    train = _csv(folder / "train.csv")
    # banking77 has no validation part: a tenth of train, left out of prefix and traces, is one.
    chance = random.Random(0)
    chance.shuffle(train)
    held, rest = train[: len(train) // 10], train[len(train) // 10 :]
    asked = held if split is Split.VAL else _csv(folder / "test_open.csv")
    words = {name: f"{number:02d}" for number, name in enumerate(names)}
    return _classification("banking77", seed, tokenizer, rest, asked, words, sizes, [])


def _classification(
    name: str, seed: int, tokenizer: Tokenizer, train: Sequence[Example], asked: Sequence[Example], words: dict[str, str],
    sizes: Sizes, others: Sequence[str],
) -> Task:  # fmt: skip
    chance = random.Random(f"{name} {seed}")
    by_label = {label: [each for each in train if each.label == label] for label in words}
    for examples in by_label.values():
        chance.shuffle(examples)
    shown = _in_turns(by_label, sizes.examples, chance)
    shown_texts = {each.text for each in shown}
    left = {label: [each for each in examples if each.text not in shown_texts] for label, examples in by_label.items()}
    traced = _in_turns(left, sizes.traces, chance)
    picked = [each for each in asked if each.label in words]
    random.Random(f"{name} questions").shuffle(picked)  # the same questions for every seed
    picked, labels = picked[: sizes.questions], list(words)

    def shot(each: Example) -> Tokens:
        return encode(tokenizer, f"{_prompt(each.text)} {words[each.label]}\n")

    return Task(
        name=name,
        seed=seed,
        pieces=tuple(shot(each) for each in shown),
        traces=tuple(shot(each) for each in traced),
        questions=tuple(encode(tokenizer, _prompt(each.text)) for each in picked),
        labels=tuple(encode(tokenizer, f" {words[label]}") for label in labels),
        answers=tuple(labels.index(each.label) for each in picked),
        unrelated=tuple(encode(tokenizer, text) for text in others[: sizes.questions]),
    )


def _prompt(text: str) -> str:
    return f"Query: {text}\nIntent:"


def _nba(seed: int, folder: Path, tokenizer: Tokenizer, split: Split, sizes: Sizes) -> Task:
    """Which trades the rulebook allows. There is no training part: half of the problems are traces, by seed, the others questions.

    The validation questions are the traces themselves, so settings cannot be chosen here without having seen them.
    """
    rules = folder / "reference_rules.txt"
    if not rules.is_file():
        raise NotFound(f"{rules}: no such file; --data names the folder that holds rulearena_nba")
    book = encode(tokenizer, rules.read_text(encoding="utf-8"))[: NBA_RULE_TOKENS // (1 if sizes.questions > 20 else 8)]
    problems = [each for level in range(3) for each in _json(folder / f"comp_{level}_open.json")]
    random.Random(f"nba {seed}").shuffle(problems)
    traced = problems[: sizes.traces]
    picked = (traced if split is Split.VAL else problems[sizes.traces :])[: sizes.questions]
    return Task(
        name="nba",
        seed=seed,
        pieces=tuple((token,) for token in book),
        traces=tuple(encode(tokenizer, f"{_problem(each)} {'Yes' if each['answer'] else 'No'}\n") for each in traced),
        questions=tuple(encode(tokenizer, _problem(each)) for each in picked),
        labels=(encode(tokenizer, " Yes"), encode(tokenizer, " No")),
        answers=tuple(0 if each["answer"] else 1 for each in picked),
    )


def _problem(problem: dict[str, Any]) -> str:
    lines = ["", "", *problem["team_situations"], *problem["player_situations"], *problem["operations"]]
    return "\n".join([*lines, "Question: Does any operation violate the rules above?\nAnswer:"])


def _in_turns(by_label: dict[str, list[Example]], count: int, chance: random.Random) -> list[Example]:
    """`count` examples, as many of each class as of the next, in a drawn order. Raises InvalidArgument where there are not enough."""
    rounds: list[Example] = []
    for place in range(max(map(len, by_label.values()), default=0)):
        now = [examples[place] for examples in by_label.values() if place < len(examples)]
        chance.shuffle(now)
        rounds += now
    if len(rounds) < count:
        raise InvalidArgument(f"{count} examples asked for, the training part has {len(rounds)} left")
    return rounds[:count]


def _deranged(words: Sequence[str], seed: int) -> list[str]:
    """The words in another order, none at its own place: a name says nothing of its meaning."""
    chance, mixed = random.Random(f"labels {seed}"), list(words)
    while any(a == b for a, b in zip(words, mixed, strict=True)):
        chance.shuffle(mixed)
    return mixed


def _file_of(split: Split) -> str:
    return "val" if split is Split.VAL else "test_open"


def _json(path: Path) -> Any:
    return _read(path, json.loads)


def _csv(path: Path) -> list[Example]:
    rows = _read(path, lambda text: list(csv.reader(text.splitlines(), strict=True)))
    return [Example(text, label) for text, label in rows[1:]]


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    if not path.is_file():
        raise NotFound(f"{path}: no such file; --data names the folder that holds clinc150, banking77 and rulearena_nba")
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (ValueError, csv.Error) as error:
        raise DataLoss(f"{path}: not readable: {error}") from error

"""What the second act asks: each question with a long text in the prompt, with neither, and behind the text's dictionary.

Owns the questions, their form, the calls, and what counts as wrong with an answer. Text (`demo_topics.txt`), traces and questions were
written for treadle (Apache-2.0): messages to a rowing club, and what each is about. No question stands among the other two.
The order of the examples is one with which a model as small as the demo's tells most topics apart; it does not have to be right.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.cli.conversation import refusal_text
from treadle.contract.errors import DataLoss, Unavailable

if TYPE_CHECKING:
    from openai import OpenAI

    from treadle.client.worker import Worker

NAME = "club-topics"
TEXT_FILE, TRACES_FILE = (Path(__file__).with_name(name) for name in ("demo_topics.txt", "demo_topics_traces.jsonl"))
SOURCE = "written for treadle, Apache-2.0"
QUESTIONS = (
    "Since this morning my card no longer opens the door of the changing room, can somebody let me in?",
    "You sent me a bill for the whole year although I only joined in September, what do I owe?",
    "I have never sat in a boat, is there a class for adults that begins after the holidays?",
    "Shall I bring my own chairs to the party by the lake, or are there enough?",
)
ANSWER_TOKENS = 8  # a topic is one; without the text something else is said, and a few tokens show it
SCORE_SECONDS_MAX = 120.0  # a second's work on a quiet core


@dataclass(frozen=True, slots=True)
class Said:
    """One streamed answer. `usage`, `treadle`: as the gateway sent them; `seconds_to_first`: to its first text, or to its end."""

    text: str
    seconds_to_first: float
    usage: dict[str, Any]
    treadle: dict[str, Any]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """What it was made with."""
        return list(self.treadle.get("memory") or ())

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt that was sent."""
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        """Those of them whose KV was there already."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {"text": self.text, "seconds_to_first": self.seconds_to_first, "usage": self.usage, "treadle": self.treadle}


@dataclass(frozen=True, slots=True)
class Asked:
    """A question four times: with the text in the prompt, the same `again`, with neither (`without`), and `behind` the prefix."""

    question: str
    with_text: Said
    again: Said
    without: Said
    behind: Said

    @property
    def report(self) -> dict[str, Any]:
        """What the prefix did for the answer behind it; {}: nothing is said of one."""
        return next((report for report in self.behind.reports if report.get("kind") == "prefix"), {})

    def document(self) -> dict[str, Any]:
        """JSON values."""
        said = {"with_text": self.with_text, "again": self.again, "without": self.without, "behind": self.behind}
        return {"question": self.question, **{way: one.document() for way, one in said.items()}}

    def wrong(self, version: str, prefix_tokens: int) -> list[str]:
        """What is wrong with it, in words. version, prefix_tokens: of what was published"""
        found, report, about = [], self.report, repr(self.question)
        for way, said in (("with the text", self.with_text), ("with neither", self.without), ("behind the prefix", self.behind)):
            if not said.text.strip():
                found.append(f"nothing is answered {way} to {about}")
        for way, said in (("with the text in the prompt", self.with_text), ("without a prefix", self.without)):
            if said.reports:
                found.append(f"{about} was answered {way} by a memory that nobody had asked for")
        if self.with_text.cached_tokens:
            found.append(f"{self.with_text.cached_tokens} tokens of the text were cached where none was to be, for {about}")
        if not self.again.cached_tokens:
            found.append(f"nothing was cached when {about} was asked with the text again")
        if (report.get("name"), report.get("version"), len(self.behind.reports)) != (NAME, version, 1):
            found.append(f"the answer to {about} does not report {NAME} {version[:12]} as what it was made behind")
        elif report.get("fell_back") or not report.get("lookups") or report.get("prefix_tokens") != prefix_tokens:
            found.append(f"the dictionary was not used as it should be for {about}: {report}")
        if self.behind.treadle.get("degraded"):
            found.append(f"{about} was answered degraded: {report.get('missing_because') or 'it is not said why'}")
        if self.behind.prompt_tokens != self.without.prompt_tokens:
            found.append(f"behind the prefix {about} has {self.behind.prompt_tokens} tokens, alone {self.without.prompt_tokens}")
        if self.with_text.prompt_tokens - self.behind.prompt_tokens != prefix_tokens:
            found.append(
                f"the text adds {self.with_text.prompt_tokens - self.behind.prompt_tokens} tokens to {about}, "
                f"the dictionary stands for {prefix_tokens}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Likelihood:
    """Mean log-probability, nats a token, of the answers that the text in the prompt gave: behind it, behind nothing, behind the prefix."""

    tokens: int
    with_text: float
    without: float
    behind: float


def prompt_of(question: str) -> str:
    """A question in the form that text and traces have."""
    return f"Message: {question}\nTopic:"


def answers(client: OpenAI, model: str) -> Iterator[Asked]:
    """Ask every question all four ways, one after another. Raises Unavailable."""
    text = TEXT_FILE.read_text(encoding="utf-8")
    for number, question in enumerate(QUESTIONS, 1):
        salt, prompt = f"{NAME}-{number}", prompt_of(question)  # a salt of its own: nothing of the text is cached for it yet
        yield Asked(
            question, _say(client, model, text + prompt, salt), _say(client, model, text + prompt, salt), _say(client, model, prompt, salt),
            _say(client, model, prompt, salt, NAME),
        )  # fmt: skip


def likelihood(worker: Worker, ids_of: Callable[[str], Sequence[int]], asked: Sequence[Asked]) -> Likelihood:
    """Have the worker score what was answered with the text. ids_of: token ids of a text. Raises what its calls do, DataLoss."""
    text, tokens, sums = TEXT_FILE.read_text(encoding="utf-8"), 0, [0.0, 0.0, 0.0]
    for one in asked:
        prompt = prompt_of(one.question)
        answer = len(ids_of(prompt + one.with_text.text)) - len(ids_of(prompt))
        if answer < 1:
            continue  # an answer without text: `Asked.wrong` says so
        tokens += answer
        for way, (before, prefix) in enumerate(((text, ""), ("", ""), ("", NAME))):
            sums[way] += _log_prob(worker, ids_of(before + prompt + one.with_text.text), answer, prefix)
    if not tokens:
        raise DataLoss("no answer has a token that could be scored")
    return Likelihood(tokens, *(total / tokens for total in sums))


def _log_prob(worker: Worker, ids: Sequence[int], last: int, prefix: str) -> float:
    from treadle.inference.v1 import worker_pb2 as pb

    request = pb.GenerateRequest(
        prompt_token_ids=ids, sampling=pb.Sampling(max_tokens=1, prompt_logprobs=True, ignore_eos=True), engram=pb.EngramChoice(model=""),
        prefix=pb.PrefixChoice(name=prefix) if prefix else None,
    )  # fmt: skip
    scored = [token for piece in worker.generate(request, SCORE_SECONDS_MAX) for token in piece.prompt_logprobs]
    if [token.token_id for token in scored] != list(ids[1:]):
        raise DataLoss(f"the worker sent log-probabilities of {len(scored)} tokens, not of the {len(ids) - 1} that were asked for")
    return math.fsum(token.logprob for token in scored[-last:])


def _say(client: OpenAI, model: str, prompt: str, salt: str, prefix: str = "none") -> Said:
    import openai

    began, first, pieces, usage, treadle = time.monotonic(), 0.0, list[str](), dict[str, Any](), dict[str, Any]()
    try:
        stream = client.completions.create(
            model=model, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0, stop=["\n"], stream=True,
            stream_options={"include_usage": True},
            extra_body={"cache_salt": salt, "treadle": {"engram": "none", "prefix": prefix}},
        )  # fmt: skip
        with stream:
            for chunk in stream:
                if chunk.choices and chunk.choices[0].text:
                    first = first or time.monotonic() - began
                    pieces.append(chunk.choices[0].text)
                usage = chunk.usage.model_dump(exclude_none=True) if chunk.usage is not None else usage
                treadle = (chunk.model_extra or {}).get("treadle") or treadle
    except openai.OpenAIError as error:
        raise Unavailable(f"{model} did not answer {prompt[-80:]!r}: {refusal_text(error)}; `treadle logs` may say why") from error
    return Said("".join(pieces), first or time.monotonic() - began, usage, treadle)

"""The demo's prompts: each answered without and with a memory at the same time, by any OpenAI client's call.

Owns the prompts and what counts as wrong with an answer. Does not print.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.cli.conversation import refusal_text
from treadle.contract.errors import Unavailable

if TYPE_CHECKING:
    from openai import OpenAI

PROMPTS = (
    "And the LORD spake unto Moses,",
    "In the beginning God",
    "The capital of France is",  # what the memory does to text that is none of its business
)
ANSWER_TOKENS = 40  # three lines, before a greedy answer of a small model begins to repeat itself


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer. `treadle`: the object of that name as the gateway sent it."""

    model: str
    text: str
    usage: dict[str, Any]
    treadle: dict[str, Any]
    seconds: float

    @property
    def memories(self) -> list[dict[str, Any]]:
        """Reports of the memories that it was made with."""
        return list(self.treadle.get("memory") or ())

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {"model": self.model, "text": self.text, "usage": self.usage, "treadle": self.treadle, "seconds": self.seconds}


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt answered by the same model without (`plain`) and with a memory (`informed`)."""

    prompt: str
    plain: Completion
    informed: Completion

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {"prompt": self.prompt, "without": self.plain.document(), "with": self.informed.document()}

    def wrong(self, memory: str) -> list[str]:
        """What is wrong with it, in words."""
        found = [
            f"{answer.model} answers nothing to {self.prompt!r}" for answer in (self.plain, self.informed) if not answer.text.strip()
        ]  # fmt: skip
        if self.plain.memories:
            found.append(f"{self.plain.model} answered {self.prompt!r} with a memory that nobody had asked for")
        if [report.get("name") for report in self.informed.memories] != [memory]:
            found.append(f"{self.informed.model} does not report {memory} as the memory that answered {self.prompt!r}")
        if self.informed.treadle.get("degraded"):
            found.append(f"{self.informed.model} answered {self.prompt!r} with rows missing")
        return found


def pairs(client: OpenAI, model: str, memory: str) -> Iterator[Pair]:
    """Answer each prompt under the names `MODEL+none` and `MODEL+MEMORY`, both at once. Raises Unavailable."""
    names = (f"{model}+none", f"{model}+{memory}")
    with ThreadPoolExecutor(len(names), thread_name_prefix="treadle-demo") as pool:
        for prompt in PROMPTS:
            plain, informed = pool.map(lambda name, prompt=prompt: _complete(client, name, prompt), names)
            yield Pair(prompt, plain, informed)


def _complete(client: OpenAI, model: str, prompt: str) -> Completion:
    import openai

    began = time.monotonic()
    try:
        answer = client.completions.create(model=model, prompt=prompt, max_tokens=ANSWER_TOKENS, temperature=0)
    except openai.OpenAIError as error:
        raise Unavailable(f"{model} did not answer {prompt!r}: {refusal_text(error)}; `treadle logs` may say why") from error
    treadle = (answer.model_extra or {}).get("treadle")
    usage = answer.usage.model_dump(exclude_none=True) if answer.usage is not None else {}
    text = answer.choices[0].text if answer.choices else ""
    return Completion(model, text, usage, treadle if isinstance(treadle, dict) else {}, time.monotonic() - began)

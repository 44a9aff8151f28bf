"""Questions and answers through OpenAI's SDK: one stream, its pieces, its end, and a bounded history.

Owns calling the gateway as any OpenAI client would. Does not print or read keys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treadle.contract.errors import AccessDenied, InvalidArgument, NotFound, TreadleError, Unavailable

if TYPE_CHECKING:
    from openai import OpenAI, OpenAIError

HISTORY_MESSAGES_MAX = 40  # older turns are left out; the model's own limit comes long before with most
ANSWER_SECONDS_MAX = 600.0
_MEMORY_FIELD = "treadle.engram"  # of a request; people wrote an option, or a line behind a slash
_MEMORY_FIELD_TOLD = re.compile(rf"'{re.escape(_MEMORY_FIELD)}'(: engram\.\w+)?")  # the worker's word for it may follow


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `usage` and `memory` (the `treadle` object) as the gateway sent them; `stopped`: cut off by the asker."""

    text: str
    finish_reason: str | None
    seconds_to_first: float | None
    seconds: float
    usage: dict[str, Any]
    memory: dict[str, Any]
    stopped: bool = False

    @property
    def broke_off(self) -> bool:
        """True if it ended without being asked to, and without saying why."""
        return self.finish_reason is None and not self.stopped


@dataclass(slots=True)
class Conversation:
    """A conversation with one model. Not thread-safe.

    engram: the memory to answer with, as the gateway's field `treadle.engram`; None: what the model's name or the key says
    engram_option: where the asker chose it, for errors
    prefix: the long prefix to answer behind, as the gateway's field `treadle.prefix`; None: none
    """

    client: OpenAI
    model: str
    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    engram: str | None = None
    engram_option: str = "--engram"
    prefix: str | None = None
    _turns: list[dict[str, str]] = field(default_factory=list)

    def ask(self, question: str, on_text: Callable[[str], None]) -> Answer:
        """Ask; `on_text` gets the pieces as they come. KeyboardInterrupt inside ends the answer, not the program.

        Raises Unavailable (no gateway, no worker, stream broken), AccessDenied, NotFound (model), InvalidArgument.
        """
        import openai

        self._turns.append({"role": "user", "content": question})
        try:
            answer = self._stream(on_text)
        except openai.OpenAIError as error:
            self._turns.pop()
            raise self._as_ours(error) from error
        self._turns.append({"role": "assistant", "content": answer.text})
        del self._turns[:-HISTORY_MESSAGES_MAX]
        return answer

    def forget(self) -> None:
        """Begin anew."""
        self._turns.clear()

    def _stream(self, on_text: Callable[[str], None]) -> Answer:
        started, first, pieces, last = time.monotonic(), None, [], _Last()
        messages: list[Any] = [{"role": "system", "content": self.system}] if self.system else []
        chosen = {name: value for name, value in (("engram", self.engram), ("prefix", self.prefix)) if value is not None}
        memory = {"treadle": chosen} if chosen else None
        optional = {"max_tokens": self.max_tokens, "temperature": self.temperature, "extra_body": memory}
        try:
            stream = self.client.chat.completions.create(
                model=self.model, messages=messages + self._turns, stream=True, stream_options={"include_usage": True},
                **{name: value for name, value in optional.items() if value is not None},  # type: ignore[call-overload]
            )  # fmt: skip
            with stream:
                for chunk in stream:
                    last.take(chunk)
                    text = chunk.choices[0].delta.content if chunk.choices else None
                    if text:
                        first = first or time.monotonic()
                        pieces.append(text)
                        on_text(text)
        except KeyboardInterrupt:  # leaving the stream closes the connection, which stops the generation
            last.stopped = True
        ended = time.monotonic()
        waited = first - started if first else None
        return Answer("".join(pieces), last.finish_reason, waited, ended - started, last.usage, last.memory, last.stopped)

    def _as_ours(self, error: OpenAIError) -> TreadleError:
        import openai

        if isinstance(error, openai.APIConnectionError):
            return Unavailable(f"the gateway does not answer ({error.__cause__ or error}); is it up? `treadle status`")
        if not isinstance(error, openai.APIStatusError):
            return Unavailable(f"the answer broke off: {error}")
        text = refusal_text(error)
        if error.param == _MEMORY_FIELD:
            text = _MEMORY_FIELD_TOLD.sub(self.engram_option, text)
            if self.engram_option not in text:  # the key's default memory, say
                text += f"; {self.engram_option} chooses another memory"
        kinds: dict[int, type[TreadleError]] = {401: AccessDenied, 403: AccessDenied, 404: NotFound}
        return kinds.get(error.status_code, Unavailable if error.status_code >= 500 else InvalidArgument)(text)


@dataclass(slots=True)
class _Last:
    """What only some chunks of a stream carry."""

    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False

    def take(self, chunk: Any) -> None:
        if chunk.choices and chunk.choices[0].finish_reason:
            self.finish_reason = chunk.choices[0].finish_reason
        if chunk.usage is not None:
            self.usage = chunk.usage.model_dump(exclude_none=True)
        memory = (chunk.model_extra or {}).get("treadle")
        if isinstance(memory, dict):
            self.memory = memory


def connect(url: str, key: str | None) -> OpenAI:
    """OpenAI's client for a gateway. NotFound, saying what to install, without its package."""
    try:
        import openai
    except ImportError:
        raise NotFound("the package `openai` is needed for this: pip install 'treadle[fabric]'") from None
    # No retries: a person or a demo should see what happened, not a second try of it.
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key or "none", max_retries=0, timeout=ANSWER_SECONDS_MAX)


def refusal_text(error: OpenAIError) -> str:
    """What a gateway says of a request that it refuses: its message; of another answer the code, of no answer the error itself."""
    import openai

    if not isinstance(error, openai.APIStatusError):
        return str(error)
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return str(message or f"the gateway answers {error.status_code} {error.response.reason_phrase}, with nothing that says why")

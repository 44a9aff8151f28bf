"""What the gateway needs from outside: a worker, prompts made into token ids, somewhere to count."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from inference_gateway.domain.generation import Generation, Message, Piece, Usage, WorkerStatus
from inference_gateway.domain.memories import ChosenBy

Result = TypeVar("Result")


class Worker(Protocol):
    """Something that runs the model. Raises the errors of `treadle.contract`."""

    def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        """Pieces as they come, the last with a finish reason. Closing the generator stops the worker.

        Raises MemoryRefused before the first piece if the memory that was chosen cannot be used.
        """
        ...

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        """What it runs now."""
        ...


class PromptEncoder(Protocol):
    """Tokenizer and chat template of one model. Blocking: call it in a thread, and it lets other threads run.

    Raises RequestRefused for what is certain to have more than `tokens_max` tokens; what has no more is always encoded.
    """

    def encode_chat(self, messages: Sequence[Message], tokens_max: int) -> list[int]:
        """Token ids of the turns with the opening of an answer. Raises RequestRefused if the template refuses them."""
        ...

    def encode_text(self, text: str, tokens_max: int) -> list[int]:
        """Token ids of a text, with the special tokens that the model expects at its ends."""
        ...


class EncoderSource(Protocol):
    """Where prompt encoders come from. Blocking: call it in a thread."""

    def __call__(self, folder: Path, tokenizer_digest: str) -> PromptEncoder:
        """The encoder of a model folder. Raises NotFound, InvalidArgument, or FingerprintMismatch if the digest differs."""
        ...


class InThread(Protocol):
    """Runs blocking work in the process's bounded pool of threads."""

    def __call__(self, work: Callable[[], Result], /) -> Awaitable[Result]:
        """The result of `work`, computed in a thread."""
        ...


class Figures(Protocol):
    """Counts what happens. Labels come from small fixed sets."""

    def request_began(self, route: str) -> None:
        """A request came in."""
        ...

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """It is over: `outcome` is ok, refused, busy, late, left or failed."""
        ...

    def first_token(self, seconds: float) -> None:
        """Seconds from the request to its first token."""
        ...

    def tokens_came(self, count: int, seconds: float) -> None:
        """`count` tokens came `seconds` after the ones before them."""
        ...

    def tokens_used(self, usage: Usage) -> None:
        """Tokens of one generation, complete or not."""
        ...

    def field_ignored(self, field: str) -> None:
        """A request had a field that means nothing here."""
        ...

    def memory_chosen(self, by: ChosenBy, used: bool) -> None:
        """A request's memory was settled: whose choice it was, and whether there is one."""
        ...

    def answer_degraded(self) -> None:
        """An answer was made with memory missing."""
        ...

    def client_left(self) -> None:
        """A client closed its connection before the answer was complete."""
        ...

    def exposition(self) -> tuple[bytes, str]:
        """All figures in Prometheus's format, and its content type."""
        ...

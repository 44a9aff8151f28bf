"""What the gateway needs from outside: a worker, prompts made into token ids, somewhere to count."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from inference_gateway.domain.block_index import BlockChanges
from inference_gateway.domain.generation import ChatPrompt, Generation, Piece, Usage, WorkerStatus
from inference_gateway.domain.memories import ChosenBy
from inference_gateway.domain.tool_calls import ToolForm

Result = TypeVar("Result")


class Worker(Protocol):
    """Something that runs the model. Raises the errors of `treadle.contract`."""

    def generate(self, generation: Generation, timeout_seconds: float) -> AsyncGenerator[Piece, None]:
        """Pieces as they come, the last with a finish reason. Closing the generator stops the worker.

        Raises MemoryRefused before the first piece if the memory that was chosen cannot be used.
        """
        ...

    async def embed(self, request_id: str, texts: Sequence[Sequence[int]], timeout_seconds: float) -> list[bytes]:
        """Vectors of texts, given as token ids: float32 little-endian, of length 1, in their order."""
        ...

    async def status(self, timeout_seconds: float) -> WorkerStatus:
        """What it runs now."""
        ...

    def watch_blocks(self, timeout_seconds: float) -> AsyncGenerator[BlockChanges, None]:
        """What lies in its prefix cache: first everything, then what changes."""
        ...


class PromptEncoder(Protocol):
    """Tokenizer and chat template of one model. Blocking: call it in a thread, and it lets other threads run;
    of what is short the call itself takes less than the way there.

    Raises RequestRefused for what is certain to have more than `tokens_max` tokens; what has no more is always encoded.
    """

    @property
    def tool_form(self) -> ToolForm | None:
        """How the model writes calls of tools; None: in no form that is read, and they stay text."""
        ...

    def encode_chat(self, prompt: ChatPrompt, tokens_max: int) -> list[int]:
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


class Hints(Protocol):
    """Tells pools of memory which tokens will be looked up."""

    def tell(self, memory: str, version: str, token_ids: Sequence[int]) -> None:
        """Returns at once and never fails: what cannot be told is left. version: whole; empty: the current one."""
        ...


class NoHints:
    """The Hints of a gateway that knows no pool."""

    def tell(self, memory: str, version: str, token_ids: Sequence[int]) -> None:
        """See Hints."""


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

    def hint_ended(self, outcome: str) -> None:
        """A prompt was told to a pool: taken, near (nothing to do there, or no room), failed. Or it was not: quiet (the last one was
        near or failed, a moment ago), left (too many are on their way)."""
        ...

    def answer_degraded(self, memory: str, because: str) -> None:
        """An answer was made with that memory missing; why, in the worker's word, "" where it has none."""
        ...

    def request_limited(self, limit: str, tenant: str) -> None:
        """A request was refused by a limit of its key. `tenant`: as configured, or empty."""
        ...

    def keys_changed(self, outcome: str) -> None:
        """The key file changed: `read`, `empty` or `failed`."""
        ...

    def tenant_tokens(self, tenant: str, kind: str, count: int) -> None:
        """Tokens of a generation of a configured tenant; kind: prompt or completion."""
        ...

    def client_left(self) -> None:
        """A client closed its connection before the answer was complete."""
        ...

    def client_unread(self) -> None:
        """A connection was ended because its client did not take what waited for it."""
        ...

    def exposition(self) -> tuple[bytes, str]:
        """All figures in Prometheus's format, and its content type."""
        ...


class LineFigures(Protocol):
    """Counts what happens in the line before the workers."""

    def waited(self, seconds: float) -> None:
        """A request got its place after so long."""
        ...

    def refused(self, reason: str) -> None:
        """A request got none: `wait` (it would have been too long), `waited` (it was), `full` (the line)."""
        ...


class DispatchFigures(LineFigures, Protocol):
    """Counts what happens between the gateway and its workers. Labels come from small fixed sets."""

    def retried(self, reason: str) -> None:
        """A generation is asked for again: its worker was `lost`, `stalled`, `busy` or `unavailable`."""
        ...

    def hedged(self, outcome: str) -> None:
        """A second worker was asked for a first token: it `won`, it `lost`, or both `failed`."""
        ...

    def stalled(self, when: str) -> None:
        """A worker gave no piece in time: no `first` one, or none `between`."""
        ...

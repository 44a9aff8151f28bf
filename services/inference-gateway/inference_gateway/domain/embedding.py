"""Vectors of texts: checks what is asked against the model, encodes the texts, asks a worker that makes vectors.

Vectors are made without memory. A request for them changes nothing, so another worker is asked where one is lost or busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from inference_gateway.domain.calls import blames_worker, retry_reason
from inference_gateway.domain.errors import RequestRefused, WorkerLost, WorkerStalled
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generation import TextPrompt, TokenPrompt, Usage
from inference_gateway.domain.member import Member
from inference_gateway.domain.ports import Figures, InThread
from inference_gateway.domain.served_model import ServedModel
from treadle.contract import Deadline
from treadle.contract.errors import TreadleError, Unavailable


@dataclass(frozen=True, slots=True)
class Vectors:
    """`values`: float32 little-endian of one vector each, in the order of the inputs. `prompt_tokens`: of all inputs."""

    model: str
    values: Sequence[bytes]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A request for vectors that can be served."""

    model: ServedModel
    texts: Sequence[Sequence[int]]

    @property
    def prompt_tokens(self) -> int:
        """Of all texts."""
        return sum(len(text) for text in self.texts)


class Embedding:
    """Serves requests for vectors with the workers of a fleet."""

    def __init__(
        self, fleet: Fleet, in_thread: InThread, figures: Figures, silence_seconds_max: float, attempts_max: int = 3
    ) -> None:
        """silence_seconds_max: longest wait for a worker's vectors, which come all at once. attempts_max: workers asked for one request."""
        self._fleet, self._in_thread, self._figures = fleet, in_thread, figures
        self._silence_seconds_max, self._attempts_max = silence_seconds_max, attempts_max

    async def plan(self, asked: str, inputs: Sequence[TextPrompt | TokenPrompt], dimensions: int | None) -> EmbeddingPlan:
        """Check and encode. Raises ModelNotFound, RequestRefused (naming the field), Unavailable (no worker)."""
        model = await self._fleet.confirmed(asked)
        if asked != model.name:
            raise RequestRefused(
                f"'model': vectors are made without memory; ask for {model.name!r}", param="model", code="invalid_value"
            )
        members = self._able(model.name)
        if not members:
            raise RequestRefused(
                f"'model': {model.name!r} runs on an engine that makes no vectors", param="model", code="embeddings_not_supported"
            )
        dimension = members[0].watch.status.embedding_dim if members[0].watch.status is not None else 0
        if dimensions not in (None, dimension):
            raise RequestRefused(
                f"'dimensions': vectors of {model.name!r} have {dimension}, and cannot be shortened", param="dimensions",
                code="unsupported_value",
            )  # fmt: skip
        return EmbeddingPlan(model, await asyncio.gather(*(self._encode(model, place, each) for place, each in enumerate(inputs))))

    async def vectors(self, plan: EmbeddingPlan, request_id: str, deadline: Deadline) -> Vectors:
        """The vectors. Raises what workers raise, and Unavailable where none is there any more."""
        tried: list[Member] = []
        failure: TreadleError | None = None
        while len(tried) < self._attempts_max:
            deadline.check(before="the vectors are made")
            member = next((each for each in self._able(plan.model.name) if each not in tried), None)
            if member is None:
                break
            tried.append(member)
            try:
                values = await _ask(member, request_id, plan.texts, deadline, self._silence_seconds_max)
                self._figures.tokens_used(Usage(plan.prompt_tokens, 0, 0))
                return Vectors(plan.model.name, values, plan.prompt_tokens)
            except TreadleError as error:
                if retry_reason(error) is None:
                    raise
                failure = error
        raise failure or Unavailable(f"no worker is ready: {self._fleet.not_ready_because() or 'none that makes vectors'}")

    def _able(self, model: str) -> list[Member]:
        """Members that make vectors, the least loaded first; among equals who was not asked for longest."""
        able = [member for member in self._fleet.usable(model) if (status := member.watch.status) and status.embedding_dim]
        return sorted(able, key=lambda member: (member.load, member.asked_last))

    async def _encode(self, model: ServedModel, place: int, text: TextPrompt | TokenPrompt) -> Sequence[int]:
        field, limit = f"input[{place}]", model.context_tokens_max
        if isinstance(text, TokenPrompt):
            token_ids: Sequence[int] = text.token_ids
        else:
            try:
                token_ids = await self._in_thread(lambda: model.encoder.encode_text(text.text, limit))
            except RequestRefused as error:
                raise RequestRefused(str(error).replace("the prompt", f"'{field}'"), param=field, code=error.code) from error
        if not 1 <= len(token_ids) <= limit:
            raise RequestRefused(
                f"'{field}': 1 to {limit} tokens, got {len(token_ids)}", param=field,
                code="context_length_exceeded" if token_ids else "invalid_value",
            )  # fmt: skip
        return token_ids


async def _ask(
    member: Member, request_id: str, texts: Sequence[Sequence[int]], deadline: Deadline, silence_seconds_max: float
) -> Sequence[bytes]:
    """Ask one worker, and tell its breaker and watch what came of it."""
    decided, limit = False, asyncio.timeout(silence_seconds_max)
    member.begin()
    probe = member.breaker.began()
    try:
        try:
            async with limit:
                values = await member.worker.embed(request_id, texts, deadline.remaining_seconds())
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WorkerStalled(f"the worker sent no vectors for {silence_seconds_max:g} seconds") from error
        if len(values) != len(texts):
            raise WorkerLost(f"the worker gave {len(values)} vectors for {len(texts)} texts")
        decided = True
        member.breaker.succeeded()
        return values
    except TreadleError as error:
        if blames_worker(error):
            decided = True
            member.breaker.failed(probe)
        if isinstance(error, WorkerLost | WorkerStalled):
            member.watch.lost()
        raise
    finally:
        member.end()
        if not decided:
            member.breaker.undecided(probe)

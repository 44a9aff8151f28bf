"""vLLM's outputs of one request as our pieces: the same text, stop strings, log-probabilities and reports as of the embedded engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput

from inference_worker.domain.errors import MemoryMissing, StepFailed
from inference_worker.domain.prefix_run import OFF_TASK
from inference_worker.domain.request import Finish, FinishReason, MemoryReport, Piece, Request, TokenLogprob, Usage
from inference_worker.domain.text import TextStream, Vocabulary
from treadle.contract.errors import TreadleError
from treadle.vllm.outcomes import BEGIN_ANEW, RequestOutcome, UsedPrefix, outcome_of


class BeginsAnew(Exception):
    """The request is off the task of its prefix's dictionary: nothing of it has gone out, and it is asked again."""


class VllmAnswer:
    """What came of one request so far.

    stops: every token that ends it, the model's own included; their text is not part of the answer
    """

    def __init__(self, request: Request, vocabulary: Vocabulary, stops: frozenset[int]) -> None:
        self._request, self._vocabulary, self._stops = request, vocabulary, stops
        self._text = TextStream(vocabulary, request.sampling.stop)
        self._outcome: RequestOutcome | None = None
        self._first_pass: UsedPrefix | None = None  # off the dictionary's task: what came of it is no part of the answer
        self.generated, self.cached, self.begun = 0, 0, False

    def take(self, output: RequestOutput) -> Piece:
        """The piece that an output makes; its `finish` is set once the answer is whole, with tokens of vLLM's to spare or not.

        Raises BeginsAnew where the request is to be asked again, behind the exact KV of its prefix, and the error with which vLLM's
        side ended it.
        """
        self._outcome = outcome_of(output) or self._outcome
        if self._outcome is not None and self._outcome.error is not None:
            if self._outcome.error.kind == BEGIN_ANEW:
                self._first_pass, self._outcome = self._outcome.prefix, None
                raise BeginsAnew
            raise error_of(self._outcome)
        self.begun, self.cached = True, max(self.cached, output.num_cached_tokens or 0)
        completion, piece = output.outputs[0], Piece()
        if self._request.sampling.prompt_logprobs and output.prompt_logprobs:
            rows = zip(self._request.prompt[1:], output.prompt_logprobs[1:], strict=True)
            piece.prompt_logprobs = [self._logprob(token, row) for token, row in rows if row is not None]
        ended = False
        for place, token in enumerate(completion.token_ids):
            self._take_token(piece, int(token), completion.logprobs[place] if completion.logprobs else None)
            ended = token in self._stops or self._text.stopped
            if ended:
                break
        reason = FinishReason.STOP if ended else FinishReason.LENGTH if output.finished else None
        if output.finished and not ended and completion.finish_reason != "length":
            raise StepFailed(f"vllm ended the answer with {completion.finish_reason!r}; the worker's log has the details")
        piece.degraded = bool(self._request.missing) or (self._outcome is not None and self._outcome.degraded)
        if reason is not None:
            piece.text += self._text.flush()
            piece.finish = Finish(reason, self.usage, self._reports())
        return piece

    @property
    def usage(self) -> Usage:
        """Tokens counted so far."""
        return Usage(len(self._request.prompt), self.cached, self.generated)

    @property
    def tokens_run(self) -> int:
        """Tokens that ran through the model: the last one chosen did not."""
        return max(len(self._request.prompt) - self.cached + self.generated - 1, 0) if self.begun else 0

    def _take_token(self, piece: Piece, token: int, row: Mapping[int, Logprob] | None) -> None:
        piece.token_ids.append(token)
        self.generated += 1
        if self._request.sampling.top_logprobs is not None and row is not None:
            piece.logprobs.append(self._logprob(token, row))
        if token not in self._stops:
            piece.text += self._text.push(token)

    def _logprob(self, token: int, row: Mapping[int, Logprob]) -> TokenLogprob:
        """One place of the text: vLLM gives the chosen token and the best ones, each with its rank from 1."""
        top = self._request.sampling.top_logprobs or 0
        best = sorted(((entry.rank or 0, other, entry.logprob) for other, entry in row.items() if 0 < (entry.rank or 0) <= top))
        tops = tuple(TokenLogprob(other, self._vocabulary.bytes_of(other), value) for _, other, value in best[:top])
        return TokenLogprob(token, self._vocabulary.bytes_of(token), row[token].logprob, tops)

    @property
    def prefix(self) -> PrefixOutcome | None:
        """What its prefix did for it so far; None: it has none, or vLLM has not said."""
        used = self._outcome.prefix if self._outcome is not None else None
        if self._first_pass is not None:
            return PrefixOutcome(self._first_pass, "exact")
        return None if used is None else PrefixOutcome(used, "off_task" if used.off_task else "dictionary")

    def _reports(self) -> tuple[MemoryReport, ...]:
        reports, outcome, prefix = [], self._outcome, self.prefix
        if outcome is not None and outcome.memory is not None:
            memory = outcome.memory
            reports.append(
                MemoryReport(
                    "engram", memory.name, memory.version, memory.transport, outcome.tickets, outcome.tickets_in_time,
                    outcome.rows_missing, memory.shadowed, outcome.missing_because,
                )
            )  # fmt: skip
        return (*reports, *([] if prefix is None else [prefix.report]), *self._request.missing)


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """What a long prefix did for a request. answered: dictionary, exact or off_task, as metrics say it"""

    used: UsedPrefix
    answered: str

    @property
    def report(self) -> MemoryReport:
        """For the caller."""
        used = self.used
        return MemoryReport(
            "prefix", used.name, used.version, "mapped", 0, 0, 0, False, OFF_TASK if self.answered == "off_task" else "", used.lookups,
            used.lookups_outside, self.answered == "exact", used.tokens,
        )  # fmt: skip


# What a memory that cannot be had just now ends with; a key that is refused, say, is told as what it is, degraded or not.
MISSING_KINDS = ("Unavailable", "DeadlineExceeded", "ResourceExhausted")


def error_of(outcome: RequestOutcome) -> TreadleError:
    """The error that vLLM's side named: rows that a request would rather fail for are MemoryMissing, as of the embedded engine."""
    assert outcome.error is not None, "asked of an outcome with an error"
    missing = outcome.degraded and outcome.error.kind in MISSING_KINDS
    return MemoryMissing(outcome.error.message) if missing else outcome.error.error()

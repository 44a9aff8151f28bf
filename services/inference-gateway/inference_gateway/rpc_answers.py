"""Pieces of a generation as GatewayService's messages."""

from __future__ import annotations

from collections.abc import Sequence

from inference_gateway.domain.generation import FinishReason, Piece, TokenLogprob
from inference_gateway.domain.several import Ends
from inference_gateway.domain.tool_calls import CallReader, ToolCall
from treadle.inference.v1 import gateway_pb2 as pb
from treadle.inference.v1 import worker_pb2

_ENDS = {
    FinishReason.STOP: pb.ANSWER_END_STOP,
    FinishReason.LENGTH: pb.ANSWER_END_LENGTH,
    FinishReason.TOOL_CALLS: pb.ANSWER_END_TOOL_CALLS,
    FinishReason.ABORT: pb.ANSWER_END_ABORT,
}


class AnswerPieces:
    """Writes the pieces of one request's answers."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._ends = Ends(())
        self._readers: list[CallReader] = []
        self.begun = False

    def begin(self, ends: Ends, *, reads_calls: bool) -> None:
        """From here on pieces are written. `ends` counts them."""
        self._ends, self.begun = ends, True
        self._readers = [CallReader() for _ in range(ends.choices)] if reads_calls else []

    def write(self, piece: Piece) -> pb.AnswerPiece:
        """A piece; the very last one with the usage and what memory did."""
        self._ends.saw(piece)
        calls: Sequence[ToolCall] = ()
        text, finish = piece.text, piece.finish_reason
        if self._readers:
            text, calls, finish = self._readers[piece.choice].read(piece.text, finish)
        written = pb.AnswerPiece(
            request_id=self._request_id, choice=piece.choice, token_ids=piece.token_ids, text_delta=text,
            logprobs=_logprobs(piece.logprobs), tool_calls=[_call(call) for call in calls], degraded=self._ends.degraded,
        )  # fmt: skip
        if finish is not None:
            written.end = _ENDS[finish]
            if self._ends.complete:
                self._finish(written)
        return written

    def cut(self) -> list[pb.AnswerPiece]:
        """The ends of the answers that were cut off."""
        return [self.write(piece) for piece in self._ends.cut()]

    def _finish(self, written: pb.AnswerPiece) -> None:
        usage = self._ends.usage
        written.usage.CopyFrom(
            worker_pb2.Usage(
                prompt_tokens=usage.prompt_tokens, cached_tokens=usage.cached_tokens, completion_tokens=usage.completion_tokens
            )
        )
        for report in self._ends.memory:
            written.memory.add(
                kind=report.kind, name=report.name, version=report.version, transport=report.transport, tickets=report.tickets,
                tickets_in_time=report.tickets_in_time, rows_missing=report.rows_missing, shadowed=report.shadowed,
                missing_because=report.missing_because, lookups=report.lookups, lookups_outside=report.lookups_outside,
                fell_back=report.fell_back, prefix_tokens=report.prefix_tokens,
            )  # fmt: skip


def _logprobs(items: Sequence[TokenLogprob]) -> list[worker_pb2.TokenLogprob]:
    return [
        worker_pb2.TokenLogprob(token_id=item.token_id, text=item.text, logprob=item.logprob, top=_logprobs(item.top))
        for item in items
    ]


def _call(call: ToolCall) -> pb.ChatToolCall:
    return pb.ChatToolCall(id=call.id, name=call.name, arguments_json=call.arguments)

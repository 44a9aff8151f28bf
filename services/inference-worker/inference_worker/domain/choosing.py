"""Chooses the next token of a sequence and makes the piece of its answer from it.

Owns text, log-probabilities and why an answer is over. Does not compute hidden states, know the batch or deliver anything (the engine).
"""

from __future__ import annotations

from torch import Tensor

from inference_worker.domain import sampling
from inference_worker.domain.request import Finish, FinishReason, MemoryReport, Piece
from inference_worker.domain.scheduler import Slot
from inference_worker.domain.sequence import Sequence
from inference_worker.domain.text import Vocabulary
from treadle.nn.model import CausalLM

LOGPROB_ROWS = 64  # rows of logits at once for prompt log-probabilities: 12 MiB at 49,152 tokens


class Chooser:
    """Of one model. eos_token_ids: what ends an answer unless its request says otherwise; token_count: tokens that may be chosen."""

    def __init__(self, model: CausalLM, vocabulary: Vocabulary) -> None:
        self._model, self._vocabulary = model, vocabulary
        self.eos_token_ids = frozenset(model.config.eos_token_ids)
        # Rows of the output matrix past the tokenizer's last id are padding: no text, no place in a token map, never chosen.
        self.token_count = min(model.config.vocab, len(vocabulary.pieces))

    def next_piece(self, sequence: Sequence, logits: Tensor) -> Piece:
        """Choose a token by the logits [vocabulary] after the last one, and add it; what the caller hears of it, to the end if it is over."""
        wanted = sequence.request.sampling
        steered = sampling.steered(
            logits[: self.token_count], wanted, sequence.request.prompt, sequence.tokens[sequence.prompt_length :]
        )
        token = sampling.choose(steered, wanted, sequence.generator)
        sequence.tokens.append(token)
        piece = Piece([token], degraded=sequence.degraded)
        if wanted.top_logprobs is not None:
            piece.logprobs = sampling.logprobs(logits.unsqueeze(0), [token], wanted.top_logprobs, self._vocabulary)
        piece.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        ends = token in wanted.stop_token_ids or (token in self.eos_token_ids and not wanted.ignore_eos)
        if not ends:
            piece.text = sequence.text.push(token)
        reason = None
        if ends or sequence.text.stopped:
            reason = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.tokens_max:
            reason = FinishReason.LENGTH
        if reason is not None:
            piece.text += sequence.text.flush()
            piece.finish = Finish(reason, sequence.usage, _memory_reports(sequence))
        return piece

    def add_prompt_logprobs(self, slot: Slot, hidden: Tensor) -> None:
        """Log-probabilities of the prompt tokens that follow the slot's own. hidden: [count, hidden]"""
        sequence = slot.sequence
        if not sequence.request.sampling.prompt_logprobs:
            return
        following = sequence.request.prompt[slot.first + 1 : slot.first + 1 + slot.count]
        for first in range(0, len(following), LOGPROB_ROWS):
            chosen = list(following[first : first + LOGPROB_ROWS])
            logits = self._model.logits(hidden[first : first + len(chosen)])
            top = sequence.request.sampling.top_logprobs or 0
            sequence.prompt_logprobs += sampling.logprobs(logits, chosen, top, self._vocabulary)


def _memory_reports(sequence: Sequence) -> tuple[MemoryReport, ...]:
    memory, prefix = sequence.lease.memory, sequence.prefix
    used = [] if memory is None else [memory.report(sequence.memory)]
    return (*used, *([] if prefix is None else [prefix.report]), *sequence.request.missing)

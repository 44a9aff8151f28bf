"""Perplexity of held-out text through a running worker: the same tokens without a memory and with each, from its own log-probs.

Owns the blocks, the requests and the sums. Blocks stand alone: no context and no n-gram history from the block before. The
memories take turns block by block, several requests at once, so that they share batches and conditions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.contract.errors import DataLoss, InvalidArgument, NotFound

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from treadle.client.worker import Worker

BLOCK_TOKENS = 256  # short, so that a few thousand tokens come from many places of the text
REQUESTS_AT_ONCE = 3  # a worker queues dozens; more would only make an interrupted run end later
BLOCK_SECONDS_MAX = 120.0  # a block is a second's work on a quiet core
NO_MEMORY = ""
Block = tuple[int, ...]


@dataclass(slots=True)
class Score:
    """What one memory (or none) made of the blocks.

    nats:   negative log-likelihood of each block, summed over its predicted tokens
    served: what the worker's reports add up to: tickets, tickets_in_time, rows_missing; empty without a memory
    """

    memory: str
    tokens: int = 0
    nats: list[float] = field(default_factory=list)
    versions: set[str] = field(default_factory=set)
    transports: set[str] = field(default_factory=set)
    served: Counter[str] = field(default_factory=Counter)
    degraded: int = 0

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token."""
        return math.exp(math.fsum(self.nats) / self.tokens)

    def document(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "memory": self.memory or None, "perplexity": self.perplexity, "tokens": self.tokens, "versions": sorted(self.versions),
            "transports": sorted(self.transports), "degraded": self.degraded, **self.served,
        }  # fmt: skip


def tokenizer_of(tokenizer_json: Path) -> Tokenizer:
    """What cuts text into a model's tokens. Raises NotFound (no `tokenizers` package, no such file)."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NotFound("the package `tokenizers` is needed for this: pip install 'treadle[fabric]'") from None
    if not tokenizer_json.is_file():
        raise NotFound(f"{tokenizer_json}: no such file; the text cannot be cut into the model's tokens")
    return Tokenizer.from_file(str(tokenizer_json))


def blocks_of(text: str, tokenizer_json: Path, tokens: int) -> list[Block]:
    """About `tokens` tokens of `text` in blocks of BLOCK_TOKENS, spread evenly over it.

    Raises what `tokenizer_of` does, InvalidArgument for a text shorter than that.
    """
    ids = tokenizer_of(tokenizer_json).encode(text, add_special_tokens=False).ids
    wanted, there = max(1, tokens // BLOCK_TOKENS), len(ids) // BLOCK_TOKENS
    if there < wanted:
        raise InvalidArgument(f"the text has {len(ids)} tokens, {wanted * BLOCK_TOKENS} were to be measured")
    firsts = [round(index * (there - 1) / max(1, wanted - 1)) * BLOCK_TOKENS for index in range(wanted)]
    return [tuple(ids[first : first + BLOCK_TOKENS]) for first in firsts]


def measure(
    worker: Worker, blocks: Sequence[Block], memories: Sequence[str], tick: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Score]:
    """Scores of the blocks by memory (NO_MEMORY: without). tick: (requests done, requests in all).

    Raises what the worker's calls do, DataLoss if log-probabilities are missing.
    """
    scores = {memory: Score(memory) for memory in memories}
    jobs = list(product(blocks, memories))
    with ThreadPoolExecutor(REQUESTS_AT_ONCE, thread_name_prefix="treadle-held-out") as pool:
        try:
            for done, answers in enumerate(pool.map(lambda job: _ask(worker, *job), jobs), start=1):
                block, memory = jobs[done - 1]
                _add(scores[memory], block, answers)
                tick(done, len(jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return scores


def _ask(worker: Worker, block: Block, memory: str) -> list[Any]:
    from treadle.inference.v1 import worker_pb2 as pb

    request = pb.GenerateRequest(
        prompt_token_ids=block, sampling=pb.Sampling(max_tokens=1, prompt_logprobs=True, ignore_eos=True),
        engram=pb.EngramChoice(model=memory),
    )  # fmt: skip
    return list(worker.generate(request, BLOCK_SECONDS_MAX))


def _add(score: Score, block: Block, answers: Sequence[Any]) -> None:
    predicted = list(_prompt_logprobs(answers))
    if tuple(token for token, _ in predicted) != block[1:]:
        raise DataLoss(
            f"the worker sent log-probabilities of {len(predicted)} tokens, not of the {len(block) - 1} that were asked for"
        )
    score.tokens += len(predicted)
    score.nats.append(-math.fsum(logprob for _, logprob in predicted))
    last = answers[-1]
    score.degraded += last.degraded
    for report in last.memory:
        score.versions.add(report.version)
        score.transports.add(report.transport)
        score.served.update(tickets=report.tickets, tickets_in_time=report.tickets_in_time, rows_missing=report.rows_missing)


def _prompt_logprobs(answers: Sequence[Any]) -> Iterator[tuple[int, float]]:
    for answer in answers:
        for token in answer.prompt_logprobs:
            yield token.token_id, token.logprob

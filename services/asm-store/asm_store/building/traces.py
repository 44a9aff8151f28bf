"""Traces: texts of the kind that requests will bring, whose queries a dictionary is made from.

Owns the traces file and the split into traces to learn from and traces held out. A trace is tokenised by itself: it follows the
prefix as a request does. Does not write traces (`self_traces`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer

from asm_store.building.chat import Wrap
from asm_store.building.prefix import digest_of, read_text
from treadle.contract.errors import InvalidArgument

TRACES_MAX = 1_000_000
TRACE_TOKENS_MAX = 16_384  # of one trace: its own KV is held while it runs
HELD_OUT_MIN = 2  # fewer held-out traces say nothing, so none are held out then

Trace = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Traces:
    """Token ids, [traces][tokens]. learnt: states are made from these; held_out: fit and fidelity are measured on these."""

    learnt: tuple[Trace, ...]
    held_out: tuple[Trace, ...] = ()

    @property
    def all(self) -> tuple[Trace, ...]:
        """Learnt ones first."""
        return self.learnt + self.held_out

    @property
    def learnt_tokens(self) -> int:
        """Tokens of the learnt ones: that many queries."""
        return sum(map(len, self.learnt))

    @property
    def tokens(self) -> int:
        """Tokens of all."""
        return sum(map(len, self.all))

    @property
    def learnt_digest(self) -> str:
        """sha256 of the learnt ones' ids."""
        return digest_of(chain.from_iterable(self.learnt))

    @property
    def digest(self) -> str:
        """sha256 of all ids."""
        return digest_of(chain.from_iterable(self.all))


def split(traces: Sequence[Trace], held_out_every: int) -> Traces:
    """Hold out the last of every `held_out_every` traces; 0, or too few traces: none.

    Raises InvalidArgument where there are no traces, too many, an empty one or one that is too long.
    """
    if not 1 <= len(traces) <= TRACES_MAX:
        raise InvalidArgument(f"traces: 1 to {TRACES_MAX} expected, got {len(traces)}")
    for number, trace in enumerate(traces, 1):
        if not 1 <= len(trace) <= TRACE_TOKENS_MAX:
            raise InvalidArgument(f"trace {number}: 1 to {TRACE_TOKENS_MAX} tokens expected, got {len(trace)}; cut it into several")
    if not held_out_every or len(traces) < HELD_OUT_MIN * held_out_every:
        return Traces(tuple(traces))
    held = [number % held_out_every == held_out_every - 1 for number in range(len(traces))]
    return Traces(
        tuple(trace for trace, out in zip(traces, held, strict=True) if not out),
        tuple(trace for trace, out in zip(traces, held, strict=True) if out),
    )


def read_traces(path: Path, tokenizer: Tokenizer, wrap: Wrap | None = None) -> tuple[Trace, ...]:
    """Traces of a file: a line each, JSON {"text"} or {"prompt", "answer"?}, or in a file without JSON the line itself.

    wrap: how a prompt is written before its answer follows (`chat_wrap`); None: prompt and answer stand one after the other
    Raises NotFound, InvalidArgument naming file and line.
    """
    texts = list(_texts(path, wrap))
    return tuple(tuple(encoding.ids) for encoding in tokenizer.encode_batch(texts, add_special_tokens=False))


def _texts(path: Path, wrap: Wrap | None) -> Iterator[str]:
    lines = [(number, line) for number, line in enumerate(read_text(path).split("\n"), 1) if line.strip()]
    plain = not lines[0][1].lstrip().startswith("{")
    if plain and wrap is not None:
        yield from (wrap(line) for _, line in lines)
        return
    for number, line in lines:
        yield line if plain else _text_of(f"{path} line {number}", line, wrap)


def _text_of(where: str, line: str, wrap: Wrap | None) -> str:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: not JSON, as the first line is: {error}") from error
    known = isinstance(fields, dict) and fields.keys() in ({"text"}, {"prompt"}, {"prompt", "answer"})
    if not known or not all(isinstance(value, str) for value in fields.values()):
        raise InvalidArgument(f'{where}: {{"text": …}} or {{"prompt": …, "answer": …}} of strings expected')
    text = fields["text"] if "text" in fields else (wrap or str)(fields["prompt"]) + fields.get("answer", "")
    if not text:
        raise InvalidArgument(f"{where}: an empty text")
    return str(text)

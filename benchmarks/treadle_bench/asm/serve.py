"""`treadle bench asm serve`: requests behind a long prefix, by full prefill, by a cached copy of its KV, and by its dictionary.

In one process with `treadle.nn`, one thread, greedy. A cached prefix is what the embedded engine does with one: its KV is copied into
each sequence. A round is a batch that begins together; all ways answer the same questions, and take turns round by round.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from treadle.contract.dictionary import Dictionary
from treadle.contract.dictionary_file import TENSORS_FILE, map_tensors, read_manifest
from treadle.contract.errors import InvalidArgument, Unavailable
from treadle.nn import model_fetch
from treadle.nn.kv import KVBlock, SequenceKV
from treadle.nn.model import CausalLM
from treadle.nn.prefix_memory import Found, PrefixMemory, PrefixUse
from treadle.nn.rope import Rope
from treadle_bench.asm.serve_text import prefix_text, traces
from treadle_bench.report import Goal, Row, interleave, rows_of

FULL, CACHED, DICTIONARY = "full prefill", "cached prefix", "dictionary"
PREFIX_TOKENS, PREFIX_TOKENS_QUICK = 4096, 512
ENTRIES, ENTRIES_QUICK = 1024, 128
TRACES, TRACES_QUICK = 30, 20
QUESTION_TOKENS, NEW_TOKENS = 32, 32
BATCHES, BATCHES_QUICK = (1, 8), (1, 2)
FULL_BATCHES = (1,)  # its decode is the cached prefix's, and eight prefills in a row take as long as eight
ROUNDS, ROUNDS_QUICK = 8, 2
PREFILL_TOKENS = 512  # of the prefix, a step
BUILD_SECONDS_MAX = 1800.0
SPEEDUPS = {1: 1.3, 8: 2.0}  # tokens a second, against the cached prefix
TTFT_SPEEDUP = 5.0  # against full prefill


class TimedMemory(PrefixMemory):
    """Keeps (tokens, seconds) of every lookup."""

    def __init__(self, dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]]) -> None:
        """As PrefixMemory."""
        super().__init__(dictionary, tensors)
        self.took: list[tuple[int, float]] = []

    def lookup(self, layer: int, queries: Tensor, rotated: Tensor, rope: Rope | None = None) -> Found | None:
        """As PrefixMemory."""
        begun = time.perf_counter()
        found = super().lookup(layer, queries, rotated, rope)
        self.took.append((len(queries), time.perf_counter() - begun))
        return found


@dataclass(frozen=True, slots=True)
class Answered:
    """One round. decode_rate: tokens a second of the whole batch, 0 for full prefill, whose decoding is the cached prefix's;
    prefix_bytes: KV of all sequences at the end beyond that of their own tokens; tokens: int64 [batch, first and decoded ones].
    """

    ttft_seconds: float
    decode_rate: float
    prefix_bytes: int
    tokens: Tensor


class Bench:
    """The model, the prefix in each form, and a round of requests by each way."""

    def __init__(self, model: CausalLM, prefix: Sequence[int], memory: TimedMemory) -> None:
        self.model, self.prefix, self.memory = model, torch.tensor(prefix), memory
        kv = model.new_kv()
        self._prefill(kv)
        self.block: KVBlock = kv.block(0, len(prefix))

    def answer(self, way: str, batch: int, seed: int) -> Answered:
        """A batch of made-up questions from their arrival to their last token."""
        questions = np.random.default_rng(seed + 1).integers(100, 40_000, (batch, QUESTION_TOKENS))
        begun = time.perf_counter()
        kv = [self._sequence(way) for _ in range(batch)]
        uses = [PrefixUse(self.memory) if way == DICTIONARY else None for _ in range(batch)]
        offset = self.memory.position_offset if way == DICTIONARY else len(self.prefix)
        answers = [self._step(torch.from_numpy(questions), offset, kv, uses)]
        first = time.perf_counter()
        decoded = 0 if way == FULL else NEW_TOKENS
        for number in range(decoded):
            answers.append(self._step(answers[-1].unsqueeze(1), offset + QUESTION_TOKENS + number, kv, uses))
        rate = batch * decoded / (time.perf_counter() - first)
        beyond_own = sum(sequence.length - QUESTION_TOKENS - decoded for sequence in kv)
        held = beyond_own * self.block.nbytes // len(self.prefix)
        return Answered(first - begun, rate, held, torch.stack(answers, 1))

    def _sequence(self, way: str) -> SequenceKV:
        kv = self.model.new_kv()
        if way == FULL:
            self._prefill(kv)
        elif way == CACHED:
            kv.extend_from(self.block)
        return kv

    def _prefill(self, kv: SequenceKV) -> None:
        for begin in range(0, len(self.prefix), PREFILL_TOKENS):
            part = self.prefix[begin : begin + PREFILL_TOKENS]
            self.model.forward(part, torch.arange(begin, begin + len(part)), [0, len(part)], [kv])

    def _step(self, tokens: Tensor, position: int, kv: Sequence[SequenceKV], uses: Sequence[PrefixUse | None]) -> Tensor:
        """tokens: [batch, T], the first at `position`; returns the next token of each, [batch]."""
        batch, count = tokens.shape
        starts = list(accumulate([count] * batch, initial=0))
        positions = torch.arange(position, position + count).repeat(batch)
        hidden = self.model.forward(tokens.reshape(-1), positions, starts, kv, prefixes=uses)
        return self.model.logits(hidden[count - 1 :: count]).argmax(-1)


def measure(*, quick: bool, dictionary: Path | None, model_dir: Path | None) -> tuple[list[Row], list[Goal], list[str]]:
    """Time to the first token and tokens a second for each batch and way. Needs 3 GB of memory; builds a dictionary if none is given."""
    torch.set_num_threads(1)
    folder = model_dir or model_fetch.fetch("smollm2-135m")
    rows: list[Row] = []
    goals: list[Goal] = []
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="treadle-bench-asm-")))
        prefix = _prefix(folder, PREFIX_TOKENS_QUICK if quick else PREFIX_TOKENS, work)
        built = dictionary or _built(folder, work, quick=quick)
        manifest = read_manifest(built)
        _check(manifest, len(prefix))
        memory = TimedMemory(manifest, map_tensors(built / TENSORS_FILE, manifest))
        bench = Bench(CausalLM.load(folder, torch.float32), prefix, memory)
        for batch in BATCHES_QUICK if quick else BATCHES:
            measured, judged = _measure_batch(bench, batch, ROUNDS_QUICK if quick else ROUNDS)
            rows += measured
            goals += judged
    kept = f"{manifest.nbytes / 1e6:.0f} MB mapped and {memory.copied_bytes / 1e6:.0f} MB copied, for all sequences"
    size = f"{manifest.settings.entries} entries, {manifest.settings.dtype}, {kept}"
    copied = f"its KV of {bench.block.nbytes / 1e6:.0f} MB is copied into each sequence, as the embedded engine does"
    return rows, goals, [f"dictionary: {size}", f"cached prefix: {copied}"]


def _measure_batch(bench: Bench, batch: int, rounds: int) -> tuple[list[Row], list[Goal]]:
    ways = [way for way in (FULL, CACHED, DICTIONARY) if way != FULL or batch in FULL_BATCHES]
    answered: dict[str, dict[int, Answered]] = {way: {} for way in ways}

    def variant(way: str) -> Callable[[int], float]:
        def run(number: int) -> float:
            answered[way][number] = bench.answer(way, batch, number)
            return answered[way][number].ttft_seconds * 1e3

        return run

    for way in ways:
        if way != FULL:
            bench.answer(way, batch, -1)  # warm
    bench.memory.took.clear()
    first_tokens = interleave({way: variant(way) for way in ways}, rounds, seed=batch, what=f"batch {batch}")
    shape = {"batch": batch, "prefix": len(bench.prefix), "question": QUESTION_TOKENS}
    decoded = {way: [each[number].decode_rate for number in range(rounds)] for way, each in answered.items() if way != FULL}
    ttft_rows = rows_of(first_tokens, {"what": "first token", **shape}, "ms", CACHED)
    if FULL in ways:
        against_full = rows_of({way: first_tokens[way] for way in (FULL, DICTIONARY)}, {"what": "first token", **shape}, "ms", FULL)
        ttft_rows += [row for row in against_full if row.name == DICTIONARY]
    rate_rows = rows_of(decoded, {"what": "decode", **shape, "new": NEW_TOKENS}, "tok/s", CACHED)
    lookups = [seconds * 1e6 for tokens, seconds in bench.memory.took if tokens == batch]  # of decoding steps
    lookup = Row(
        "a layer's lookup",
        {"batch": batch},
        "us",
        float(np.median(lookups)),
        float(np.percentile(lookups, 99)),
        len(lookups),
    )
    held = {way: max(each.prefix_bytes for each in rounds_of.values()) / 1e6 for way, rounds_of in answered.items()}
    held_rows = [Row(way, {"what": "KV for the prefix", **shape}, "MB", held[way], held[way], rounds) for way in ways]
    held_rows += _kept_rows(bench.memory)
    return [*ttft_rows, *rate_rows, *held_rows, lookup], _goals(batch, ttft_rows, rate_rows, held[DICTIONARY])


def _kept_rows(memory: PrefixMemory) -> list[Row]:
    """What a dictionary takes in place of KV, once for all sequences: its file, mapped by all processes, and what each of them copies."""
    kept = {"mapped": memory.dictionary.nbytes / 1e6, "copied": memory.copied_bytes / 1e6}
    return [Row(DICTIONARY, {"what": f"{how} for all sequences"}, "MB", size, size, 1) for how, size in kept.items()]


def _goals(batch: int, ttft_rows: list[Row], rate_rows: list[Row], held_mb: float) -> list[Goal]:
    goals = [
        Goal(f"batch {batch}: first token, dictionary / cached prefix", _ratio(ttft_rows, CACHED), 1.0),
        Goal(f"batch {batch}: MB of KV that stand for the prefix", held_mb, 0),
    ]
    if any(row.name == FULL for row in ttft_rows):
        faster = 1 / _ratio(ttft_rows, FULL)
        goals.append(Goal(f"batch {batch}: first token, times faster than full prefill", faster, TTFT_SPEEDUP, at_least=True))
    if batch in SPEEDUPS:
        goals.append(
            Goal(f"batch {batch}: tokens/s, dictionary / cached prefix", _ratio(rate_rows, CACHED), SPEEDUPS[batch], at_least=True)
        )
    return goals


def _ratio(rows: list[Row], baseline: str) -> float:
    return next(row.ratio for row in rows if row.name == DICTIONARY and row.baseline == baseline and row.ratio is not None)


def _prefix(folder: Path, tokens: int, work: Path) -> list[int]:
    """The first tokens of a text that comes with Python, written to `work` as the builder reads it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(prefix_text()).ids[:tokens]
    (work / "prefix.txt").write_text(tokenizer.decode(ids), encoding="utf-8")
    return ids


def _built(folder: Path, work: Path, *, quick: bool) -> Path:
    """A dictionary of the prefix by `treadle asm build`. Raises Unavailable with what it said where it fails."""
    (work / "traces.txt").write_text("\n".join(traces(TRACES_QUICK if quick else TRACES)), encoding="utf-8")
    out = work / "dictionary"
    command = [
        sys.executable, "-m", "treadle.cli", "asm", "build", "--model", str(folder), "--prefix", str(work / "prefix.txt"), "--traces",
        str(work / "traces.txt"), "--name", "bench", "--entries", str(ENTRIES_QUICK if quick else ENTRIES), "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS_MAX, check=False)
    if done.returncode != 0:
        raise Unavailable(f"treadle asm build failed with {done.returncode}: {done.stderr.strip()[-500:]}")
    return out


def _check(manifest: Dictionary, tokens: int) -> None:
    if abs(manifest.prefix.tokens - tokens) > 1 + tokens // 100:  # a text cut between tokens may be cut again a little differently
        raise InvalidArgument(
            f"the dictionary stands for {manifest.prefix.tokens} tokens, {tokens} are measured: build one of as many"
        )

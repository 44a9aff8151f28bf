"""What is run, and in which order: the most telling runs first, so that a run that is cut short has told most.

Owns names, marks and the order. Does not run anything (`one_run`, `driver`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from treadle.contract.errors import InvalidArgument

DOMAINS = ("kjv", "python")
SEEDS = (0, 1, 2)
MARKS = (50_000, 100_000, 300_000, 640_000)  # tokens seen, at which a run of MAIN_TOKENS is measured
MAIN_TOKENS = 640_000
TOY_MARKS = (50_000, 100_000, 300_000)
ALL = 0  # as a number of tokens: every one that the domain has
QUICK_MARKS, QUICK_TOKENS = (8_192, 16_384), 16_384
TOY_PRIME_BASE = 23  # heads of 23 to 179 rows, about 3,000 in all: room for style, hardly any for 500,000 n-grams


class Kind(StrEnum):
    """What a run makes figures of."""

    FROZEN = "frozen"  # the model as it is: the baseline of everything
    MEMORY = "memory"
    TOY = "toy"  # the same with a table too small to remember n-grams: what is style
    NGRAM = "ngram"  # an n-gram model mixed with the frozen model, at equal bytes
    LORA = "lora"  # at equal bytes and equal CPU time


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """One process. `tokens`: what its schedule is planned for (ALL: the whole domain); frozen has no seed and no tokens.

    stop_at: marks beyond so many tokens are left for another day (0: none is). The plan stays that of `tokens`, so a run that
    goes on later is the run that was never stopped.
    """

    domain: str
    kind: Kind
    seed: int = 0
    tokens: int = ALL
    stop_at: int = 0

    @property
    def key(self) -> str:
        """Its name in files and on command lines."""
        return f"{self.domain}-{self.kind}-s{self.seed}-{self.tokens or 'all'}"

    @classmethod
    def parse(cls, key: str) -> Run:
        """Read a key. Raises InvalidArgument."""
        try:
            domain, kind, seed, tokens = key.split("-")
            return cls(domain, Kind(kind), int(seed.removeprefix("s")), ALL if tokens == "all" else int(tokens))
        except ValueError as error:
            raise InvalidArgument(f"run {key!r}: DOMAIN-KIND-sSEED-TOKENS expected, such as kjv-memory-s0-640000") from error


def needs(run: Run) -> tuple[Run, ...]:
    """Runs whose figures a run needs: the frozen model's, and for LoRA the memory whose CPU time it may spend."""
    if run.kind is Kind.FROZEN:
        return ()
    frozen = (Run(run.domain, Kind.FROZEN),)
    return (*frozen, replace(run, kind=Kind.MEMORY)) if run.kind is Kind.LORA else frozen


def ordered_runs(
    domains: tuple[str, ...] = DOMAINS, seeds: tuple[int, ...] = SEEDS, *, quick: bool = False, stop_at: int = 0
) -> list[Run]:
    """Every run, the most telling first. stop_at: as in Run; those on all of a domain are left out then.

    Raises InvalidArgument if there is no mark so early.
    """
    if stop_at:
        if stop_at < MARKS[0]:
            raise InvalidArgument(f"--stop-at: {stop_at}; the first mark is at {MARKS[0]:,} tokens")
        early = [run for run in ordered_runs(domains, seeds) if run.tokens != ALL or run.kind is Kind.FROZEN]
        return [run if run.kind is Kind.FROZEN else replace(run, stop_at=stop_at) for run in early]
    if quick:
        small = [Run(domains[0], kind, seeds[0], QUICK_TOKENS) for kind in (Kind.MEMORY, Kind.TOY, Kind.NGRAM, Kind.LORA)]
        return [Run(domains[0], Kind.FROZEN), *small]
    runs: list[Run] = []
    for seed in seeds:  # a whole table from one seed, then the next
        for domain in domains:
            runs += [Run(domain, Kind.FROZEN)] if seed == seeds[0] else []
            runs += [Run(domain, kind, seed, MAIN_TOKENS) for kind in (Kind.MEMORY, Kind.NGRAM, Kind.TOY)]
        runs += [Run(domain, Kind.LORA, seed, MAIN_TOKENS) for domain in domains]
    for seed in seeds:
        runs += [Run(domain, kind, seed, ALL) for domain in domains for kind in (Kind.MEMORY, Kind.NGRAM)]
    return runs


def marks_kept(run: Run) -> tuple[int, ...]:
    """Marks of a run that leave a record: for the frozen model 0, for LoRA, which is measured at its end alone, the last."""
    if run.kind is Kind.FROZEN:
        return (0,)
    return marks_of(run)[-1:] if run.kind is Kind.LORA else marks_of(run)


def marks_of(run: Run) -> tuple[int, ...]:
    """Tokens seen at which a run is measured; ALL stands for its end."""
    if run.tokens == ALL:
        return (ALL,)
    if run.tokens == QUICK_TOKENS:
        return QUICK_MARKS
    limit = min(run.tokens, run.stop_at or run.tokens)
    return tuple(mark for mark in (TOY_MARKS if run.kind is Kind.TOY else MARKS) if mark <= limit)

"""Which worker is asked first: policies over members that are equally able.

Owns the three orders and their formulas. Whom they choose from is the fleet's; what lies in a worker's cache the block
index knows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from inference_gateway.domain.block_index import prompt_keys
from inference_gateway.domain.generation import Generation
from inference_gateway.domain.member import Member
from inference_gateway.domain.memories import MemoryChoice, default_of, find
from inference_gateway.domain.prefixes import prefix_ref
from treadle.contract.block_memory import block_memory


class Routing(StrEnum):
    """The policies, as the settings name them."""

    LEAST_LOADED = "least-loaded"
    PREFIX = "prefix"
    SESSION = "session"


class RoutedBy(StrEnum):
    """Why the first of a ranking is the first; also a label of the metric."""

    HIT = "hit"  # nobody has more of the prompt in its cache, and it has some
    MISS = "miss"  # nobody has any of it
    AFFINITY = "affinity"  # it is the session's own
    FALLBACK = "fallback"  # another one would be better, and has too much to do
    LOAD = "load"  # it has least to do


@dataclass(frozen=True, slots=True)
class Ranking:
    """Members in the order in which a request should try them. Tokens of the prompt that the first, and the best, has cached."""

    members: list[Member]
    by: RoutedBy
    cached_tokens: int = 0
    possible_tokens: int = 0


class Policy(Protocol):
    """Puts members in the order in which a request should try them. needs_blocks: it looks at what lies in prefix caches."""

    needs_blocks: bool

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        """All of `members`, usable ones of one model, the best first."""
        ...


class LeastLoaded:
    """Fits Policy: the fewest requests first; among equals who was not asked for longest."""

    needs_blocks = False

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        """See Policy."""
        return Ranking(sorted(members, key=lambda member: (member.load, member.asked_last)), RoutedBy.LOAD)


class PrefixAware:
    """Fits Policy: the member that has least to do before the first token of this prompt, counted in tokens:

        prompt tokens - those of them in its prefix cache + load_tokens x requests there

    Members with more than `imbalance_max` requests above the least loaded one come after all others, whatever they have
    cached, so that one popular beginning cannot pile everybody onto one worker. Among equals: who was not asked for longest.
    """

    needs_blocks = True

    def __init__(self, load_tokens: int, imbalance_max: int) -> None:
        self._load_tokens, self._imbalance_max = load_tokens, imbalance_max

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        """See Policy."""
        if not members:
            return Ranking([], RoutedBy.LOAD)
        cached = cached_tokens(members, generation)
        limit = min(member.load for member in members) + self._imbalance_max

        def order(member: Member) -> tuple[bool, int, int]:
            return member.load > limit, self._load_tokens * member.load - cached[member], member.asked_last

        ranked = sorted(members, key=order)
        had, possible = cached[ranked[0]], max(cached.values())
        by = RoutedBy.MISS if not possible else RoutedBy.HIT if had == possible else RoutedBy.FALLBACK
        return Ranking(ranked, by, had, possible)


class SessionAffine:
    """Fits Policy: the same session meets the same member as long as that is there, and others only where members come or go.

    Rendezvous hashing: each member has a rank for each session. A member that may have no more requests waiting, or has more
    than `imbalance_max` above the least loaded one, comes after the others. Without a session: the least loaded.
    """

    needs_blocks = False

    def __init__(self, imbalance_max: int) -> None:
        self._imbalance_max = imbalance_max
        self._without = LeastLoaded()

    def rank(self, members: Sequence[Member], generation: Generation) -> Ranking:
        """See Policy."""
        if not generation.session or not members:
            return self._without.rank(members, generation)
        limit = min(member.load for member in members) + self._imbalance_max
        by_rank = sorted(members, key=lambda member: _rank(generation, member))
        ranked = sorted(by_rank, key=lambda member: member.load > limit or member.is_full)
        return Ranking(ranked, RoutedBy.AFFINITY if ranked[0] is by_rank[0] else RoutedBy.FALLBACK)


def policy_of(routing: Routing, *, load_tokens: int, imbalance_max: int) -> Policy:
    """The policy of that name. load_tokens, imbalance_max: see the classes."""
    if routing is Routing.PREFIX:
        return PrefixAware(load_tokens, imbalance_max)
    return SessionAffine(imbalance_max) if routing is Routing.SESSION else LeastLoaded()


def cached_tokens(members: Sequence[Member], generation: Generation) -> Mapping[Member, int]:
    """How many of the first tokens of the prompt lie in each member's prefix cache, as its events tell."""
    found = dict.fromkeys(members, 0)
    groups: dict[tuple[int, str], list[Member]] = {}
    for member in members:
        if len(member.blocks) and member.block_tokens:
            groups.setdefault((member.block_tokens, _memory_of(member, generation)), []).append(member)
    for (block_tokens, memory), alive in groups.items():
        keys = prompt_keys(generation.prompt_token_ids, generation.cache_salt, memory, block_tokens)
        for key in keys:
            alive = [member for member in alive if key in member.blocks]
            if not alive:
                break  # the rest of a long prompt is not hashed for nobody
            for member in alive:
                found[member] += block_tokens
    return found


def _memory_of(member: Member, generation: Generation) -> str:
    """What this member's blocks would say that they were made with for this request, as of its last status; "": no memory."""
    status = member.watch.status
    prefix = prefix_ref(generation.memory.prefix, status.prefixes if status is not None else ())
    return block_memory(_engram_of(member, generation.engram), prefix)


def _engram_of(member: Member, choice: MemoryChoice) -> str:
    """NAME@VERSION of the memory that this member would use for a choice, as of its last status; "": none."""
    model = member.watch.last_known
    memories = () if model is None else model.memories
    memory = default_of(memories) if choice.name is None else find(choice.name, memories) if choice.name else None
    if memory is not None and memory.version.startswith(choice.version):
        return f"{memory.name}@{memory.version}"
    return f"{choice.name}@{choice.version}" if choice.name else ""


def _rank(generation: Generation, member: Member) -> bytes:
    """Of the members the lowest is the session's own."""
    name = f"{generation.cache_salt}\n{generation.session}\n{member.name}"
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()

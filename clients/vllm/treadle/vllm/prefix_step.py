"""One step of the engine in which requests stand behind long prefixes: each row looks up its own dictionary, or sees its exact KV.

Requests of a step may have different prefixes, or none. Owns which rows see what, the count of lookups that the guard calls outside,
and its verdict once a prompt is computed. Does not open prefixes (`prefixes`) or run attention (`prefix_attention`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treadle.contract.dictionary import KeyMode
from treadle.contract.errors import InvalidArgument
from treadle.nn.attention import attention_state, merged_output
from treadle.nn.rope import Rope, rotate
from treadle.vllm.outcomes import BEGIN_ANEW, Failure, UsedPrefix
from treadle.vllm.prefixes import HeldPrefix
from treadle.vllm.step import RunningRequest
from treadle.vllm.windows import Span

log = logging.getLogger("treadle.vllm")


@dataclass(slots=True, eq=False)
class RunningPrefix:
    """One request's use of a prefix, from its first step to its end.

    exact:         it stands behind the exact KV, and looks nothing up
    begins_anew:   who asked will ask again behind the exact KV where the guard says so
    fails:         rather no answer than one off the dictionary's task
    prompt_tokens: of the request
    computed, outside: tokens whose KV is there, and how many of their lookups were outside; made anew where KV came from elsewhere
    """

    held: HeldPrefix
    exact: bool
    begins_anew: bool
    fails: bool
    prompt_tokens: int
    computed: int = 0
    outside: int = 0
    judged: bool = False
    off_task: bool = False

    @property
    def used(self) -> UsedPrefix:
        """For whoever asked."""
        lookups = 0 if self.exact else self.computed * self.held.lookups_each
        choice = self.held.choice
        return UsedPrefix(choice.name, choice.version, self.held.tokens, self.exact, lookups, self.outside, self.off_task)

    def judge(self, outside_share_max: float) -> Failure | None:
        """Decide, once, when the prompt is computed: more of its lookups outside than this share are another task's. Why it is to end."""
        if self.judged or self.computed < self.prompt_tokens:
            return None
        self.judged, choice = True, self.held.choice
        self.off_task = self.outside > outside_share_max * self.computed * self.held.lookups_each
        if not self.off_task:
            return None
        told = f"prefix {choice.name!r}: this prompt is off the task of its dictionary"
        if self.begins_anew and self.held.kv is not None:
            return Failure(BEGIN_ANEW, f"{told}; ask for prefix_exact")
        way = "no exact KV is kept; ask" if self.held.kv is None else "ask for prefix_exact, or"
        return Failure("Unavailable", f"{told}: {way} for late = mask to go on all the same") if self.fails else None


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """A request's part of a step. slots: [first + count] of the KV, of all its tokens up to the end of this step."""

    request: RunningRequest
    prefix: RunningPrefix
    span: Span
    slots: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Group:
    """The members that see the same. rows: [n] of the step, member by member; positions: [n] of these, as the model is told."""

    held: HeldPrefix
    exact: bool
    members: list[Member]
    rows: Tensor
    positions: Tensor
    outside: Tensor
    failed: bool = False

    def wants(self, layer: int) -> bool:
        return (self.exact or layer in self.held.memory.layers) and not self.failed


class PrefixStep:
    """See the module. A MergingStep.

    offsets: [token_count] int64, what is added to the positions of the step's tokens
    """

    def __init__(
        self, members: Sequence[Member], token_count: int, rope: Rope, outside_of_slots: NDArray[np.int32], outside_share_max: float
    ) -> None:
        """outside_of_slots: for each slot of the KV, how many lookups of its token were outside; written here, and goes with the KV"""
        self._rope, self._outside_of_slots, self._share_max = rope, outside_of_slots, outside_share_max
        alike: dict[tuple[int, bool], list[Member]] = {}
        for member in members:
            alike.setdefault((id(member.prefix.held), member.prefix.exact), []).append(member)
        self.offsets = torch.zeros(token_count, dtype=torch.int64)
        self._groups = [self._group(same) for same in alike.values()]

    def wants(self, layer: int) -> bool:
        """See MergingStep."""
        return any(group.wants(layer) for group in self._groups)

    def merge(self, layer: int, rotated: Tensor, out: Tensor, log_z: Tensor) -> None:
        """See MergingStep. What fails is the request's own: others, of its prefix too, know nothing of it."""
        for group in list(self._groups):
            if group.wants(layer):
                self._merge(layer, group, rotated, out, log_z)

    def _merge(self, layer: int, group: _Group, rotated: Tensor, out: Tensor, log_z: Tensor) -> None:
        try:
            own = log_z[group.rows]
            if own.isnan().any():
                raise InvalidArgument("attention: log Z is beyond what can be told from vLLM's kernel")
            a, seen, outside = self._seen(layer, group, rotated[group.rows])
            out[group.rows] = merged_output(out[group.rows], own, a, seen).to(out.dtype)
            group.outside += outside
        except Exception:
            if len(group.members) > 1:
                for part in self._apart(group):  # one of them may be to blame alone
                    self._merge(layer, part, rotated, out, log_z)
                return
            log.exception("a lookup in prefix %s failed", group.held.choice)
            group.failed, member = True, group.members[0]
            member.request.error = Failure("Unavailable", "a lookup of its prefix failed; the engine's log has the details")
            member.request.dirty_from = member.span.first  # what it computed here is nobody's

    def _apart(self, group: _Group) -> list[_Group]:
        """A group of one member for each of a group's: from now on they look up alone."""
        parts = [self._group([member]) for member in group.members]
        for part, outside in zip(parts, torch.split(group.outside, [each.span.count for each in group.members]), strict=True):
            part.outside = outside.clone()
        self._groups = [*(other for other in self._groups if other is not group), *parts]
        return parts

    def finish(self) -> None:
        """Count the lookups of a step that went through, and judge the prompts that it completed."""
        dictionaries = [group for group in self._groups if not group.exact and not group.failed]
        for group in dictionaries:
            counts = group.outside.numpy().astype(np.int32)
            for member, own in zip(group.members, np.split(counts, _ends(group.members)), strict=True):
                self._outside_of_slots[member.slots[member.span.first :]] = own
        for group in dictionaries:  # a request may continue from what another one computed in this same step
            for member in group.members:
                self._count(member)

    def _count(self, member: Member) -> None:
        prefix, span = member.prefix, member.span
        known = prefix.outside if prefix.computed == span.first else int(self._outside_of_slots[member.slots[: span.first]].sum())
        prefix.outside = known + int(self._outside_of_slots[member.slots[span.first :]].sum())
        prefix.computed = span.first + span.count
        member.request.error = prefix.judge(self._share_max) or member.request.error
        member.request.degraded |= prefix.off_task

    def _seen(self, layer: int, group: _Group, rotated: Tensor) -> tuple[Tensor, Tensor, Tensor | int]:
        """The states of a group's rows over what stands before their own keys, and how many lookups of each row were outside."""
        if group.exact:
            assert group.held.kv is not None, "who takes it asks"
            keys, values = group.held.kv[layer].transpose(1, 2)
            return *attention_state(rotated, keys, values), 0
        memory, queries = group.held.memory, rotated
        if memory.dictionary.settings.key is not KeyMode.OWN_POSITION:
            queries = rotate(rotated, self._rope.angles(-group.positions))
        found = memory.lookup(layer, queries, rotated, self._rope)
        assert found is not None, "wants asks"
        return found.states, found.log_z, found.outside.flatten(1).sum(1)

    def _group(self, members: list[Member]) -> _Group:
        prefix = members[0].prefix
        before = prefix.held.positions_before(exact=prefix.exact)
        rows = torch.from_numpy(np.concatenate([np.arange(one.span.place, one.span.place + one.span.count) for one in members]))
        own = np.concatenate([np.arange(one.span.first, one.span.first + one.span.count) for one in members])
        self.offsets[rows] = before
        return _Group(
            prefix.held, prefix.exact, members, rows, torch.from_numpy(own + before), torch.zeros(len(rows), dtype=torch.int64)
        )


def _ends(members: Sequence[Member]) -> NDArray[np.int64]:
    return np.cumsum([member.span.count for member in members])[:-1]

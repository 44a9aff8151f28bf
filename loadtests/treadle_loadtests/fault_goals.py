"""What the chats of a fault matrix must have come to, whoever was struck."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from treadle_bench.report import Goal
from treadle_loadtests.chats import DEGRADED, ERROR, HUNG, UNCLEAR, WHOLE, Chat
from treadle_loadtests.fault_cells import POOL, STORE, TARGETS, WORKER, Cell
from treadle_loadtests.report import Report

OPEN_PREFIX = "open"  # that workers have open before the store is struck
INSISTING = {"late": "fail"}  # the policy of a chat that would rather end than go on without its prefix
UNAVAILABLE = "unavailable"  # why a prefix is missing, and the code of an error for want of it


@dataclass(frozen=True, slots=True)
class Ended:
    """How the chats of each cell ended."""

    chats: Mapping[Cell, Sequence[Chat]]

    def judge(self, report: Report, cells: int, told_seconds_max: float) -> None:
        """Counts, times and goals of all cells.

        cells: that were to be played; told_seconds_max: within which a chat is told that the prefix that it insists on cannot be had
        """
        for cell, chats in self.chats.items():
            report.times[cell.name] = [chat.seconds for chat in chats]
            ends = Counter(f"{_behind(chat)}{chat.outcome} {chat.code or chat.because}".strip() for chat in chats)
            report.counts |= {f"{cell.name}: {end}": count for end, count in sorted(ends.items())}
        report.goals += [
            Goal("cells played", len(self.chats), cells, at_least=True),
            Goal("hung chats", self._count(HUNG), 0),
            Goal("chats without a clear end", self._count(UNCLEAR), 0),
            *self._of_pool_and_workers(),
        ]
        if any(cell.target == STORE for cell in self.chats):
            report.goals += self._of_store(told_seconds_max)

    def _of_pool_and_workers(self) -> list[Goal]:
        # a dead pool may be started again, and its rows be there, before a layer has waited in vain: only a frozen one stays away
        reached = [cell for cell in self.chats if (cell.target, cell.transport, cell.fault) == (POOL, "socket", "frozen")]
        bitten = sum(any(chat.outcome == DEGRADED for chat in self.chats[cell]) for cell in reached)
        broken = [cell for cell in self.chats if (cell.target, cell.phase) == (WORKER, "decode") and cell.fault != "slow"]
        named = sum(any(chat.outcome == ERROR for chat in self.chats[cell]) for cell in broken)
        unread = [cell for cell in self.chats if (cell.target, cell.phase) == (WORKER, "prefill")]
        lost = sum(chat.outcome == ERROR and not chat.pieces for cell in unread for chat in self.chats[cell])
        by_rows = self._count(DEGRADED, POOL, WORKER, transport="mapped")
        return [
            Goal("errors although only the pool was struck", self._count(ERROR, POOL), 0),
            Goal("errors although nothing had been answered", lost, 0),
            Goal("answers degraded although rows lay in the host's memory", by_rows, 0),
            Goal("cells of a frozen pool in which answers said so", bitten, len(reached), at_least=True),
            Goal("cells of a worker dead or frozen in its answers that ended with an error", named, len(broken), at_least=True),
        ]

    def _of_store(self, told_seconds_max: float) -> list[Goal]:
        struck = [(cell, chat) for cell, chats in self.chats.items() if cell.target == STORE for chat in chats]
        untouched = [chat for _, chat in struck if _prefix_of(chat) in ("", OPEN_PREFIX)]
        without = [(cell, chat) for cell, chat in struck if _prefix_of(chat) == cell.new_prefix]
        told = [chat.seconds for _, chat in without if chat.outcome == ERROR]
        astray = sum(_astray(chat) for _, chat in without)
        # a dead or slow store may yet answer within the wait of a policy: only a frozen one does not
        as_if = sum(chat.outcome == WHOLE for cell, chat in without if cell.fault == "frozen")
        return [
            Goal("chats that a struck store changed, without a prefix or behind an open one", sum(map(_changed, untouched)), 0),
            Goal("chats behind a new prefix that ended otherwise than their policy says", astray, 0),
            Goal("of these, of a frozen store, answered as if it were there", as_if, 0),
            Goal("seconds until a chat was told that its prefix cannot be had", max(told, default=0.0), told_seconds_max),
        ]

    def _count(self, outcome: str, *targets: str, transport: str = "") -> int:
        wanted = [
            chats for cell, chats in self.chats.items() if cell.target in (targets or TARGETS) and transport in ("", cell.transport)
        ]
        return sum(chat.outcome == outcome for chats in wanted for chat in chats)


def _prefix_of(chat: Chat) -> str:
    """The prefix that a chat asks to be answered behind; "": none."""
    return str(chat.body.get("treadle", {}).get("prefix", ""))


def _insists(chat: Chat) -> bool:
    return bool(chat.body["treadle"].get("policy") == INSISTING)


def _behind(chat: Chat) -> str:
    """As counts say it, before how a chat ended."""
    if _prefix_of(chat) in ("", OPEN_PREFIX):
        return "behind an open prefix, " if _prefix_of(chat) else ""
    return f"behind a new prefix or {'not at all' if _insists(chat) else 'none'}, "


def _changed(chat: Chat) -> bool:
    return chat.outcome != WHOLE


def _astray(chat: Chat) -> bool:
    """Whether a chat behind a prefix that may be missing is neither whole nor what its policy makes of it then."""
    end = (ERROR, UNAVAILABLE, "") if _insists(chat) else (DEGRADED, "", UNAVAILABLE)
    return chat.outcome != WHOLE and (chat.outcome, chat.code, chat.because) != end

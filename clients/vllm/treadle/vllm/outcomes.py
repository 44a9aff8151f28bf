"""What memories did for requests and layers, as plain values that travel from the process of the model to the caller.

Per request they come with its outputs (`RequestOutput.kv_transfer_params["treadle"]`), per layer they are fetched from the
worker (`collective_rpc("take_engram_reports")`). Knows neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol

from treadle.contract import errors
from treadle.contract.errors import DataLoss, FingerprintMismatch, NotFound, ResourceExhausted, TreadleError, Unavailable
from treadle.vllm.config import KEY

BEGIN_ANEW = "BeginAnew"  # kind of a Failure that is none: who asked is to ask again, behind the exact KV of the prefix
REPORTS_MAX = 8192  # tickets kept until somebody fetches them: about a minute of a busy engine, half a megabyte


@dataclass(frozen=True, slots=True)
class UsedMemory:
    """The memory of a request. transport: how its rows come; shadowed: they are not added."""

    name: str
    version: str
    transport: str
    shadowed: bool


@dataclass(frozen=True, slots=True)
class UsedPrefix:
    """The long prefix of a request.

    tokens:   that it stands for
    exact:    the exact KV answered, and nothing was looked up
    lookups, lookups_outside: made by its tokens in all layers, and those with a cosine below the guard's quantile
    off_task: the guard found its prompt off the dictionary's task
    """

    name: str
    version: str
    tokens: int
    exact: bool
    lookups: int
    lookups_outside: int
    off_task: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was ended. kind: a class of treadle.contract.errors, or BEGIN_ANEW; mismatch: the field of a FingerprintMismatch."""

    kind: str
    message: str
    mismatch: str = ""

    @classmethod
    def of(cls, error: TreadleError) -> Failure:
        """Of an error of ours."""
        return cls(type(error).__name__, str(error), error.field if isinstance(error, FingerprintMismatch) else "")

    def error(self) -> TreadleError:
        """The error again; Unavailable for a kind that this package does not know."""
        if self.kind == FingerprintMismatch.__name__:
            mismatch = FingerprintMismatch(self.mismatch, None, None)
            mismatch.args = (self.message,)
            return mismatch
        known = getattr(errors, self.kind, None)
        return known(self.message) if isinstance(known, type) and issubclass(known, TreadleError) else Unavailable(self.message)


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """What its memory did for a request, from its first step on.

    tickets:         layers of steps that it took part in
    missing_because: late, unavailable, damaged, gone or refused; empty: no row is missing
    degraded:        rows were missing, its own or those of a request whose blocks it shared; or its prompt was off its prefix's task
    stall_seconds:   that its steps waited for rows of its memory
    error:           why it was ended; None: it was not
    prefix:          the long prefix that it stood behind, None: none
    """

    memory: UsedMemory | None = None
    tickets: int = 0
    tickets_in_time: int = 0
    rows_missing: int = 0
    missing_because: str = ""
    degraded: bool = False
    stall_seconds: float = 0.0
    error: Failure | None = None
    prefix: UsedPrefix | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RequestOutcome:
        """Read one; keys that a later version added are passed by."""
        known = {one.name: values[one.name] for one in fields(cls) if one.name in values}
        memory, error, prefix = (known.get(name) for name in ("memory", "error", "prefix"))
        known["memory"] = None if memory is None else UsedMemory(**memory)
        known["error"] = None if error is None else Failure(**error)
        known["prefix"] = None if prefix is None else UsedPrefix(**prefix)
        return cls(**known)


class HasTransferParams(Protocol):
    """vLLM's RequestOutput."""

    kv_transfer_params: dict[str, Any] | None


def outcome_of(output: HasTransferParams) -> RequestOutcome | None:
    """The outcome that an output carries: its request's final one always does, and every one of a degraded request."""
    ours = (output.kv_transfer_params or {}).get(KEY)
    return None if ours is None else RequestOutcome.from_dict(ours)


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What one step did to one request; from the process of the model to the scheduler's.

    outcome:    of the request so far
    dirty_from: position of the first token of this step that was made without its memory, or a part of it; None: none was
    """

    outcome: RequestOutcome
    dirty_from: int | None = None


@dataclass(frozen=True, slots=True)
class TicketReport:
    """One ticket: a layer of one memory of a step.

    slack_seconds:  deadline minus completion; None when the lookup could not begin, or ended with an error
    gather_seconds: from submission to the last row; None unless all rows came
    """

    layer: int
    transport: str
    in_time: bool
    rows: int
    rows_missing: int
    stall_seconds: float
    slack_seconds: float | None
    gather_seconds: float | None


@dataclass(frozen=True, slots=True)
class MemoryFigures:
    """A version that is open. requests: that use it now; tokens: looked up since it was opened."""

    name: str
    version: str
    transport: str
    fused: bool
    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class EngineReports:
    """What the worker tells when it is asked.

    figures:         per layer, since the start: the fields of treadle.client.engram.LayerFigures
    tickets:         since it was asked before, oldest first, the last REPORTS_MAX of them
    tickets_dropped: those that were more
    steps:           that used a memory, since the start
    """

    figures: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    tickets: tuple[TicketReport, ...] = ()
    tickets_dropped: int = 0
    memories: tuple[MemoryFigures, ...] = ()
    steps: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, small ones: tickets as lists, layers as strings."""
        return {
            "figures": {str(layer): dict(figures) for layer, figures in self.figures.items()},
            "tickets": [[getattr(ticket, one.name) for one in fields(TicketReport)] for ticket in self.tickets],
            "tickets_dropped": self.tickets_dropped,
            "memories": [asdict(memory) for memory in self.memories],
            "steps": self.steps,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineReports:
        """Read what `to_dict` wrote."""
        return cls(
            {int(layer): figures for layer, figures in values["figures"].items()},
            tuple(TicketReport(*ticket) for ticket in values["tickets"]),
            values["tickets_dropped"],
            tuple(MemoryFigures(**memory) for memory in values["memories"]),
            values["steps"],
        )


def because(cause: TreadleError | None) -> str:
    """The word for why rows are missing. cause: the error that ended their lookup; None: they were late."""
    words = {Unavailable: "unavailable", DataLoss: "damaged", NotFound: "gone", ResourceExhausted: "refused"}
    return next((word for kind, word in words.items() if isinstance(cause, kind)), "late")

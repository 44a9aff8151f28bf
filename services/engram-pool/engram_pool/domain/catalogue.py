"""Which versions are resident, which is current, and how each stands. Plain state: no files, no waiting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from engram_pool.domain.ports import Warmth
from engram_pool.domain.storing import Standing, StoredVersion
from treadle.contract import DataLoss, EngramModel, NotFound, Unavailable
from treadle.contract.owners import Holding
from treadle.contract.warm_state import WarmState
from treadle.kernels import HashPlan

BEFORE_MAX = 32  # versions of one model remembered as having been current
NAMES_LISTED_MAX = 16  # a NotFound lists what there is, up to here


@dataclass(slots=True, eq=False)
class Resident:
    """A version in memory.

    calls:      Gather, Lookup and Verify that read it now; it is unmapped only at 0
    closing:    being deleted: takes no new calls
    corrupt:    a checksum did not fit: calls in progress end
    holds:      HoldModel calls: readers elsewhere that keep it from being freed
    keep_until: monotonic seconds before which a superseded version stays: after a restart, holds are taken again first
    page_bytes: page size in use for its mappings
    nodes:      of its sampled pages, how many lie on each memory node
    warmth:     how far its pages are entered in this process
    damaged_at_ns: when damage was last found, since the epoch; 0: never. Copies of rows from before are not to be trusted
    """

    stored: StoredVersion
    standing: Standing
    page_bytes: int = 0
    calls: int = 0
    closing: bool = False
    corrupt: bool = False
    holds: int = 0
    keep_until: float = 0.0
    nodes: Mapping[int, int] = field(default_factory=dict)
    warmth: Warmth | None = None
    damaged_at_ns: int = 0
    plans: dict[int, HashPlan] = field(default_factory=dict)

    @property
    def model(self) -> EngramModel:
        """Its manifest, tables included."""
        return self.stored.model

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.stored.model.name

    @property
    def version(self) -> str:
        """Its version."""
        return self.stored.version

    @property
    def warm_state(self) -> WarmState:
        """Whether its rows' first gathers here meet page faults."""
        return WarmState.COLD if self.warmth is None else self.warmth.state

    @property
    def holding(self) -> Holding:
        """Which of its rows are here."""
        segments = self.stored.segments
        held = {layer: ((0, each.row_count),) if each.held is None else each.held for layer, each in segments.items()}
        return Holding(self.name, self.version, held)

    def plan(self, layer: int) -> HashPlan:
        """How tokens become rows of a layer; made at first need. Any thread."""
        plan = self.plans.get(layer)
        if plan is None:
            plan = self.plans[layer] = HashPlan.from_model(self.model, layer, self.stored.segments[layer].token_map)
        return plan

    @property
    def listed(self) -> bool:
        """True while it can be opened."""
        return self.standing is not Standing.REMOVED

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it mapped. Raises Unavailable while it is being deleted."""
        if self.closing:
            raise Unavailable(f"{self.name} {self.version} is being deleted: it was replaced or removed")
        self.calls += 1
        try:
            yield
        finally:
            self.calls -= 1

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep it from being freed. Raises Unavailable while it is being deleted."""
        if self.closing:
            raise Unavailable(f"{self.name} {self.version} is being deleted: it was replaced or removed")
        self.holds += 1
        try:
            yield
        finally:
            self.holds -= 1

    def check_intact(self) -> None:
        """Raise DataLoss once a checksum did not fit."""
        if self.corrupt:
            raise DataLoss(f"{self.name} {self.version}: a checksum does not fit; the version is out of service, or being repaired")


class Catalogue:
    """Every resident version by model and version; the current one by model."""

    def __init__(self) -> None:
        self._residents: dict[tuple[str, str], Resident] = {}
        self._current: dict[str, str] = {}
        self._before: dict[str, list[str]] = {}  # what was current before, the last one first; may name versions that have gone

    def add(self, resident: Resident) -> None:
        """Take in a version."""
        self._residents[resident.name, resident.version] = resident

    def drop(self, resident: Resident) -> None:
        """Forget a version."""
        del self._residents[resident.name, resident.version]

    def get(self, model: str, version: str) -> Resident | None:
        """A version, listed or not."""
        return self._residents.get((model, version))

    def find(self, model: str, version: str) -> Resident:
        """A listed version; an empty `version` is the current one. Raises NotFound saying what there is."""
        resident = self.get(model, version or self._current.get(model, ""))
        if resident is not None and resident.listed:
            return resident
        versions = [other.version for other in self.listed() if other.name == model]
        if versions:
            raise NotFound(f"{model} has no version {version or '(none is current)'} here; there is {_some(versions)}")
        names = sorted({other.name for other in self.listed()})
        raise NotFound(f"no model {model!r} here; there is {_some(names)}")

    def find_readable(self, model: str, version: str) -> Resident:
        """As `find`; a version that is named may be off the list: who holds it reads it for as long as it is in memory."""
        resident = self.get(model, version) if version else None
        return self.find(model, version) if resident is None else resident

    def current(self, model: str) -> Resident | None:
        """The version that an empty one means."""
        version = self._current.get(model)
        return None if version is None else self.get(model, version)

    def is_current(self, resident: Resident) -> bool:
        """True for the version that an empty one means."""
        return self._current.get(resident.name) == resident.version

    def make_current(self, model: str, resident: Resident | None) -> None:
        """From now on an empty version of `model` means `resident`; None: nothing."""
        if resident is None:
            self._current.pop(model, None)
            self._before.pop(model, None)
        else:
            self._before[model] = self.before(model, resident)
            self._current[model] = resident.version

    def remember_before(self, model: str, versions: Sequence[str]) -> None:
        """Take over, after a start, what was current before; before `make_current`."""
        self._before[model] = list(versions)

    def before(self, model: str, resident: Resident) -> list[str]:
        """Listed versions that were current before, the last one first, for when `resident` is current."""
        known = [self._current.get(model, ""), *self._before.get(model, ())]
        here = (version for version in dict.fromkeys(known) if version != resident.version)
        return [version for version in here if (other := self.get(model, version)) is not None and other.listed][:BEFORE_MAX]

    def previous(self, model: str) -> Resident:
        """The listed version that was current before the present one. Raises NotFound saying what there is."""
        current = self.find(model, "")
        for version in self.before(model, current):
            return self.find(model, version)
        versions = [other.version for other in self.listed() if other.name == model]
        raise NotFound(f"{model}: no version was current before {current.version}; name one of {_some(versions)}")

    def kept(self, model: str) -> list[Resident]:
        """Versions of `model` that nothing has replaced, without the current one: those current last come first, then the newest."""
        current = self.current(model)
        before = [] if current is None else self.before(model, current)
        kept = [other for other in self.all() if other.name == model and other.standing is Standing.SERVED and other is not current]

        def age(other: Resident) -> tuple[int, float]:
            place = before.index(other.version) if other.version in before else len(before)
            return place, -other.stored.loaded_at_seconds

        return sorted(kept, key=age)

    def newest(self, model: str) -> Resident | None:
        """The version of `model` that came last, of those that nothing has replaced."""
        served = [other for other in self.all() if other.name == model and other.standing is Standing.SERVED]
        return max(served, key=lambda other: other.stored.loaded_at_seconds, default=None)

    def all(self) -> list[Resident]:
        """Every version that occupies memory."""
        return list(self._residents.values())

    def listed(self) -> list[Resident]:
        """Versions that can be opened, grouped by model, the current one first, then the newest."""
        order = {id(r): (r.name, not self.is_current(r), -r.stored.loaded_at_seconds, r.version) for r in self.all()}
        return sorted((resident for resident in self.all() if resident.listed), key=lambda resident: order[id(resident)])

    def retired(self) -> list[Resident]:
        """Versions that go as soon as nobody reads them."""
        return [resident for resident in self.all() if resident.standing is not Standing.SERVED]

    @property
    def table_bytes(self) -> int:
        """Bytes of all segments in memory, and of what is kept beside them."""
        return sum(resident.stored.stored_bytes for resident in self.all())


def _some(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_LISTED_MAX} more" if len(names) > NAMES_LISTED_MAX else ""
    return (", ".join(names[:NAMES_LISTED_MAX]) or "none") + more

"""What the pool holds, as it last said, and which version a choice means.

Owns names, prefixes of versions, and what is said to those who ask for what is not there. Opens nothing (`catalogue`), and
is guarded by its owner's lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.ports import ResidentVersion
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, NotFound, Unavailable
from treadle.contract.version import VERSION_PREFIX_FORM, is_version_prefix

TOLD_MAX = 16  # names or versions, in a refusal
TEXT_TOLD_MAX = 300  # characters of a name that was asked for, in a refusal


@dataclass(frozen=True, slots=True)
class Choice:
    """A memory by name. `model` empty: none. `version`: 8 to 64 hexadecimal digits from its beginning; empty: the current one."""

    model: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """One answer of the pool. `refusals`: why a version cannot be chosen, by version, where it cannot."""

    versions: dict[str, list[ResidentVersion]]
    refusals: dict[str, str]

    @classmethod
    def of(cls, resident: Sequence[ResidentVersion], opener: Opener) -> Listing:
        """Group by model and check each; may take half a second the first time."""
        versions: dict[str, list[ResidentVersion]] = {}
        for each in resident:
            versions.setdefault(each.model.name, []).append(each)
        reasons = {each.version: _refusal(each, opener) for each in resident}
        return cls(versions, {version: reason for version, reason in reasons.items() if reason})


class ResidentVersions:
    """The last listing, or that there has been none and why. `address`: what the pool is called in messages."""

    def __init__(self, address: str, opener: Opener) -> None:
        self._address, self._opener = address, opener
        self._listing: Listing | None = None
        self._trouble = ""
        self._unusable: dict[str, str] = {}  # of the listing's versions, those whose opening showed it, and why

    @property
    def heard(self) -> bool:
        """True once the pool has answered."""
        return self._listing is not None

    @property
    def answers(self) -> bool:
        """True while the pool answers."""
        return self.heard and not self._trouble

    @property
    def names(self) -> list[str]:
        """Models of the pool, by name."""
        return sorted(self._listing.versions) if self._listing is not None else []

    def replace(self, listing: Listing) -> None:
        """The pool has answered."""
        self._listing, self._trouble = listing, ""
        listed = {each.version for versions in listing.versions.values() for each in versions}
        self._unusable = {version: reason for version, reason in self._unusable.items() if version in listed}

    def lost(self, reason: str) -> None:
        """The pool does not answer; what it said last stays."""
        self._trouble = reason or "it does not answer"

    def current(self, name: str) -> ResidentVersion | None:
        """The version that those get who name none."""
        return next(iter(_current(self._versions(name))), None)

    def refusal(self, version: str) -> str:
        """Why a version cannot be chosen; empty: it can, or it is not there."""
        return (self._listing.refusals.get(version) if self._listing is not None else None) or self._unusable.get(version, "")

    def is_unusable(self, version: str, reason: str) -> None:
        """An opening showed that a version cannot be used: that stands as its refusal until it is opened, or leaves the pool."""
        self._unusable[version] = reason

    def is_sound(self, version: str) -> None:
        """A version was opened."""
        self._unusable.pop(version, None)

    def resolve(self, choice: Choice) -> ResidentVersion:
        """The version that a choice means now.

        Raises NotFound naming what there is, InvalidArgument (a version that is none, or a prefix of several),
        FingerprintMismatch naming the field in which the memory does not fit, Unavailable (the pool has never answered).
        """
        if choice.version and not is_version_prefix(choice.version):
            raise InvalidArgument(f"engram.version: {VERSION_PREFIX_FORM} expected, got {choice.version!r}")
        if self._listing is None:
            raise Unavailable(self.unheard)
        versions = self._versions(choice.model)
        if not versions:
            raise NotFound(f"engram.model: there is no memory {choice.model[:TEXT_TOLD_MAX]!r} here; {self._told()}")
        meant = [each for each in versions if each.version.startswith(choice.version)] if choice.version else _current(versions)
        if not meant:
            there = ", ".join(each.version for each in versions[:TOLD_MAX])
            raise NotFound(f"engram.version: {choice.model!r} has no version {choice.version}…; there are {there}")
        if len(meant) > 1:
            raise InvalidArgument(f"engram.version: {len(meant)} versions begin with {choice.version}; give more digits")
        self._opener.check(meant[0].model)
        return meant[0]

    @property
    def unheard(self) -> str:
        """What to say while the pool has never answered."""
        return f"the engram pool at {self._address} has not answered yet" + (f": {self._trouble}" if self._trouble else "")

    def _versions(self, name: str) -> Sequence[ResidentVersion]:
        return self._listing.versions.get(name, ()) if self._listing is not None else ()

    def _told(self) -> str:
        names = [name for name in self.names if (found := self.current(name)) is not None and not self.refusal(found.version)]
        if not names:
            return "there is none to choose"
        more = f" and {len(names) - TOLD_MAX} more" if len(names) > TOLD_MAX else ""
        return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names[:TOLD_MAX]))}{more}"


def _current(versions: Sequence[ResidentVersion]) -> Sequence[ResidentVersion]:
    return [each for each in versions if each.current][:1]


def _refusal(each: ResidentVersion, opener: Opener) -> str:
    try:
        opener.check(each.model)
    except FingerprintMismatch as error:
        return str(error)
    return ""

"""What a pool or store holds, as it last said, and which version a choice means.

Owns names, beginnings of versions, and what is said to those who ask for what is not there, for every kind of memory in its own
words. Opens nothing (`open_versions`), and is guarded by its owner's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from inference_worker.domain.ports import Named, ResidentVersion
from treadle.contract.errors import FingerprintMismatch, InvalidArgument, NotFound, Unavailable
from treadle.contract.version import VERSION_PREFIX_FORM, is_version_prefix

TOLD_MAX = 16  # names or versions, in a refusal
TEXT_TOLD_MAX = 300  # characters of a name that was asked for, in a refusal
ModelT = TypeVar("ModelT", bound=Named)


@dataclass(frozen=True, slots=True)
class Words:
    """What one kind of memory is called in messages and logs.

    kind:     in logs
    one, many: in sentences
    name_field, version_field: of a request
    source:   what keeps it
    open_max: the setting that bounds how many versions are open
    absent:   in metrics, why a choice was refused while the source has not answered
    """

    kind: str
    one: str
    many: str
    name_field: str
    version_field: str
    source: str
    open_max: str
    absent: str


ENGRAM_WORDS = Words(
    "engram", "memory", "memories", "engram.model", "engram.version", "engram pool", "engram_memories_max", "no_pool"
)
PREFIX_WORDS = Words("prefix", "prefix", "prefixes", "prefix.name", "prefix.version", "asm store", "prefixes_max", "no_store")


@dataclass(frozen=True, slots=True)
class Choice:
    """A memory by name. `model` empty: none. `version`: 8 to 64 hexadecimal digits from its beginning; empty: the current one."""

    model: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Listing(Generic[ModelT]):
    """One answer of the source. `refusals`: why a version cannot be chosen, by version, where it cannot."""

    versions: dict[str, list[ResidentVersion[ModelT]]]
    refusals: dict[str, str]

    @classmethod
    def of(cls, resident: Sequence[ResidentVersion[ModelT]], check: Callable[[ModelT], None]) -> Listing[ModelT]:
        """Group by name and check each; may take half a second the first time."""
        versions: dict[str, list[ResidentVersion[ModelT]]] = {}
        for each in resident:
            versions.setdefault(each.model.name, []).append(each)
        reasons = {each.version: _refusal(each, check) for each in resident}
        return cls(versions, {version: reason for version, reason in reasons.items() if reason})


class ResidentVersions(Generic[ModelT]):
    """The last listing, or that there has been none and why.

    address: what the source is called in messages
    check:   raises FingerprintMismatch, naming the field, for a manifest that was made for another language model
    """

    def __init__(self, address: str, check: Callable[[ModelT], None], words: Words) -> None:
        self._address, self._check, self._words = address, check, words
        self._listing: Listing[ModelT] | None = None
        self._trouble = ""
        self._unusable: dict[str, str] = {}  # of the listing's versions, those whose opening showed it, and why

    @property
    def heard(self) -> bool:
        """True once the source has answered."""
        return self._listing is not None

    @property
    def answers(self) -> bool:
        """True while the source answers."""
        return self.heard and not self._trouble

    @property
    def names(self) -> list[str]:
        """Names of what it holds, sorted."""
        return sorted(self._listing.versions) if self._listing is not None else []

    def replace(self, listing: Listing[ModelT]) -> None:
        """The source has answered."""
        self._listing, self._trouble = listing, ""
        listed = {each.version for versions in listing.versions.values() for each in versions}
        self._unusable = {version: reason for version, reason in self._unusable.items() if version in listed}

    def lost(self, reason: str) -> None:
        """The source does not answer; what it said last stays."""
        self._trouble = reason or "it does not answer"

    def current(self, name: str) -> ResidentVersion[ModelT] | None:
        """The version that those get who name none."""
        return next(iter(_current(self._versions(name))), None)

    def refusal(self, version: str) -> str:
        """Why a version cannot be chosen; empty: it can, or it is not there."""
        return (self._listing.refusals.get(version) if self._listing is not None else None) or self._unusable.get(version, "")

    def is_unusable(self, version: str, reason: str) -> None:
        """An opening showed that a version cannot be used: that stands as its refusal until it is opened, or leaves the source."""
        self._unusable[version] = reason

    def is_sound(self, version: str) -> None:
        """A version was opened."""
        self._unusable.pop(version, None)

    def resolve(self, choice: Choice) -> ResidentVersion[ModelT]:
        """The version that a choice means now.

        Raises NotFound naming what there is, InvalidArgument (a version that is none, or a prefix of several),
        FingerprintMismatch naming the field in which the memory does not fit, Unavailable (the source has never answered).
        """
        words = self._words
        if choice.version and not is_version_prefix(choice.version):
            raise InvalidArgument(f"{words.version_field}: {VERSION_PREFIX_FORM} expected, got {choice.version!r}")
        if self._listing is None:
            raise Unavailable(self.unheard)
        versions = self._versions(choice.model)
        if not versions:
            raise NotFound(f"{words.name_field}: there is no {words.one} {choice.model[:TEXT_TOLD_MAX]!r} here; {self._told()}")
        meant = [each for each in versions if each.version.startswith(choice.version)] if choice.version else _current(versions)
        if not meant and not choice.version:
            raise NotFound(self.pointless(choice.model))
        if not meant:
            there = ", ".join(each.version for each in versions[:TOLD_MAX])
            raise NotFound(f"{words.version_field}: {choice.model!r} has no version {choice.version}…; there are {there}")
        if len(meant) > 1:
            raise InvalidArgument(f"{words.version_field}: {len(meant)} versions begin with {choice.version}; give more digits")
        self._check(meant[0].model)
        return meant[0]

    def pointless(self, name: str) -> str:
        """What to say to who names no version where the name means none."""
        there = ", ".join(each.version for each in self._versions(name)[:TOLD_MAX])
        return f"{self._words.version_field}: {name!r} points to no version now; promote one, or choose one of {there}"

    @property
    def unheard(self) -> str:
        """What to say while the source has never answered."""
        return f"the {self._words.source} at {self._address} has not answered yet" + (f": {self._trouble}" if self._trouble else "")

    def _versions(self, name: str) -> Sequence[ResidentVersion[ModelT]]:
        return self._listing.versions.get(name, ()) if self._listing is not None else ()

    def _told(self) -> str:
        names = [name for name in self.names if (found := self.current(name)) is not None and not self.refusal(found.version)]
        if not names:
            return "there is none to choose"
        more = f" and {len(names) - TOLD_MAX} more" if len(names) > TOLD_MAX else ""
        return f"there {'is' if len(names) == 1 else 'are'} {', '.join(map(repr, names[:TOLD_MAX]))}{more}"


def _current(versions: Sequence[ResidentVersion[ModelT]]) -> Sequence[ResidentVersion[ModelT]]:
    return [each for each in versions if each.current][:1]


def _refusal(each: ResidentVersion[ModelT], check: Callable[[ModelT], None]) -> str:
    try:
        check(each.model)
    except FingerprintMismatch as error:
        return str(error)
    return ""

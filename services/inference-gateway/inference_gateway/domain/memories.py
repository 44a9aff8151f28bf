"""Which Engram memory answers a request: what the worker has, what was asked for, and who has the last word.

Owns the words of a choice (`kjv`, `kjv@1f2e3d4c`, `none`, `default`), the alias `MODEL+MEMORY`, and the order in which field,
alias and key count. Does not open memories and fixes no versions: that is the worker's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from inference_gateway.domain.errors import MemoryDamaged, ModelNotFound, RequestRefused
from treadle.contract.errors import InvalidArgument, TreadleError, Unavailable
from treadle.contract.version import RESERVED_NAMES, VERSION_PREFIX_FORM, is_version_prefix

NONE_WORD, DEFAULT_WORD = RESERVED_NAMES
TEXT_TOLD_MAX = 300  # characters of what others said, in a refusal
_FIELD = "treadle.engram"


@dataclass(frozen=True, slots=True)
class Memory:
    """An Engram model as the worker sees it. One without a name says, as its refusal, why the worker does not know what there is.

    version: the one that new requests get
    default: requests get it that choose nothing
    open:    a request that chooses it waits for nothing
    refusal: why it cannot be chosen; empty: it can
    """

    name: str
    version: str
    default: bool = False
    open: bool = False
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """A memory by name. `name` None: the worker's default; empty: none. `version`: its beginning; empty: the current one."""

    name: str | None
    version: str = ""


WORKERS_DEFAULT, NO_MEMORY = MemoryChoice(None), MemoryChoice("")


class ChosenBy(StrEnum):
    """Who had the last word; also a label of the metric."""

    FIELD = "field"
    ALIAS = "alias"
    KEY = "key"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The choice that counts for one request, and whose it is."""

    memory: MemoryChoice
    by: ChosenBy


def parse_choice(text: str) -> MemoryChoice:
    """The choice that `text` spells. Raises InvalidArgument for a form that none has; names are not checked."""
    if text == DEFAULT_WORD:
        return WORKERS_DEFAULT
    if text == NONE_WORD:
        return NO_MEMORY
    name, at, version = text.partition("@")
    if not name or (at and (name in RESERVED_NAMES or not is_version_prefix(version.lower()))):
        raise InvalidArgument(
            f"{text[:TEXT_TOLD_MAX]!r} is no choice of memory: give NAME, NAME@VERSION ({VERSION_PREFIX_FORM} from the beginning of "
            f"the version), {NONE_WORD!r} or {DEFAULT_WORD!r}"
        )
    return MemoryChoice(name, version.lower())


def alias_choice(asked: str, model: str) -> MemoryChoice | None:
    """What the name that a request asks for says of memory, given the model's own name; None: nothing.

    Raises ModelNotFound for a name that is neither the model's nor begins an alias of it.
    """
    if asked == model:
        return None
    if not asked.startswith(f"{model}+"):
        raise ModelNotFound(f"the model {asked[:TEXT_TOLD_MAX]!r} is not served here; {model!r} is")
    try:
        return parse_choice(asked.removeprefix(f"{model}+"))
    except InvalidArgument as error:
        raise ModelNotFound(f"the model {asked[:TEXT_TOLD_MAX]!r} is not served here: {error}") from error


def choose(field: MemoryChoice | None, alias: MemoryChoice | None, key: MemoryChoice | None, memories: Sequence[Memory]) -> Chosen:
    """The choice that counts: field before alias before the key's default before the worker's.

    Raises RequestRefused when field and alias name different memories.
    """
    if field is not None and alias is not None:
        return Chosen(_agreed(field, alias, memories), ChosenBy.FIELD)
    for choice, by in ((field, ChosenBy.FIELD), (alias, ChosenBy.ALIAS), (key, ChosenBy.KEY)):
        if choice is not None:
            return Chosen(choice, by)
    return Chosen(WORKERS_DEFAULT, ChosenBy.DEFAULT)


def uses_memory(choice: MemoryChoice, memories: Sequence[Memory]) -> bool:
    """Whether a request with this choice is answered with a memory."""
    return bool(_name_of(choice, memories))


def looked_up(choice: MemoryChoice, memories: Sequence[Memory]) -> tuple[str, str] | None:
    """Name and whole version (empty: the current one) of the memory whose rows a request with this choice will want.

    None: of none, or it cannot be told here.
    """
    name = _name_of(choice, memories)
    memory = find(name, memories)
    if not name or (memory is None and choice.version):
        return None
    if memory is None:
        return name, ""
    return None if memory.refusal or not memory.version.startswith(choice.version) else (name, memory.version)


def why_not(choice: MemoryChoice, memories: Sequence[Memory]) -> str | None:
    """Why a choice could not be had when the worker was last asked; None: nothing spoke against it. For answers about models:
    whether a request gets its memory is decided by the worker, who knows better and later.

    Raises Unavailable with the reason while the worker does not know what there is.
    """
    if not choice.name:
        return None
    memory = find(choice.name, memories)
    if memory is None:
        unheard = find("", memories)
        if unheard is not None:
            raise Unavailable(f"it is not known which memories there are: {unheard.refusal[:TEXT_TOLD_MAX]}")
        return f"there is no memory {choice.name[:TEXT_TOLD_MAX]!r} here"
    if memory.refusal and memory.version.startswith(choice.version):
        return f"the memory {choice.name!r} cannot be used: {memory.refusal[:TEXT_TOLD_MAX]}"
    return None


def refusal(chosen: Chosen, asked: str, reason: str) -> TreadleError:
    """The error for a choice that cannot be had: of the model's name where an alias made it, of the field else."""
    if chosen.by is ChosenBy.ALIAS:
        return ModelNotFound(f"the model {asked[:TEXT_TOLD_MAX]!r} is not served here: {reason}")
    return RequestRefused(f"{_whose(chosen)}: {reason}", param=_FIELD, code="engram_not_found")


def damaged(chosen: Chosen, reason: str) -> MemoryDamaged:
    """The error for a choice whose memory is there and cannot be read: no fault of the request."""
    return MemoryDamaged(f"{_whose(chosen)}: {reason}", param="model" if chosen.by is ChosenBy.ALIAS else _FIELD)


def find(name: str, memories: Sequence[Memory]) -> Memory | None:
    """The memory of that name."""
    return next((memory for memory in memories if memory.name == name), None)


def default_of(memories: Sequence[Memory]) -> Memory | None:
    """The one that requests get which choose nothing."""
    return next((memory for memory in memories if memory.default), None)


def choosable(memories: Sequence[Memory]) -> list[Memory]:
    """Those that a request can choose by name."""
    return [memory for memory in memories if not memory.refusal and memory.name not in (NONE_WORD, DEFAULT_WORD)]


def _agreed(field: MemoryChoice, alias: MemoryChoice, memories: Sequence[Memory]) -> MemoryChoice:
    """What both say, with the longer version. `kjv` and `kjv@1f2e3d4c` agree; so do `default` and the default's name."""
    if _name_of(field, memories) == _name_of(alias, memories):
        longer, shorter = sorted((field, alias), key=lambda choice: len(choice.version), reverse=True)
        if longer.version.startswith(shorter.version):
            return longer
    raise RequestRefused(
        f"'{_FIELD}' and 'model' choose different memories; choose by one of them", param=_FIELD, code="engram_conflict"
    )


def _name_of(choice: MemoryChoice, memories: Sequence[Memory]) -> str:
    if choice.name is not None:
        return choice.name
    default = default_of(memories)
    return default.name if default else ""


def _whose(chosen: Chosen) -> str:
    return {ChosenBy.KEY: "the default memory of this key", ChosenBy.ALIAS: "'model'"}.get(chosen.by, f"'{_FIELD}'")

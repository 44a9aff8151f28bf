"""Which long prefix a request is answered behind, as it was asked for and as workers know it.

Owns the words of a choice (`nba-rules`, `nba-rules@1f2e3d4c`, `none`). Does not open dictionaries and fixes no versions: that is the
worker's, who also knows better and later what there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inference_gateway.domain.memories import DEFAULT_WORD, NONE_WORD, TEXT_TOLD_MAX
from treadle.contract.errors import InvalidArgument
from treadle.contract.version import VERSION_PREFIX_FORM, is_version_prefix

FIELD = "treadle.prefix"


@dataclass(frozen=True, slots=True)
class PrefixChoice:
    """A prefix by name. version: its beginning; empty: the one that the name points to."""

    name: str
    version: str = ""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix as a worker sees it. One without a name says, as its refusal, why the worker does not know what there is.

    version:      the one that new requests get
    tokens:       that it stands for
    open:         a request that chooses it waits for nothing
    requests:     that use it now; mapped_bytes: of its files, at that worker
    fallbacks:    requests that were sent to the exact KV since the worker's start
    refusal:      why it cannot be chosen; empty: it can
    """

    name: str
    version: str
    tokens: int
    open: bool
    requests: int
    mapped_bytes: int
    fallbacks: int
    refusal: str


def parse_prefix(text: str) -> PrefixChoice | None:
    """The choice that `text` spells; None: none. Raises InvalidArgument for a form that none has; names are not checked."""
    if text == NONE_WORD:
        return None
    name, at, version = text.partition("@")
    if not name or name in (NONE_WORD, DEFAULT_WORD) or (at and not is_version_prefix(version.lower())):
        raise InvalidArgument(
            f"{text[:TEXT_TOLD_MAX]!r} is no choice of a prefix: give NAME, NAME@VERSION ({VERSION_PREFIX_FORM} from the beginning of "
            f"the version) or {NONE_WORD!r}"
        )
    return PrefixChoice(name, version.lower())


def is_known(choice: PrefixChoice | None, prefixes: Sequence[Prefix]) -> bool:
    """Whether a worker that told of `prefixes` can use a choice, as far as is known."""
    return choice is None or any(prefix.name == choice.name and not prefix.refusal for prefix in prefixes)


def prefix_ref(choice: PrefixChoice | None, prefixes: Sequence[Prefix]) -> str:
    """NAME@VERSION of what a worker that told of `prefixes` would use for a choice; "": none."""
    if choice is None:
        return ""
    known = next((prefix for prefix in prefixes if prefix.name == choice.name), None)
    if known is not None and known.version.startswith(choice.version):
        return f"{known.name}@{known.version}"
    return f"{choice.name}@{choice.version}"

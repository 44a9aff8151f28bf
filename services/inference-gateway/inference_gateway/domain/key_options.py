"""What may stand behind a key in the key file, `name=value` each, and what it means.

Owns names and checks of the options. Where the lines come from is the adapters' (key_file), who writes them the command's.
"""

from __future__ import annotations

from collections.abc import Mapping

from inference_gateway.domain.api_keys import PRIORITIES, KeyRecord
from inference_gateway.domain.limits import Allowance
from inference_gateway.domain.memories import MemoryChoice, parse_choice
from treadle.contract.errors import InvalidArgument
from treadle.contract.version import check_name

LIMIT_MAX = 10**12  # of requests or tokens a minute
ENGRAM, TENANT, PRIORITY = "engram", "tenant", "priority"
REQUESTS, TOKENS, CALLS = "requests_per_minute", "tokens_per_minute", "calls_max"
OPTIONS = frozenset({ENGRAM, TENANT, PRIORITY, REQUESTS, TOKENS, CALLS})


def record_of(digest: bytes, options: Mapping[str, str]) -> KeyRecord:
    """The key with sha256 `digest`, 32 bytes, and these options. Raises InvalidArgument, naming the option."""
    return KeyRecord(
        digest=digest,
        tenant=_name(options.get(TENANT, "")),
        memory=_memory(options.get(ENGRAM)),
        priority=_priority(options.get(PRIORITY)),
        allowance=Allowance(*(_limit(name, options.get(name)) for name in (REQUESTS, TOKENS, CALLS))),
    )


def _name(text: str) -> str:
    try:
        return check_name(text) if text else ""
    except InvalidArgument as error:
        raise InvalidArgument(f"{TENANT}: {error}") from error


def _priority(text: str | None) -> str | None:
    if text is not None and text not in PRIORITIES:
        raise InvalidArgument(f"{PRIORITY}: one of {', '.join(PRIORITIES)} expected")
    return text


def _limit(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or len(text) > len(str(LIMIT_MAX)) or not 1 <= int(text) <= LIMIT_MAX:
        raise InvalidArgument(f"{name}: a whole number from 1 to {LIMIT_MAX} expected")
    return int(text)


def _memory(text: str | None) -> MemoryChoice | None:
    if text is None:
        return None
    try:
        choice = parse_choice(text)
        if choice.name:
            check_name(choice.name)
    except InvalidArgument as error:
        raise InvalidArgument(f"{ENGRAM}: {error}") from error
    return choice

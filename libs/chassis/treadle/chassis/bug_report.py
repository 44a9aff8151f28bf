"""What a log may say of an error of ours: which it was and where, and none of the words that it carries.

An exception's message may hold a piece of what it stumbled on, and that may be a prompt. Our own source lines do not.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator

FRAMES_MAX = 12  # of each error, the innermost


def bug_report(error: BaseException) -> str:
    """Classes and places of `error` and of what caused it, innermost last, in one line."""
    return " <- ".join(f"{type(one).__name__} at {_places(one)}" for one in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)


def _places(error: BaseException) -> str:
    frames = [(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][-FRAMES_MAX:]
    return " > ".join(f"{'/'.join(code.co_filename.split('/')[-2:])}:{line} {code.co_name}" for code, line in frames) or "nowhere"

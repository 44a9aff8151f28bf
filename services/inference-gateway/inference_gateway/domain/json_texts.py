"""JSON within JSON: texts of requests and answers that hold an object of their own, as calls of tools do."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str) -> Any:
    """What `text` says. Raises ValueError for what is no JSON, or holds half of a surrogate pair: JSON can write that, no text can be it."""
    try:
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise ValueError("too deep") from error
    return value

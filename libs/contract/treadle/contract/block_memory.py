"""How a block of a prefix cache says with which memories it was made: workers write it, gateways compare it."""

from __future__ import annotations


def block_memory(engram: str = "", prefix: str = "", *, exact: bool = False) -> str:
    """The words of `CachedBlock.memory`, for the memories NAME@VERSION of each kind; "": none.

    exact: made behind the exact KV of the prefix, after the guard had sent the request there: what the dictionary made is never shared with it
    """
    parts = [engram] if engram else []
    if prefix:
        parts.append(f"{'prefix-kv' if exact else 'prefix'}:{prefix}")  # no name holds a colon or a space
    return " ".join(parts)

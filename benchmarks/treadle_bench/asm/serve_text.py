"""Text for a prefix and for the traces of its dictionary: the language reference that comes with Python, which every machine has."""

from __future__ import annotations

from pydoc_data.topics import topics

TRACE_CHARACTERS = 400


def prefix_text() -> str:
    """Topics in the order of their names, every second one."""
    return "\n\n".join(topics[name] for name in sorted(topics)[::2])


def traces(count: int) -> list[str]:
    """Pieces of the other topics, one line each."""
    text = " ".join(" ".join(topics[name].split()) for name in sorted(topics)[1::2])
    return [text[begin : begin + TRACE_CHARACTERS] for begin in range(0, count * TRACE_CHARACTERS, TRACE_CHARACTERS)]

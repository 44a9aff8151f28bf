"""What a supervisor tells: who started, is ready, died, drains; as a value and as a line of text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

EventKind = Literal["starting", "progress", "ready", "done", "died", "draining", "stopped", "killed"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something to tell: what happened to whom, in words."""

    kind: EventKind
    name: str
    text: str = ""
    seconds: float = 0.0


def describe(event: Event) -> str:
    """An event as a line of text."""
    took = f" ({event.seconds:.1f} s)"
    lines = {
        "starting": f"{event.name} starts (at most {event.seconds:.0f} s)",
        "progress": f"{event.name}: {event.text}",
        "ready": f"{event.name} is ready on {event.text}{took}",
        "done": f"{event.name} done{took}" if event.seconds else f"{event.name}: {event.text}",
        "died": f"{event.name} died: {event.text}",
        "draining": f"{event.name} drains (at most {event.seconds:.0f} s)",
        "stopped": f"{event.name} stopped",
        "killed": f"{event.name} killed: {event.text}",
    }
    return lines[event.kind]

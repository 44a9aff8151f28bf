"""What a gateway adds: the time a client sees less what the worker took, beside the same straight at the workers.

Each token's text is the moment at which the worker gave it away, of the clock that the client reads as well. `way`: from sending to
the worker and from its hand to ours, of the first token both, of the others the latter. It holds what gRPC and the client
themselves cost; the same calls without a gateway, in turns with those through it, hold that too. The gateway adds the difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from treadle_loadtests.calls import Seen


@dataclass(slots=True)
class Ways:
    """Seconds of the ways of whole answers."""

    first: list[float] = field(default_factory=list)
    later: list[float] = field(default_factory=list)

    def add(self, seen: Sequence[Seen]) -> None:
        """Take in the calls that came whole."""
        for call in seen:
            if call.whole:
                self.first.append(call.first_added_seconds())
                self.later += call.added_seconds()


def added_ms(through: Sequence[float], straight: Sequence[float], percentile: float) -> float:
    """By how many milliseconds a percentile of the ways through the gateway is above the one straight to the workers."""
    if not through or not straight:
        return float("inf")
    return 1e3 * float(np.percentile(through, percentile) - np.percentile(straight, percentile))

"""Whether Engram rows are added to the hidden state; apart from what computes, so that settings are read without torch."""

from __future__ import annotations

from enum import StrEnum


class FusionMode(StrEnum):
    """What happens to Engram rows once they are gated and projected."""

    AUTO = "auto"  # on where the manifest names fusion weights, shadow where they would be random
    ON = "on"  # added to the hidden state
    SHADOW = "shadow"  # all computed, nothing added

"""What a build is asked for: settings that shape the dictionary, and limits that keep its work bounded.

Owns the checks that need no model and no text. Does not read files or know what a setting does to keys (`treadle.nn`).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from treadle.contract.checks import expect, is_int, rising
from treadle.contract.dictionary import CHUNKS_MAX, LAYERS_MAX, DictionarySettings, KeyMode, Positions
from treadle.contract.version import check_name

HELD_OUT_EVERY = 10  # of so many traces the last is never learnt from: what the guard and the card's figures are measured on
SELF_TRACES_MAX = 100_000
MATCHED_KEYS, MATCHED_EVERY = 256, 4  # unless told otherwise: so many at most, and one of so many tokens of the prefix


def matched_keys_of(prefix_tokens: int) -> int:
    """How many matched keys do well for a prefix (docs/decisions/0039)."""
    return min(MATCHED_KEYS, prefix_tokens // MATCHED_EVERY)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One dictionary's making.

    layers:         0-based decoder layers that get a dictionary, rising; empty: all
    chunk_tokens:   the prefix is encoded in chunks of so many tokens, each by itself; 0: at once
    held_out_every: of so many traces one is held out; 0: none, and the card then says nothing of fidelity
    self_traces:    traces that the model writes itself; 0: they come from a file
    keep_prefix_kv: write the exact prefix KV beside the dictionary, for requests that the guard sends back
    """

    name: str
    settings: DictionarySettings = field(default_factory=DictionarySettings)
    layers: tuple[int, ...] = ()
    chunk_tokens: int = 0
    held_out_every: int = HELD_OUT_EVERY
    self_traces: int = 0
    keep_prefix_kv: bool = False

    def __post_init__(self) -> None:
        check_name(self.name)
        expect(rising(self.layers, 0, LAYERS_MAX - 1), f"layers: 0-based and rising, got {list(self.layers)}")
        expect(is_int(self.chunk_tokens, 0, 1 << 40), f"chunk_tokens: 0 or more, got {self.chunk_tokens!r}")
        expect(
            self.held_out_every == 0 or is_int(self.held_out_every, 2, 1 << 20),
            f"held_out_every: 0, or 2 and more, got {self.held_out_every!r}",
        )
        expect(is_int(self.self_traces, 0, SELF_TRACES_MAX), f"self_traces: 0 to {SELF_TRACES_MAX}, got {self.self_traces!r}")
        expect(
            self.settings.key is not KeyMode.OWN_POSITION or self.settings.positions is Positions.AFTER_PREFIX,
            "key own-position: queries are rotated where calibration saw them, so requests stand after the prefix too: positions after-prefix",
        )

    def chunks(self, tokens: int) -> tuple[int, ...]:
        """Tokens of each chunk of a prefix of `tokens`. Raises InvalidArgument where there would be too many."""
        size = self.chunk_tokens or tokens
        expect(-(-tokens // size) <= CHUNKS_MAX, f"chunk_tokens {size}: {tokens} tokens make more than {CHUNKS_MAX} chunks")
        return tuple(min(size, tokens - first) for first in range(0, tokens, size))

    @property
    def identity(self) -> dict[str, str]:
        """Field by field, as an unfinished build compares it."""
        fields = asdict(self)
        settings = fields.pop("settings")
        return {name: json.dumps(value) for name, value in fields.items()} | {
            f"settings.{name}": str(value) for name, value in settings.items()
        }

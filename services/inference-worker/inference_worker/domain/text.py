"""Tokens to text, as they come: complete characters only, and nothing of a stop string.

Works on the bytes of each token, so that a character split over tokens is exact and each token costs the same.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of each token, by id; `special` tokens have no text. Ids past the end (padding of the matrix) have none either."""

    pieces: tuple[bytes, ...]
    special: frozenset[int] = frozenset()

    def bytes_of(self, token_id: int) -> bytes:
        """A token's own bytes, special tokens included; they can be half a character."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


class StopSearch:
    """Looks for stop strings in text that comes in pieces; what it lets through does not depend on where pieces end.

    Of several stop strings the one that is complete first wins; of two complete at once, the longer.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Text that is certain not to belong to a stop string; after the stop string (`found`) nothing comes any more."""
        if self.found:
            return ""
        if not self._stops:
            return text
        self._held += text
        ends = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            self.found = True
            _, start = min(ends)
            return self._release(start, drop=True)
        return self._release(len(self._held) - self._beginning())

    def flush(self) -> str:
        """What is still held, once no more text can come."""
        return self._release(len(self._held))

    def _beginning(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            tail = self._held[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

    def _release(self, count: int, *, drop: bool = False) -> str:
        released, self._held = self._held[:count], "" if drop else self._held[count:]
        return released


class TextStream:
    """The text of one answer. `stopped` once a stop string was met."""

    def __init__(self, vocabulary: Vocabulary, stops: Sequence[str] = ()) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._search = StopSearch(stops)

    @property
    def stopped(self) -> bool:
        """True once the text contains a stop string; nothing of it was given out."""
        return self._search.found

    def push(self, token_id: int) -> str:
        """Text that became certain with this token."""
        if token_id in self._vocabulary.special:
            return ""
        return self._search.feed(self._decoder.decode(self._vocabulary.bytes_of(token_id)))

    def flush(self) -> str:
        """The rest, at the end of the answer; an unfinished character becomes U+FFFD."""
        return self._search.feed(self._decoder.decode(b"", final=True)) + self._search.flush()

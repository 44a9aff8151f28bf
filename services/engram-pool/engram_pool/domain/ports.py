"""What the domain needs from outside beside rows and their store: who warms pages, who opens doors to the rows, who counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engram_pool.domain.storing import StoredVersion
from treadle.contract.owners import Door
from treadle.contract.warm_state import WarmState


class Warmth(Protocol):
    """How far the pages of a version are entered in this process."""

    bytes_entered: int

    @property
    def state(self) -> WarmState:
        """Cold, warming or warm."""

    def drop(self) -> None:
        """Let go of what is not entered yet: the version is unmapped."""


class Warmer(Protocol):
    """Enters pages in the background."""

    def warm(self, spans: Sequence[NDArray[np.uint8]]) -> Warmth:
        """Begin with these; returns at once."""

    def close(self) -> None:
        """Stop."""


class Doors(Protocol):
    """Native ways to the rows of published versions, beside gRPC. Called from any thread."""

    @property
    def open_doors(self) -> Sequence[Door]:
        """Where they are, the fastest first."""

    def publish(self, stored: StoredVersion) -> None:
        """Serve a version from now on, or again. Its segments stay mapped until it was let go."""

    def withdraw(self, stored: StoredVersion) -> None:
        """Take a version out of sight at once; requests that have begun read it to their end."""

    def read(self, stored: StoredVersion) -> bool:
        """True while a request reads a version that was withdrawn."""

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """Withdraw; True once no request reads it. False, and it is served on, where one still does after `seconds`."""

    def drain(self) -> None:
        """Refuse new requests as UNAVAILABLE from now on."""

    def close(self) -> None:
        """End every request and connection; nothing reads a segment afterwards."""


class Nearing(Protocol):
    """Rows on their way to nearer memory."""

    async def arrived(self, seconds: float) -> bool:
        """True once all are there; False after `seconds`. Raises DataLoss, Unavailable where they cannot be read."""

    def end(self) -> None:
        """Begin no further piece, wait for those in flight. Blocking: for threads."""


class Nearness(Protocol):
    """Brings rows nearer to those who will ask for them, while nothing with a deadline waits."""

    def brings_nearer(self, stored: StoredVersion, warm: WarmState) -> bool:
        """Whether rows of a version can come nearer at all; `warm`: how far its pages are entered."""

    def bring_near(self, stored: StoredVersion, layer: int, rows: NDArray[np.int64]) -> Nearing | None:
        """Begin to read rows [n] of a layer that are held here; None: no room for it now. Raises Unavailable.

        The caller keeps the version in use until it has ended.
        """


class NoDoors:
    """The Doors of a pool that has gRPC alone."""

    open_doors: Sequence[Door] = ()

    def publish(self, stored: StoredVersion) -> None:
        """See Doors."""

    def withdraw(self, stored: StoredVersion) -> None:
        """See Doors."""

    def read(self, stored: StoredVersion) -> bool:
        """See Doors."""
        return False

    def let_go(self, stored: StoredVersion, seconds: float) -> bool:
        """See Doors."""
        return True

    def drain(self) -> None:
        """See Doors."""

    def close(self) -> None:
        """See Doors."""

    def brings_nearer(self, stored: StoredVersion, warm: WarmState) -> bool:
        """See Nearness: without a queue of deadlines nothing can be done in idle time only."""
        return False

    def bring_near(self, stored: StoredVersion, layer: int, rows: NDArray[np.int64]) -> Nearing | None:
        """See Nearness."""
        return None


class Meters(Protocol):
    """Counts what happened."""

    def load_ended(self, outcome: str) -> None:
        """A load ended: ok, refused, cancelled or failed."""

    def rows_loaded(self, byte_count: int) -> None:
        """Bytes of rows were written."""

    def gather_ended(self, outcome: str, rows: int, seconds: float) -> None:
        """A Gather or Lookup ended after handing out `rows`."""

    def corrupt(self, segments: int) -> None:
        """Segments were found corrupt or torn."""

    def left(self, versions: int) -> None:
        """Versions were left unserved at start: they could not be read."""

    def promoted(self) -> None:
        """A version was made current by name."""

    def fusion_read(self, byte_count: int) -> None:
        """Bytes of fusion weights were handed out."""

    def scrubbed(self, outcome: str, chunks: int) -> None:
        """Chunks were checked in the background: ok, bad or repaired."""

    def hinted(self, outcome: str, tokens: int) -> None:
        """Tokens of hints: near, full, brought, late or failed."""

"""What a step leaves to be handed out at its end: pieces and errors of answers, and leases of requests that are over.

Last, so that whoever has an answer finds it counted in totals and metrics, and no memory is closed whose tickets may still be read.
"""

from __future__ import annotations

from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.ports import Sink
from inference_worker.domain.prefix import OpenPrefix
from inference_worker.domain.request import Piece


class Outbox:
    """Of one engine, for whoever runs its steps."""

    def __init__(self) -> None:
        self._contents: list[tuple[Sink, Piece | Exception]] = []
        self._leases: list[Lease[EngramMemory] | Lease[OpenPrefix]] = []

    def put(self, sink: Sink, content: Piece | Exception) -> None:
        """A piece of an answer, or what ended it."""
        self._contents.append((sink, content))

    def let_go(self, lease: Lease[EngramMemory] | Lease[OpenPrefix]) -> None:
        """A request no longer uses this."""
        self._leases.append(lease)

    def hand_out(self) -> None:
        """Release leases, then give the callers what is theirs."""
        leases, self._leases = self._leases, []
        for lease in leases:
            lease.release()
        contents, self._contents = self._contents, []
        for sink, content in contents:
            if isinstance(content, Piece):
                sink.deliver(content)
            else:
                sink.fail(content)

"""The directory's lists as messages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engram_pool.domain.directory import Listing
from treadle.client.engram.owners import holding_message, owner_message
from treadle.engram.v1 import engram_pool_pb2 as pb

LIST_BYTES_MAX = 256 << 10  # of one message, before the holding that crosses it: messages stay below 1 MiB


def list_messages(listing: Listing, model: str, version: str, only: str | None) -> Iterator[pb.WatchOwnersResponse]:
    """The messages of one list.

    model, version: both given: what the owners hold of this version alone
    only:           the one owner to tell of; None: all
    """
    message = pb.WatchOwnersResponse(stale=listing.stale)
    for owner in listing.owners:
        if only is not None and owner.name != only:
            continue
        message.owners.append(owner_message(replace(owner, holdings=())))
        for holding in owner.holdings:
            if model and (holding.model, holding.version) != (model, version):
                continue
            if message.ByteSize() > LIST_BYTES_MAX:
                yield message
                message = pb.WatchOwnersResponse(owners=[owner_message(replace(owner, holdings=()))], stale=listing.stale)
            message.owners[-1].holdings.append(holding_message(holding))
    message.complete = True
    yield message

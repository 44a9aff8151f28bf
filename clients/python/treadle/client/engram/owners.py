"""The owners of a fabric as a pool tells of them: messages of both directions, and a watch that notices silence."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from treadle.client.endpoint import Endpoint
from treadle.contract import InvalidArgument, ResourceExhausted, Unavailable
from treadle.contract.owners import Door, Holding, Owner
from treadle.contract.placement import OWNERS_MAX
from treadle.engram.v1 import engram_pool_pb2 as pb

ENTRY_BYTES_MAX = 4 << 20  # one owner; an entry of 256 versions of three spread tables takes about 1 MiB
SILENCE_SECONDS = 3.0  # after which a watch is over: the pool, or the way to it, is gone


@dataclass(frozen=True, slots=True)
class OwnerList:
    """Owners, rising by name. stale: the directory has not answered for a while, this is the last list known."""

    owners: tuple[Owner, ...]
    stale: bool = False

    def holding(self, model: str, version: str) -> tuple[Owner, ...]:
        """Those who hold rows of a version."""
        return tuple(owner for owner in self.owners if (held := owner.holding(model, version)) is not None and held.rows)


def owner_message(owner: Owner) -> pb.Owner:
    """Write one."""
    return pb.Owner(
        name=owner.name, endpoint=owner.endpoint, epoch=owner.epoch, leaving=owner.leaving, reachable=owner.reachable,
        doors=[pb.Door(transport=door.transport, address=door.address) for door in owner.doors],
        holdings=[holding_message(holding) for holding in owner.holdings],
    )  # fmt: skip


def holding_message(holding: Holding) -> pb.Holding:
    """Write one."""
    layers = [
        pb.LayerHolding(layer=layer, held=[pb.RowRange(first=first, last=last) for first, last in ranges])
        for layer, ranges in holding.held.items()
    ]
    return pb.Holding(ref=pb.ModelRef(model=holding.model, version=holding.version), layers=layers)


def owner_from(message: pb.Owner) -> Owner:
    """Read one. Raises InvalidArgument for what an owner cannot be."""
    holdings = tuple(
        Holding(each.ref.model, each.ref.version, {part.layer: [(r.first, r.last) for r in part.held] for part in each.layers})
        for each in message.holdings
    )
    doors = tuple(Door(door.transport, door.address) for door in message.doors)
    return Owner(message.name, message.endpoint, doors, holdings, message.epoch, message.leaving, message.reachable)


def owner_bytes(owner: Owner) -> bytes:
    """An entry as a directory keeps it."""
    return owner_message(owner).SerializeToString()


def owner_from_bytes(data: bytes) -> Owner:
    """Read one. Raises InvalidArgument for what is no entry, or one beyond ENTRY_BYTES_MAX."""
    if len(data) > ENTRY_BYTES_MAX:
        raise InvalidArgument(f"an owner's entry of {len(data)} bytes; the limit is {ENTRY_BYTES_MAX}")
    try:
        return owner_from(pb.Owner.FromString(data))
    except (DecodeError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"no owner's entry: {error}") from error


class _Assembly:
    """Puts a list together from its messages."""

    def __init__(self) -> None:
        self._owners: dict[str, Owner] = {}

    def take(self, message: pb.WatchOwnersResponse) -> OwnerList | None:
        """A list, once its last message is here. Raises ResourceExhausted beyond OWNERS_MAX."""
        for sent in message.owners:
            owner = owner_from(sent)
            known = self._owners.get(owner.name)
            self._owners[owner.name] = owner if known is None else replace(owner, holdings=(*known.holdings, *owner.holdings))
        if len(self._owners) > OWNERS_MAX:
            raise ResourceExhausted(f"the pool tells of more than {OWNERS_MAX} owners")
        if not message.complete:
            return None
        owners, self._owners = self._owners, {}
        return OwnerList(tuple(owners[name] for name in sorted(owners)), message.stale)


class OwnerWatch:
    """A watch in progress, read by one thread; `cancel` from any."""

    def __init__(self, endpoint: Endpoint, call: Any, seconds: float = SILENCE_SECONDS) -> None:
        self._endpoint, self._call, self._seconds = endpoint, call, seconds
        self._heard, self._over = threading.Event(), False
        self._silent = False

    def __iter__(self) -> Generator[OwnerList, None, None]:
        """Lists as they come. Raises Unavailable when the pool stops, or nothing was heard of it for SILENCE_SECONDS."""
        alarm = threading.Thread(target=self._listen, name="treadle-owner-watch", daemon=True)
        alarm.start()
        assembly = _Assembly()
        try:
            for answer in self._endpoint.answers_of(self._call):
                self._heard.set()
                if (listed := assembly.take(answer)) is not None:
                    yield listed
        except Unavailable as error:
            if self._silent:
                raise Unavailable(f"{self._endpoint.address}: nothing was heard of the pool for {self._seconds} s") from error
            raise
        finally:
            self.cancel()
            alarm.join()

    def cancel(self) -> None:
        """End it."""
        self._over = True
        self._heard.set()
        self._call.cancel()

    def _listen(self) -> None:
        while self._heard.wait(self._seconds) and not self._over:
            self._heard.clear()
        if not self._over:  # a host that is cut off sends no error
            self._silent = True
            self._call.cancel()


async def owner_lists(
    answers: AsyncIterator[pb.WatchOwnersResponse], seconds: float = SILENCE_SECONDS
) -> AsyncGenerator[OwnerList, None]:
    """Lists from a watch in progress on the event loop. Raises Unavailable after `seconds` of silence."""
    assembly = _Assembly()
    while True:
        try:
            async with asyncio.timeout(seconds):
                answer = await anext(answers)
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise Unavailable(f"nothing was heard of the pool for {seconds} s") from error
        if (listed := assembly.take(answer)) is not None:
            yield listed

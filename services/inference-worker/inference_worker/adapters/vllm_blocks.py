"""vLLM's own KV events as the list of blocks in its prefix cache: which there are, whose, and made with which memory.

Owns the subscription and the names of blocks. vLLM numbers its messages: where one is missing, all that was told is taken back,
and what is stored from then on is told anew; a gateway then knows less than there is, never more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import msgspec
import zmq
import zmq.asyncio
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

from inference_worker.domain.cached_blocks import BlockLog, CachedBlock
from treadle.contract.block_memory import block_memory

log = logging.getLogger("treadle.worker")
NAME_BYTES = 8  # vLLM's events carry 64 bits of a block's hash
Origin = tuple[str, str]  # the request's salt, and its memories, as `block_memory` writes them


class VllmBlocks:
    """Follows one engine's events into a BlockLog. On the event loop; `run` is its task.

    endpoint: where the engine publishes, as ZeroMQ has it
    """

    def __init__(self, endpoint: str, blocks: BlockLog) -> None:
        self._endpoint, self._blocks = endpoint, blocks
        self._origins: dict[
            bytes, Origin
        ] = {}  # of the blocks that are there: a block's salt stands at the first of its sequence alone
        self._next: int | None = None
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    async def run(self) -> None:
        """Until cancelled."""
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.connect(self._endpoint)
            while True:
                _, number, payload = await socket.recv_multipart()
                try:
                    self.hear(int.from_bytes(number, "big"), payload)
                except (msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:  # not what this version of vLLM sends
                    log.warning("an event of vllm's prefix cache cannot be read", extra={"reason": repr(error)})
                    self._forget()

    def hear(self, number: int, payload: bytes) -> None:
        """One message. number: the publisher's, rising by one"""
        if self._next is not None and number != self._next:
            log.info("events of vllm's prefix cache are missing", extra={"expected": self._next, "got": number})
            self._forget()
        self._next = number + 1
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                for block in self._stored(event):
                    self._origins[block.name] = (block.cache_salt, block.memory)
                    self._blocks.stored(block)
            elif isinstance(event, BlockRemoved):
                for name in map(name_of, event.block_hashes):
                    self._origins.pop(name, None)
                    self._blocks.removed(name)
            elif isinstance(event, AllBlocksCleared):
                self._forget()

    def _stored(self, event: BlockStored) -> Iterator[CachedBlock]:
        parent = b"" if event.parent_block_hash is None else name_of(event.parent_block_hash)
        if parent and parent not in self._origins:
            return  # it was stored before we heard of anything: nobody could place what follows it
        origin = self._origins[parent] if parent else origin_of(event)
        for place, block_hash in enumerate(event.block_hashes):
            name, first = name_of(block_hash), place * event.block_size
            yield CachedBlock(name, parent, tuple(event.token_ids[first : first + event.block_size]), *origin)
            parent = name

    def _forget(self) -> None:
        self._origins.clear()
        self._blocks.cleared()


def name_of(block_hash: int | bytes) -> bytes:
    """A block's name from what vLLM's events call it."""
    return block_hash if isinstance(block_hash, bytes) else (block_hash % (1 << 8 * NAME_BYTES)).to_bytes(NAME_BYTES, "big")


def origin_of(event: BlockStored) -> Origin:
    """Whose block the first of a sequence is, from the salt that we and our scheduler have given it."""
    keys = (event.extra_keys or [None])[0] or ()
    salt = next((key for key in keys if isinstance(key, str)), "")
    engram, prefix, exact = "", "", False
    while salt:  # wrapped once by the worker, and once more by the scheduler for each memory that there is
        wrapped = json.loads(salt)
        if wrapped["engram"] is None:
            return str(wrapped["tenant"]), block_memory(engram, prefix, exact=exact)
        identity, salt = json.loads(wrapped["engram"]), str(wrapped["tenant"])
        if "prefix" in identity:
            prefix, exact = str(identity["prefix"]), bool(identity["prefix_exact"])
        else:
            engram = f"{identity['engram']}@{identity['engram_version']}"
    return "", block_memory(engram, prefix, exact=exact)

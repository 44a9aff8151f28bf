"""Makes the fleet and its members from addresses. Part of the entry point: it knows settings and adapters."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from inference_gateway.adapters.prompt_encoder import SharedEncoders
from inference_gateway.adapters.worker import RpcWorker
from inference_gateway.domain.block_following import follow_blocks
from inference_gateway.domain.block_index import BlockIndex, Room
from inference_gateway.domain.directory import Directory
from inference_gateway.domain.fleet import Fleet, RoutingFigures
from inference_gateway.domain.member import Member
from inference_gateway.domain.ports import InThread
from inference_gateway.domain.routing import policy_of
from inference_gateway.domain.served_model import WorkerWatch
from inference_gateway.settings import Settings
from treadle.chassis.server import read_shown_key
from treadle.chassis.settings import WrongSetting
from treadle.client import Endpoint
from treadle.contract.errors import InvalidArgument

if TYPE_CHECKING:
    from inference_gateway.adapters.redis_workers import RedisWorkers


class Workers:
    """The fleet of the settings' workers, or of those that a directory lists. Make it inside the loop that uses it.

    directory: None: the settings name the workers
    room:      of the block indexes
    Raises WrongSetting for a key file that cannot be read, and a directory that cannot be used.
    """

    def __init__(self, settings: Settings, in_thread: InThread, figures: RoutingFigures) -> None:
        self._settings, self._in_thread = settings, in_thread
        path = settings.worker_key_file
        self._key = None if path is None else read_shown_key(path, "worker_key_file")
        self._encoders, self.room = SharedEncoders(), Room(settings.index_blocks_max)
        self._open: dict[Member, RpcWorker] = {}
        self._closing: set[asyncio.Task[None]] = set()
        policy = policy_of(
            settings.routing, load_tokens=settings.routing_load_tokens, imbalance_max=settings.routing_imbalance_max
        )  # fmt: skip
        members = [self._member(name, address) for name, address in settings.workers.items()]
        self.fleet = Fleet(members, policy, figures=figures, follow=follow_blocks if policy.needs_blocks else None)
        self._redis = _redis(settings.directory_url)
        self.directory = None if self._redis is None else Directory(self.fleet, self._member, self._retire)

    async def run(self) -> None:
        """Follow the workers, and the directory where there is one, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fleet.run())
            if self._redis is not None and self.directory is not None:
                tasks.create_task(self._redis.run(self.directory))

    async def close(self) -> None:
        """Close all channels; calls in progress are cancelled."""
        for closing in list(self._closing):
            await closing
        for worker in self._open.values():
            await worker.close()
        if self._redis is not None:
            await self._redis.close()

    def _member(self, name: str, address: str) -> Member:
        """The worker at `address` as a member of that name. Raises InvalidArgument for an address that is none."""
        settings = self._settings
        worker = RpcWorker(
            Endpoint(
                address, self._key, settings.worker_tls_root_file,
                tls_cert_file=settings.worker_tls_cert_file or settings.tls_cert_file,
                tls_key_file=settings.worker_tls_key_file or settings.tls_key_file,
            )
        )  # fmt: skip
        watch = WorkerWatch(
            worker, self._encoders, self._in_thread,
            interval_seconds=settings.worker_poll_seconds, model_name=settings.model, tokenizer_dir=settings.tokenizer_dir,
        )  # fmt: skip
        member = Member(name, worker, watch, blocks=BlockIndex(self.room))
        self._open[member] = worker
        return member

    def _retire(self, member: Member) -> None:
        """Close a member's channel once no request is there: what runs at a worker that leaves is not cut off."""

        def close() -> None:
            worker = self._open.pop(member, None)
            if worker is not None:
                closing = asyncio.create_task(worker.close())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

        member.when_idle(close)


def _redis(url: str) -> RedisWorkers | None:
    if not url:
        return None
    try:
        from inference_gateway.adapters.redis_workers import RedisWorkers
    except ImportError as error:
        raise WrongSetting(
            "redis_url: the client of Redis is not installed: pip install 'treadle-inference-gateway[redis]'"
        ) from error
    try:
        return RedisWorkers(url)
    except InvalidArgument as error:
        raise WrongSetting(str(error)) from error

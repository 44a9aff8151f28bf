"""A WorkerService without a model: `python -m treadle_loadtests.stub_worker --listen 127.0.0.1:0`.

A real process with a real socket, real health, drain and status; only its answers are made up, at a pace that is set. So what
stands before it can be measured alone. Each token's text is the moment (CLOCK_MONOTONIC, ns) at which it was handed to gRPC, and
the first begins with the moment at which the request came: `came:made made made …`.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from prometheus_client import CollectorRegistry

from treadle.chassis import log as chassis_log
from treadle.chassis.errors import CONTRACT_STATUS
from treadle.chassis.server import run_service
from treadle.chassis.settings import ServerSettings, WrongSetting, load_settings
from treadle.contract import PROTO_VERSION
from treadle.contract.errors import InvalidArgument, ProtocolMismatch, TreadleError
from treadle.inference.v1 import worker_pb2 as pb
from treadle.inference.v1 import worker_pb2_grpc as pb_grpc
from treadle.nn.model_folder import find_model_folder
from treadle_loadtests.stub_blocks import BlockCache, Change, chain
from treadle_loadtests.stub_engine import Draining, Engine, Pace, Stream

PROGRAM = "treadle-stub-worker"
BUILD = "stub"
TOKEN_ID = 100  # of every token of an answer: nobody looks
Context = Any  # grpc.aio.ServicerContext: the stubs and the runtime disagree about its parameters


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """A worker without a model."""

    calls_max: int = 8192
    """Most calls in progress at once."""
    model: str = "smollm2-135m"
    """A known model or a folder with tokenizer.json: whose tokenizer and template the gateway will use."""
    served_model_name: str | None = None
    """Name under which it is served; none: the folder's."""
    tokens_per_second: float = 50.0
    """Tokens a second of each stream."""
    slots: int = 256
    """Requests that are worked on at once."""
    waiting_max: int = 1024
    """Requests that may wait for a slot; more are refused with RESOURCE_EXHAUSTED."""
    prefill_seconds_per_token: float = 0.0
    """Seconds for a token of a prompt that is not in the prefix cache. One prompt at a time."""
    block_tokens: int = 16
    """Tokens of a block of the prefix cache."""
    blocks_max: int = 0
    """Blocks of the prefix cache; 0: none."""
    answer_tokens: int = 16
    """Tokens of an answer to a request that names no limit."""
    context_tokens_max: int = 1 << 20
    """Most tokens of prompt and answer."""
    journal: Path | None = None
    """A line of JSON for each arrival, abort and end, with its moment (CLOCK_MONOTONIC, ns)."""
    cores: str = ""
    """Cores to stay on, e.g. `1` or `1,2`; empty: any."""

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        for name in ("tokens_per_second", "slots", "block_tokens", "answer_tokens", "context_tokens_max"):
            if getattr(self, name) <= 0:
                raise WrongSetting(f"{name}: above 0, got {getattr(self, name)}")
        for name in ("waiting_max", "prefill_seconds_per_token", "blocks_max"):
            if getattr(self, name) < 0:
                raise WrongSetting(f"{name}: at least 0, got {getattr(self, name)}")


class StubWorker(pb_grpc.WorkerServiceServicer):
    """Serves one engine."""

    def __init__(self, settings: Settings, folder: Path, name: str, engine: Engine) -> None:
        self._settings, self._folder, self._name, self.engine = settings, folder, name, engine
        self._digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        self._drained = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:  # noqa: N802
        """See the proto."""
        engine, stream = self.engine, self._stream(request)
        engine.submit(stream)
        context.add_done_callback(lambda _: engine.leave(stream))
        sent = 0
        while sent < stream.tokens:
            await stream.more(sent)
            sent += 1
            text = f"{time.monotonic_ns()} "
            response = pb.GenerateResponse(token_ids=(TOKEN_ID,), text_delta=text if sent > 1 else f"{stream.arrived_ns}:{text}")
            if sent == stream.tokens:
                cached = min(stream.cached_blocks * engine.block_tokens, stream.prompt_tokens - 1)
                response.finish_reason = pb.FINISH_REASON_LENGTH
                response.usage.prompt_tokens, response.usage.cached_tokens = stream.prompt_tokens, cached
                response.usage.completion_tokens = sent
            yield response

    async def WatchBlocks(  # noqa: N802
        self, request: pb.WatchBlocksRequest, context: Context
    ) -> AsyncIterator[pb.WatchBlocksResponse]:
        """See the proto."""
        if self.engine.cache is None:
            yield pb.WatchBlocksResponse(snapshot_complete=True)
            await self._drained.wait()
            return
        drained = asyncio.ensure_future(self._drained.wait())
        async with aclosing(self.engine.cache.watch()) as changes:
            while True:
                following = asyncio.ensure_future(anext(changes))
                await asyncio.wait({following, drained}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done():  # a worker that drains must not wait for those who only watch
                    following.cancel()
                    await asyncio.wait({following})
                    raise Draining("the worker is stopping")
                yield write_change(following.result())

    async def Embed(self, request: pb.EmbedRequest, context: Context) -> pb.EmbedResponse:  # noqa: N802
        """See the proto."""
        raise ProtocolMismatch("a worker without a model gives no vectors")

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        """See the proto."""
        engine, settings = self.engine, self._settings
        totals = engine.totals
        return pb.StatusResponse(
            build_version=BUILD, proto_version=PROTO_VERSION, pid=os.getpid(), model=self._name, model_dir=str(self._folder),
            tokenizer_digest=self._digest, context_tokens_max=settings.context_tokens_max,
            requests_running=len(engine.running), requests_running_max=settings.slots,
            requests_waiting=engine.waiting, requests_waiting_max=settings.waiting_max,
            steps=totals.tokens_made, step_seconds=totals.busy_seconds, prompt_tokens=totals.prompt_tokens,
            completion_tokens=totals.completion_tokens, cached_tokens=totals.cached_tokens, draining=engine.draining,
            engine="stub", engine_version=BUILD, block_tokens=settings.block_tokens if engine.cache is not None else 0,
            wait_seconds_predicted=engine.wait_seconds_predicted, dtype="none",
        )  # fmt: skip

    async def drain(self) -> None:
        """Refuse what comes; those who watch are told."""
        self.engine.draining = True
        self._drained.set()

    def _stream(self, request: pb.GenerateRequest) -> Stream:
        prompt, settings = request.prompt_token_ids, self._settings
        if not prompt:
            raise InvalidArgument("prompt_token_ids: at least one token")
        tokens = request.sampling.max_tokens or settings.answer_tokens
        if len(prompt) + tokens > settings.context_tokens_max:
            raise InvalidArgument(f"prompt_token_ids: {len(prompt)} and {tokens} more are above {settings.context_tokens_max}")
        memory = f"{request.engram.model}@{request.engram.version}" if request.engram.model else ""
        cached = self.engine.cache is not None
        blocks = chain(prompt, settings.block_tokens, request.cache_salt, memory) if cached else []
        return Stream(request.request_id, len(prompt), tokens, blocks, request.priority)


def write_change(change: Change) -> pb.WatchBlocksResponse:
    """The message of a change."""
    return pb.WatchBlocksResponse(
        stored=[
            pb.CachedBlock(
                name=block.name, parent=block.parent, token_ids=block.token_ids, cache_salt=block.cache_salt, memory=block.memory
            )
            for block in change.stored
        ],
        removed=change.removed,
        cleared=change.cleared,
        snapshot_complete=change.complete,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until told to stop; the exit code."""
    settings = load_settings(Settings, "STUB", PROGRAM, argv)
    chassis_log.configure(settings.log_level, settings.log_format)
    try:
        if settings.cores:
            os.sched_setaffinity(0, {int(core) for core in settings.cores.split(",")})
        folder, name = _folder(settings.model)
        return asyncio.run(_serve(settings, folder, settings.served_model_name or name))
    except (TreadleError, OSError, ValueError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


async def _serve(settings: Settings, folder: Path, name: str) -> int:
    with _journal(settings.journal) as noted:
        pace = Pace(settings.slots, settings.waiting_max, settings.tokens_per_second, settings.prefill_seconds_per_token)
        cache = BlockCache(settings.blocks_max) if settings.blocks_max else None
        worker = StubWorker(settings, folder, name, Engine(pace, cache, settings.block_tokens, noted))

        def register(server: object) -> Sequence[str]:
            pb_grpc.add_WorkerServiceServicer_to_server(worker, server)  # type: ignore[arg-type]  # the chassis' server is an object here
            return [pb.DESCRIPTOR.services_by_name["WorkerService"].full_name]

        gc.freeze()  # a collection of what is here for good would be seen as a late token
        return await run_service(
            "stub-worker", settings, register, area="stub", status=CONTRACT_STATUS, registry=CollectorRegistry(),
            build_version=BUILD, on_drain=worker.drain,
        )  # fmt: skip


def _folder(model: str) -> tuple[Path, str]:
    """A folder that has a tokenizer, be it a whole model or not; else one that is known by name."""
    folder = Path(model).expanduser()
    if (folder / "tokenizer.json").is_file() and not (folder / "config.json").is_file():
        return folder.resolve(), folder.resolve().name
    return find_model_folder(model)


@contextmanager
def _journal(path: Path | None) -> Iterator[Callable[[str, Stream], None]]:
    if path is None:
        yield lambda *_: None
        return
    with path.open("a", encoding="utf-8", buffering=1) as file:
        yield _writer(file)


def _writer(file: TextIO) -> Callable[[str, Stream], None]:
    def noted(event: str, stream: Stream) -> None:
        line = {"event": event, "id": stream.request_id, "ns": time.monotonic_ns(), "state": stream.state, "made": stream.made}
        file.write(json.dumps(line) + "\n")

    return noted


if __name__ == "__main__":
    sys.exit(main())

"""Starts the gateway: puts the parts together, serves HTTP, and drains on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar, cast

import uvicorn
import uvloop
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from inference_gateway.adapters.dispatch_metrics import DispatchGauges, PrometheusDispatch
from inference_gateway.adapters.fleet_metrics import FleetCollector
from inference_gateway.adapters.key_file import followed_keys
from inference_gateway.adapters.metrics import PrometheusFigures
from inference_gateway.adapters.pool import followed_pools
from inference_gateway.adapters.pool_hints import PoolHints
from inference_gateway.completion_door import DoorLimits
from inference_gateway.domain.api_keys import ApiKeys
from inference_gateway.domain.calls import PieceLimits
from inference_gateway.domain.dispatch import Dispatch, DispatchLimits
from inference_gateway.domain.embedding import Embedding
from inference_gateway.domain.fleet import Fleet
from inference_gateway.domain.generating import Generating
from inference_gateway.domain.lifetime import Admission
from inference_gateway.domain.pool_watch import ANSWER_SECONDS_MAX, PoolWatch
from inference_gateway.domain.ports import InThread
from inference_gateway.domain.running import Running
from inference_gateway.domain.serving import Serving
from inference_gateway.domain.waiting_line import LineLimits
from inference_gateway.read_timeout import ReadTimedProtocol
from inference_gateway.request_head import HeadLimits
from inference_gateway.request_parsing import Limits
from inference_gateway.rpc_server import rpc_listening
from inference_gateway.server import Parts, build_app
from inference_gateway.settings import Settings
from inference_gateway.workers import Workers
from treadle.chassis import log as chassis_log
from treadle.chassis.ready import print_ready
from treadle.chassis.server import read_shown_key
from treadle.chassis.settings import WrongSetting, load_settings, split_address
from treadle.chassis.tracing import exporting
from treadle.client import Endpoint

PROGRAM = "treadle-inference-gateway"
REQUEST_LINE_BYTES = 8192  # beside header_bytes_max, of a head that is not whole yet
COLLECT_AFTER_OBJECTS = 10_000  # Python's 700 are reached several times in the life of one request
CLOSE_SECONDS = 3  # for answers that were ended by the drain to leave
log = logging.getLogger("treadle.gateway")
Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until it is told to stop. Returns the exit code: 0, or 2 for a wrong setting."""
    settings = load_settings(Settings, "GATEWAY", PROGRAM, argv)
    chassis_log.configure(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are told by our own lines
    logging.getLogger("hpack").setLevel(logging.WARNING)  # it tells every header
    try:
        return uvloop.run(serve(settings))
    except WrongSetting as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Raises WrongSetting for an address or file that cannot be used."""
    registry = _registry()
    figures = PrometheusFigures(registry)
    async with followed_keys(settings.api_key_file, figures.keys_changed) as keys, followed_pools(_pools(settings)) as pools:
        return await _serve(settings, keys, pools, figures, registry)


async def _serve(
    settings: Settings, keys: ApiKeys, pools: Sequence[PoolWatch], figures: PrometheusFigures, registry: CollectorRegistry
) -> int:
    listener = _listen(settings.listen)
    with ThreadPoolExecutor(settings.encoder_threads, thread_name_prefix="encoder") as threads:

        def in_thread(work: Callable[[], Result], /) -> asyncio.Future[Result]:
            return asyncio.get_running_loop().run_in_executor(threads, work)

        workers = Workers(settings, in_thread, figures)
        FleetCollector(registry, workers.fleet, workers.room, workers.directory)
        hints = PoolHints(_pools(settings), figures.hint_ended)
        parts = _parts(settings, workers.fleet, figures, in_thread, keys, pools, hints, registry)
        following = asyncio.create_task(workers.run())
        try:
            with exporting("inference-gateway", settings.otlp_endpoint, parts.build_version):
                async with rpc_listening(settings, parts, registry) as rpc_address:
                    await _Server(settings, parts, listener, rpc_address).serve_until_stopped()
        finally:
            following.cancel()
            await asyncio.wait({following})
            await hints.close()
            await workers.close()
    return 0


def _pools(settings: Settings) -> list[Endpoint]:
    key_file = settings.engram_pool_key_file
    key = None if key_file is None else read_shown_key(key_file, "engram_pool_key_file")
    return [
        Endpoint(
            address, key, settings.engram_pool_tls_root_file, ANSWER_SECONDS_MAX,
            tls_cert_file=settings.worker_tls_cert_file or settings.tls_cert_file,
            tls_key_file=settings.worker_tls_key_file or settings.tls_key_file,
        )
        for address in settings.engram_pools
    ]  # fmt: skip


def _parts(
    settings: Settings, fleet: Fleet, figures: PrometheusFigures, in_thread: InThread, keys: ApiKeys,
    pools: Sequence[PoolWatch], hints: PoolHints, registry: CollectorRegistry,
) -> Parts:  # fmt: skip
    admission = Admission(settings.calls_max)
    dispatch = Dispatch(fleet, _dispatch_limits(settings), PrometheusDispatch(registry))
    DispatchGauges(registry, dispatch, fleet, admission)
    return Parts(
        fleet=fleet,
        serving=Serving(Generating(fleet, in_thread, dispatch, hints), figures),
        embedding=Embedding(fleet, in_thread, figures, settings.worker_first_piece_seconds_max, settings.attempts_max),
        admission=admission,
        dispatch=dispatch,
        running=Running(),
        figures=figures,
        keys=keys,
        pools=pools,
        limits=_limits(settings),
        head=HeadLimits(settings.headers_max, settings.header_bytes_max),
        looks_open=settings.looks_open,
        build_version=build_version(),
    )


def _dispatch_limits(settings: Settings) -> DispatchLimits:
    return DispatchLimits(
        pieces=PieceLimits(settings.worker_first_piece_seconds_max, settings.worker_idle_seconds_max),
        line=LineLimits(settings.queue_wait_seconds_max, settings.queue_max),
        attempts_max=settings.attempts_max,
        hedge_seconds=settings.hedge_seconds,
        headroom=settings.queue_headroom,
    )


def _limits(settings: Settings) -> DoorLimits:
    return DoorLimits(
        request_timeout_seconds=settings.request_timeout_seconds,
        body_bytes_max=settings.body_bytes_max,
        body_seconds_max=settings.body_seconds_max,
        keep_alive_seconds=settings.keep_alive_seconds,
        parsing=Limits(
            messages_max=settings.messages_max,
            stop_strings_max=settings.stop_strings_max,
            choices_max=settings.choices_max,
            prompts_max=settings.prompts_max,
        ),
    )


class _Server(uvicorn.Server):
    """uvicorn that prints our ready line, and stops the way we drain: exit code 0, refusals rather than closed doors."""

    def __init__(self, settings: Settings, parts: Parts, listener: socket.socket, rpc_address: str) -> None:
        super().__init__(_uvicorn_config(settings, parts))
        self._settings, self._parts, self._listener = settings, parts, listener
        self._more = {"grpc": rpc_address} if rpc_address else {}
        host = split_address(settings.listen)[0].strip("[]")
        self._host = f"[{host}]" if ":" in host else host  # so that host:port can stand in a URL
        self._stop = asyncio.Event()

    async def serve_until_stopped(self) -> None:
        """Serve, drain and close."""
        draining = asyncio.create_task(self._drain_when_told())
        try:
            await self.serve(sockets=[self._listener])
        finally:
            draining.cancel()
            await asyncio.wait({draining})

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        settle_collector()
        address = f"{self._host}:{self._listener.getsockname()[1]}"
        print_ready("inference-gateway", address, address, self._parts.build_version, **self._more)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ours instead of uvicorn's, which ends the process by the signal itself."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _told_to_stop(self) -> None:
        if self._stop.is_set():  # told twice: whoever sends it does not want to wait
            self.should_exit = self.force_exit = True
        self._stop.set()

    async def _drain_when_told(self) -> None:
        await self._stop.wait()
        admission, settings = self._parts.admission, self._settings
        grace_seconds = min(settings.drain_grace_seconds, settings.drain_seconds)
        admission.leave()
        log.info("draining", extra={"in_progress": admission.in_progress, "seconds": settings.drain_seconds})
        await asyncio.sleep(grace_seconds)  # whoever sends requests here looks at /ready now and then
        ended = await admission.drain(settings.drain_seconds - grace_seconds)
        if ended:
            log.warning("generations ended by the drain", extra={"count": ended})
        self.should_exit = True


def _uvicorn_config(settings: Settings, parts: Parts) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(parts),
        http=cast("type[asyncio.Protocol]", partial(ReadTimedProtocol, on_unread=parts.figures.client_unread)),
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.connections_max,
        h11_max_incomplete_event_size=settings.header_bytes_max + REQUEST_LINE_BYTES,
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        timeout_graceful_shutdown=CLOSE_SECONDS,
        ssl_certfile=settings.tls_cert_file,
        ssl_keyfile=settings.tls_key_file,
        ssl_ca_certs=None if settings.tls_client_root_file is None else str(settings.tls_client_root_file),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_root_file is None else ssl.CERT_REQUIRED,
    )


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
        # Connections inherit it; asyncio sets it itself only where a socket names its protocol, which create_server's do not.
        # Without it the second of two small writes waits for the client's delayed acknowledgement: 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise WrongSetting(f"listen: cannot listen on {address}: {error.strerror or error}") from error


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


def settle_collector() -> None:
    """Let the garbage collector look at what requests leave, seldom; what was there before them stays for good."""
    gc.collect()
    gc.freeze()
    gc.collect()  # once more, so that a later one weighs what is new against what is left, not against what was put aside
    gc.set_threshold(COLLECT_AFTER_OBJECTS, 10, 10)


def build_version() -> str:
    """Version of the installed package; 0+source where it runs from its source."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())

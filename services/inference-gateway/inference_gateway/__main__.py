"""Starts the gateway: puts the parts together, serves HTTP, and drains on SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import uvicorn
from prometheus_client import GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR, CollectorRegistry

from inference_gateway.adapters.metrics import PrometheusFigures
from inference_gateway.adapters.prompt_encoder import open_folder
from inference_gateway.adapters.worker import RpcWorker
from inference_gateway.completion_door import DoorLimits
from inference_gateway.domain.api_keys import ApiKeys
from inference_gateway.domain.generating import Generating
from inference_gateway.domain.lifetime import Admission
from inference_gateway.domain.memories import MemoryChoice, parse_choice
from inference_gateway.domain.served_model import WorkerWatch
from inference_gateway.head_timeout import HeadTimedProtocol
from inference_gateway.request_parsing import Limits
from inference_gateway.server import Parts, build_app
from inference_gateway.settings import Settings
from treadle.chassis import log as chassis_log
from treadle.chassis.ready import print_ready
from treadle.chassis.server import KeyLine, read_key_file, read_key_lines
from treadle.chassis.settings import WrongSetting, load_settings, split_address
from treadle.client import Endpoint
from treadle.contract.errors import InvalidArgument
from treadle.contract.version import check_name

PROGRAM = "treadle-inference-gateway"
ENGRAM_OPTION = "engram"  # of a line of api_key_file: the memory of requests that choose none
CLOSE_SECONDS = 3  # for answers that were ended by the drain to leave
log = logging.getLogger("treadle.gateway")
Result = TypeVar("Result")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until it is told to stop. Returns the exit code: 0, or 2 for a wrong setting."""
    settings = load_settings(Settings, "GATEWAY", PROGRAM, argv)
    chassis_log.configure(settings.log_level, settings.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # its start and stop are told by our own lines
    try:
        return asyncio.run(serve(settings))
    except WrongSetting as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 2


async def serve(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Raises WrongSetting for an address or file that cannot be used."""
    keys, listener = ApiKeys(_keys(settings.api_key_file)), _listen(settings.listen)
    worker = RpcWorker(
        Endpoint(
            settings.worker, _worker_key(settings.worker_key_file), settings.worker_tls_root_file,
            tls_cert_file=settings.tls_cert_file, tls_key_file=settings.tls_key_file,
        )
    )  # fmt: skip
    with ThreadPoolExecutor(settings.encoder_threads, thread_name_prefix="encoder") as threads:
        parts = _parts(settings, worker, threads, keys)
        server = _Server(settings, parts, listener)
        polling = asyncio.create_task(parts.watch.run())
        try:
            await server.serve_until_stopped()
        finally:
            polling.cancel()
            await asyncio.wait({polling})
            await worker.close()
    return 0


def _parts(settings: Settings, worker: RpcWorker, threads: ThreadPoolExecutor, keys: ApiKeys) -> Parts:
    def in_thread(work: Callable[[], Result], /) -> asyncio.Future[Result]:
        return asyncio.get_running_loop().run_in_executor(threads, work)

    watch = WorkerWatch(
        worker, open_folder, in_thread,
        interval_seconds=settings.worker_poll_seconds, model_name=settings.model, tokenizer_dir=settings.tokenizer_dir,
    )  # fmt: skip
    return Parts(
        watch=watch,
        generating=Generating(worker, watch, in_thread),
        admission=Admission(settings.calls_max),
        figures=PrometheusFigures(_registry()),
        keys=keys,
        limits=_limits(settings),
        build_version=build_version(),
    )


def _limits(settings: Settings) -> DoorLimits:
    return DoorLimits(
        request_timeout_seconds=settings.request_timeout_seconds,
        body_bytes_max=settings.body_bytes_max,
        body_seconds_max=settings.body_seconds_max,
        keep_alive_seconds=settings.keep_alive_seconds,
        parsing=Limits(messages_max=settings.messages_max, stop_strings_max=settings.stop_strings_max),
    )


class _Server(uvicorn.Server):
    """uvicorn that prints our ready line, and stops the way we drain: exit code 0, refusals rather than closed doors."""

    def __init__(self, settings: Settings, parts: Parts, listener: socket.socket) -> None:
        super().__init__(_uvicorn_config(settings, parts))
        self._drain_seconds, self._parts, self._listener = settings.drain_seconds, parts, listener
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
        address = f"{self._host}:{self._listener.getsockname()[1]}"
        print_ready("inference-gateway", address, address, self._parts.build_version)

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
        admission = self._parts.admission
        log.info("draining", extra={"in_progress": admission.in_progress, "seconds": self._drain_seconds})
        ended = await admission.drain(self._drain_seconds)
        if ended:
            log.warning("generations ended by the drain", extra={"count": ended})
        self.should_exit = True


def _uvicorn_config(settings: Settings, parts: Parts) -> uvicorn.Config:
    return uvicorn.Config(
        build_app(parts),
        http=HeadTimedProtocol,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=settings.connections_max,
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
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise WrongSetting(f"listen: cannot listen on {address}: {error.strerror or error}") from error


def _keys(path: Path | None) -> dict[str, MemoryChoice | None]:
    """Each key with its default memory. Raises WrongSetting, naming the line and never the key."""
    if path is None:
        return {}
    return {line.key: _default_memory(path, line) for line in read_key_lines(path, "api_key_file", {ENGRAM_OPTION})}


def _default_memory(path: Path, line: KeyLine) -> MemoryChoice | None:
    text = line.options.get(ENGRAM_OPTION)
    if text is None:
        return None
    try:
        choice = parse_choice(text)
        if choice.name:
            check_name(choice.name)
    except InvalidArgument as error:
        raise WrongSetting(f"api_key_file: {path} line {line.number}: {ENGRAM_OPTION}: {error}") from error
    return choice


def _worker_key(path: Path | None) -> str | None:
    return None if path is None else read_key_file(path, "worker_key_file")[0]


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in (PROCESS_COLLECTOR, PLATFORM_COLLECTOR, GC_COLLECTOR):
        registry.register(collector)
    return registry


def build_version() -> str:
    """Version of the installed package; 0+source where it runs from its source."""
    try:
        return version(PROGRAM)
    except PackageNotFoundError:
        return "0+source"


if __name__ == "__main__":
    sys.exit(main())

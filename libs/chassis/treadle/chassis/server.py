"""One gRPC server per process: health, reflection, metrics, ready line, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.chassis.ready import print_ready
from treadle.chassis.settings import ServerSettings, WrongSetting, split_address

log = logging.getLogger("treadle.server")
MESSAGE_BYTES_MAX = (1 << 20) + (64 << 10)  # 1 MiB of payload and its framing; larger answers stream
_OPTIONS = (
    ("grpc.max_receive_message_length", 8 * MESSAGE_BYTES_MAX),  # a token map of a large vocabulary comes in one message
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two services on one port is a mistake, not load balancing
)


async def run_service(
    service: str, settings: ServerSettings, register: Callable[[grpc.aio.Server], Sequence[str]], *, area: str,
    status: Mapping[type[Exception], grpc.StatusCode], registry: CollectorRegistry, build_version: str,
    on_ready: Callable[[str], Awaitable[None]] | None = None, on_drain: Callable[[], Awaitable[None]] | None = None,
    key_digests: frozenset[bytes] = frozenset(),
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT, then drain.

    service:  name in the ready line, e.g. engram-pool
    register: adds servicers to the server, returns their full protobuf names
    area:     of the metric names, treadle_<area>_rpc_*
    status:   the service's error table
    key_digests: sha256 of keys that callers may show beside those in the settings' file
    on_ready: called with the address that is listened on, host:port, before the ready line
    on_drain: called once the health says NOT_SERVING, before calls in progress are waited for
    Returns the exit code. Raises WrongSetting when an address is taken or a key file is empty.
    """
    guard = CallGuard(
        status=status,
        keys=read_keys(settings),
        calls_max=settings.calls_max,
        metrics=RpcMetrics(registry, area),
        key_digests=key_digests,
    )
    server = grpc.aio.server(interceptors=[guard], options=_OPTIONS)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = list(register(server))
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    listen = _bind(server, settings)
    metrics_host, metrics_port = split_address(settings.metrics_listen)
    try:
        exporter, thread = start_http_server(metrics_port, metrics_host, registry)
    except OSError as error:
        raise WrongSetting(f"metrics_listen: cannot listen on {settings.metrics_listen}: {error.strerror or error}") from error
    stop = _stop_signal()
    await server.start()
    for name in ["", *names]:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    if on_ready is not None:
        await on_ready(listen)
    print_ready(service, listen, f"{metrics_host}:{exporter.server_port}", build_version)
    await stop.wait()
    log.info("draining", extra={"service": service, "seconds": settings.drain_seconds})
    await checks.enter_graceful_shutdown()
    if on_drain is not None:
        await on_drain()
    await server.stop(settings.drain_seconds)
    await asyncio.to_thread(exporter.shutdown)
    exporter.server_close()
    thread.join()
    return 0


def read_keys(settings: ServerSettings) -> frozenset[str]:
    """Keys in `api_key_file`; none without one. Raises WrongSetting as `read_key_file` does."""
    path = settings.api_key_file
    return frozenset() if path is None else frozenset(read_key_file(path, "api_key_file"))


def read_key_file(path: Path, setting: str) -> list[str]:
    """Keys in the file that `setting` names, at least one: one a line, # begins a line of comment.

    Raises WrongSetting if it cannot be read or holds no key.
    """
    return [text for _, text in _lines(path, setting)]


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key and what its line says of it. `number`: the line's, from 1, to name it by; the key is never shown."""

    key: str = field(repr=False)
    options: Mapping[str, str]
    number: int


def read_key_lines(path: Path, setting: str, options: Collection[str]) -> list[KeyLine]:
    """Keys with options, `KEY name=value name=value`, in the file that `setting` names, at least one.

    Raises WrongSetting as `read_key_file` does, and for a line with anything else behind its key, an option that is not one
    of `options`, one that stands twice, or a key that an earlier line has. Messages name the line and show no text of it.
    """
    lines: dict[str, KeyLine] = {}
    for number, text in _lines(path, setting):
        line = _key_line(text, number, options, f"{setting}: {path} line {number}")
        if line.key in lines:
            raise WrongSetting(f"{setting}: {path} line {number}: the key of line {lines[line.key].number} again")
        lines[line.key] = line
    return list(lines.values())


def _key_line(text: str, number: int, options: Collection[str], place: str) -> KeyLine:
    key, *words = text.split()
    found: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in options or not value:  # not shown: it may be part of a key
            known = ", ".join(f"{option}=VALUE" for option in sorted(options))
            raise WrongSetting(f"{place}: behind the key stands what is no option; options are {known}")
        if name in found:
            raise WrongSetting(f"{place}: the option {name} stands there twice")
        found[name] = value
    return KeyLine(key, found, number)


def _lines(path: Path, setting: str) -> list[tuple[int, str]]:
    """(number from 1, stripped text) of the lines of a key file that hold a key."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise WrongSetting(f"{setting}: cannot read {path}: {error}") from error
    keys = [(number, line) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    if not keys:
        raise WrongSetting(f"{setting}: {path} holds no key")
    return keys


def _bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    host, _ = split_address(settings.listen)
    try:
        if settings.tls_cert_file is not None and settings.tls_key_file is not None:
            pair = (settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes())
            roots = None if settings.tls_client_root_file is None else settings.tls_client_root_file.read_bytes()
            credentials = grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)
            port = server.add_secure_port(settings.listen, credentials)
        else:
            port = server.add_insecure_port(settings.listen)
    except (RuntimeError, OSError) as error:
        raise WrongSetting(f"listen: cannot listen on {settings.listen}: {error}") from error
    return f"{host}:{port}"


def _stop_signal() -> asyncio.Event:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop

"""One gRPC server per process: health, reflection, metrics, ready line, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, start_http_server

from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.chassis.keys import is_hashed, key_digest
from treadle.chassis.ready import print_ready
from treadle.chassis.settings import ServerSettings, WrongSetting, split_address
from treadle.chassis.tracing import exporting

log = logging.getLogger("treadle.server")
MESSAGE_BYTES_MAX = (1 << 20) + (64 << 10)  # 1 MiB of payload and its framing; larger answers stream
FAILED = 3  # exit code of a service that could answer no more
_OPTIONS = (
    ("grpc.max_receive_message_length", 8 * MESSAGE_BYTES_MAX),  # a token map of a large vocabulary comes in one message
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.so_reuseport", 0),  # two services on one port is a mistake, not load balancing
)


async def run_service(
    service: str, settings: ServerSettings, register: Callable[[grpc.aio.Server], Sequence[str]], *, area: str,
    status: Mapping[type[Exception], grpc.StatusCode], registry: CollectorRegistry, build_version: str,
    on_ready: Callable[[str], Awaitable[None]] | None = None, on_leave: Callable[[], Awaitable[None]] | None = None,
    on_drain: Callable[[], Awaitable[None]] | None = None,
    key_digests: frozenset[bytes] = frozenset(), failed: asyncio.Event | None = None,
) -> int:  # fmt: skip
    """Serve until SIGTERM or SIGINT, then drain. A second signal ends the calls in progress at once.

    service:  name in the ready line, e.g. engram-pool
    register: adds servicers to the server, returns their full protobuf names
    area:     of the metric names, treadle_<area>_rpc_*
    status:   the service's error table
    key_digests: sha256 of keys that callers may show beside those in the settings' file
    on_ready: called with the address that is listened on, host:port, before the ready line
    failed:   set when the service can answer no more: it drains as after a signal, and the exit code is FAILED
    on_leave: called once the health says NOT_SERVING, `drain_grace_seconds` before the drain: what comes late is still served
    on_drain: called at the end of that, before calls in progress are waited for
    Returns the exit code. Raises WrongSetting when an address is taken, a key file is empty, or spans cannot be made.
    """
    spans = ExitStack()
    spans.enter_context(exporting(service, settings.otlp_endpoint, build_version))
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
    listen = bind(server, settings)
    metrics_host, metrics_port = split_address(settings.metrics_listen)
    try:
        exporter, thread = start_http_server(metrics_port, metrics_host, registry)
    except OSError as error:
        raise WrongSetting(f"metrics_listen: cannot listen on {settings.metrics_listen}: {error.strerror or error}") from error
    stop, again = _stop_signals()
    await server.start()
    for name in ["", *names]:
        await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
    if on_ready is not None:
        await on_ready(listen)
    print_ready(service, listen, f"{metrics_host}:{exporter.server_port}", build_version)
    await _first_of(stop, failed)
    log.info("draining", extra={"service": service, "seconds": settings.drain_seconds})
    await checks.enter_graceful_shutdown()
    if on_leave is not None:
        await on_leave()
    grace_seconds = min(settings.drain_grace_seconds, settings.drain_seconds) if stop.is_set() else 0.0
    await _first_of(again, seconds=grace_seconds)
    if on_drain is not None:
        await on_drain()
    await _stop(server, settings.drain_seconds - grace_seconds, again)
    await asyncio.to_thread(exporter.shutdown)
    exporter.server_close()
    thread.join()
    await asyncio.to_thread(spans.close)  # sends what is left
    return FAILED if failed is not None and failed.is_set() and not stop.is_set() else 0


async def _first_of(*events: asyncio.Event | None, seconds: float | None = None) -> None:
    """Until one of them is set, and no longer than `seconds`."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events if event is not None]
    await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()


async def _stop(server: grpc.aio.Server, seconds: float, now: asyncio.Event) -> None:
    """Let calls end within `seconds`, or until `now` is set."""
    stopping, forced = asyncio.ensure_future(server.stop(seconds)), asyncio.ensure_future(now.wait())
    await asyncio.wait({stopping, forced}, return_when=asyncio.FIRST_COMPLETED)
    forced.cancel()
    if not stopping.done():
        log.warning("told again to stop: calls in progress are cancelled")
        await server.stop(None)
    await stopping


def read_keys(settings: ServerSettings) -> frozenset[str]:
    """Keys in `api_key_file`, themselves or as digests; none without one. Raises WrongSetting as `read_key_file` does, or for a wrong digest."""
    path = settings.api_key_file
    if path is None:
        return frozenset()
    for number, text in _lines(path, "api_key_file"):
        check_key(text, f"api_key_file: {path} line {number}")
    return frozenset(read_key_file(path, "api_key_file"))


def check_key(text: str, place: str) -> None:
    """Raise WrongSetting, naming the place and no text of it, for a digest that is none."""
    try:
        key_digest(text)
    except ValueError as error:
        raise WrongSetting(f"{place}: {error}") from error


def read_key_file(path: Path, setting: str) -> list[str]:
    """Keys in the file that `setting` names, at least one: one a line, # begins a line of comment.

    Raises WrongSetting if it cannot be read or holds no key.
    """
    return [text for _, text in _lines(path, setting)]


def read_shown_key(path: Path, setting: str) -> str:
    """The first key in the file that `setting` names, to show it to others.

    Raises WrongSetting as `read_key_file` does, and for a digest, which nobody could show.
    """
    key = read_key_file(path, setting)[0]
    if is_hashed(key):
        raise WrongSetting(f"{setting}: {path} begins with a digest; to be shown, the key itself is needed")
    return key


class NoKey(WrongSetting):
    """A key file can be read and holds no key."""


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key and what its line says of it. `number`: the line's, from 1, to name it by; the key is never shown."""

    key: str = field(repr=False)
    options: Mapping[str, str]
    number: int

    @property
    def digest(self) -> bytes:
        """sha256 of the key, 32 bytes."""
        return key_digest(self.key)

    @property
    def hashed(self) -> bool:
        """Whether the file holds the digest alone."""
        return is_hashed(self.key)


def read_key_lines(path: Path, setting: str, options: Collection[str]) -> list[KeyLine]:
    """Keys with options, `KEY name=value name=value`, in the file that `setting` names, at least one.

    Raises WrongSetting as `read_key_file` does, and for a line with anything else behind its key, an option that is not one
    of `options`, one that stands twice, or a key that an earlier line has. Messages name the line and show no text of it.
    """
    lines: dict[bytes, KeyLine] = {}
    for number, text in _lines(path, setting):
        place = f"{setting}: {path} line {number}"
        line = _key_line(text, number, options, place)
        check_key(line.key, place)
        first = lines.setdefault(line.digest, line)
        if first is not line:
            raise WrongSetting(f"{place}: the key of line {first.number} again")
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
        raise NoKey(f"{setting}: {path} holds no key")
    return keys


def bind(server: grpc.aio.Server, settings: ServerSettings) -> str:
    """Have `server` listen on the settings' `listen`, with their TLS; the real address, host:port. Raises WrongSetting."""
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


def _stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Set by the first signal, and by the second: whoever sends that does not want to wait."""
    stop, again, loop = asyncio.Event(), asyncio.Event(), asyncio.get_running_loop()

    def told() -> None:
        (again if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    return stop, again

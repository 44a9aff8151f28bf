"""Keeps a few processes running: start and readiness, restarts, one-off jobs, drain. One thread, one selector.

Owns when a child runs and what its death means. Does not know which services there are (fabric), how people are told
(a listener), or that a terminal exists.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from treadle.cli.child import Child, describe_exit
from treadle.cli.events import Event, EventKind
from treadle.cli.restarts import RestartPolicy
from treadle.cli.service_log import ServiceLog
from treadle.contract.errors import TreadleError

READY_SECONDS = 120.0  # a worker on two busy cores imports torch and loads its model in 10-30 s
DRAIN_SECONDS = 15.0  # a service's own drain limit is 10 s; then it is killed
POLL_SECONDS = 0.1
JOB_OUTPUT_BYTES_MAX = 1 << 20  # a job answers with one JSON document

ServiceStage = Literal["starting", "ready", "backoff", "failing", "dead", "stopped"]


class StartFailed(TreadleError):
    """A child did not become ready, or a job failed; the message carries its last lines."""

    def __init__(self, message: str, service: str = "") -> None:
        super().__init__(message)
        self.service = service  # whose fault it was, where that is known


class GaveUp(TreadleError):
    """A child died too often."""

    def __init__(self, message: str, service: str) -> None:
        super().__init__(message)
        self.service = service


class StopRequested(Exception):
    """SIGINT or SIGTERM came while something was being started."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A long-running child. `argv` without addresses; `listen` and `metrics` may have port 0 until the first ready line.

    An address that is "" is not passed on. `given_up` False: one that dies too often is not given up but started again and
    again, at the longest backoff.
    """

    service: str
    argv: tuple[str, ...]
    listen: str = ""
    metrics: str = ""
    listen_flag: str = "--listen"
    metrics_flag: str = "--metrics-listen"
    ready_seconds: float = READY_SECONDS
    drain_seconds: float = DRAIN_SECONDS
    environment: Mapping[str, str] | None = None
    given_up: bool = True


@dataclass(frozen=True, slots=True)
class JobSpec:
    """A child that does one thing and ends."""

    name: str
    argv: tuple[str, ...]
    seconds_max: float
    environment: Mapping[str, str] | None = None


@dataclass(slots=True)
class Service:
    """A service as it is now. `due`: monotonic seconds at which its stage runs out. `failing`: over its restart limit."""

    spec: ServiceSpec
    listen: str
    metrics: str
    version: str = ""
    was_ready: bool = False
    stage: ServiceStage = "starting"
    child: Child | None = None
    restarts: int = 0
    failing: bool = False
    due: float | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)

    @property
    def shown_stage(self) -> ServiceStage:
        """The stage for people: one that keeps dying is failing until it is ready, also while it is started once more."""
        return "failing" if self.failing and self.stage in ("starting", "backoff") else self.stage


class Supervisor:
    """Supervises services and runs jobs; every wait is here. Not thread-safe; use it on the main thread.

    Children die with the thread that spawned them (see tether), so that thread has to be the main one.
    """

    def __init__(self, logs: Path, listener: Callable[[Event], None], policy: Callable[[], RestartPolicy] = RestartPolicy) -> None:
        self.services: dict[str, Service] = {}
        self._logs, self._listener, self._policy = logs, listener, policy
        self._files: dict[str, ServiceLog] = {}
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, lambda: os.read(self._wake_read, 64))
        self._stops = 0
        self._restarting = False

    @property
    def stop_requested(self) -> bool:
        """True after the first request to stop."""
        return self._stops > 0

    def request_stop(self) -> None:
        """Ask for the drain; a second time: without patience. Safe in a signal handler."""
        self._stops += 1
        os.write(self._wake_write, b"!")

    @contextmanager
    def signals(self) -> Iterator[None]:
        """SIGINT, SIGTERM and SIGHUP (the terminal went away) become requests to stop."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, lambda *_: self.request_stop()) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(self, spec: ServiceSpec) -> Service:
        """Start a service and wait until it is ready. Raises StartFailed (also for one that was running), StopRequested."""
        service = Service(spec, spec.listen, spec.metrics, policy=self._policy())
        self.services[spec.service] = service
        self._spawn(service)
        while service.stage == "starting":
            self._turn()
            self._check_bring_up()
        return service

    def run(self, job: JobSpec) -> bytes:
        """Run a job to its end; its standard output. Raises StartFailed, StopRequested (the job is killed)."""
        output: list[bytes] = []
        child = Child(
            job.argv, self._log(job.name), environment=job.environment, log_output=False, on_output=output.extend,
            on_error=lambda lines: self._tell("progress", job.name, lines[-1].decode(errors="replace")),
        )  # fmt: skip
        self._tell("starting", job.name, seconds=job.seconds_max)
        ends = child.started_seconds + job.seconds_max
        self._register(child, child.reap)
        try:
            while child.returncode is None:
                self._turn(ends)
                self._check_bring_up()
                if time.monotonic() > ends:
                    raise StartFailed(f"{job.name} took longer than {job.seconds_max:.0f} s", job.name)
                if sum(map(len, output)) > JOB_OUTPUT_BYTES_MAX:
                    raise StartFailed(f"{job.name} printed more than {JOB_OUTPUT_BYTES_MAX} bytes", job.name)
        finally:
            if child.returncode is None:
                child.kill()
                while child.returncode is None:
                    self._turn()
        if child.returncode:
            raise StartFailed(self._obituary(job.name, child, "failed"), job.name)
        self._tell("done", job.name, seconds=time.monotonic() - child.started_seconds)
        return b"\n".join(output)

    def wait_until(self, name: str, what: str, condition: Callable[[], bool], seconds_max: float) -> None:
        """Wait until a service has what it needs from outside, asked again and again. Raises StartFailed, StopRequested."""
        ends = time.monotonic() + seconds_max
        self._tell("progress", name, f"waits for {what}")
        while not condition():
            self._turn(time.monotonic() + POLL_SECONDS)
            self._check_bring_up()
            if time.monotonic() > ends:
                words = f"{name} waited {seconds_max:.0f} s for {what}; all of its log: {self._log(name).path}"
                raise StartFailed(words, name)

    def watch(self) -> None:
        """Restart what dies until a stop is requested. Raises GaveUp for a service that may be given up."""
        self._restarting = True
        try:
            for service in self.services.values():
                if service.stage == "dead":  # it died between its ready line and now
                    self._restart_later(service)
            while not self.stop_requested:
                self._turn()
        finally:
            self._restarting = False

    def drain(self, order: Sequence[str | tuple[str, ...]]) -> None:
        """Stop services one after another: SIGTERM, wait, kill. A tuple's are stopped together. Those that are not in `order` come first."""
        self._restarting = False
        groups = [(each,) if isinstance(each, str) else each for each in order]
        named = {name for group in groups for name in group}
        for group in [*((name,) for name in reversed(self.services) if name not in named), *groups]:
            self._stop([self.services[name] for name in group if name in self.services])

    def close(self) -> None:
        """Kill what still runs and close files."""
        for service in self.services.values():
            if service.child is not None and service.child.returncode is None:
                service.child.kill()
                while service.child.returncode is None:
                    self._turn()
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)
        for log in self._files.values():
            log.close()

    def _stop(self, services: Sequence[Service]) -> None:
        """All are asked at once; then each has had its seconds since that."""
        began = time.monotonic()
        for service in services:
            service.due = None
            if service.child is not None and service.child.returncode is None:
                self._tell("draining", service.spec.service, seconds=service.spec.drain_seconds)
                service.child.signal(signal.SIGTERM)
        for service in services:
            self._wait_stopped(service, began + service.spec.drain_seconds)

    def _wait_stopped(self, service: Service, ends: float | None) -> None:
        child = service.child
        if child is not None:
            while child.returncode is None:
                self._turn(ends)
                if child.returncode is None and ends is not None and (time.monotonic() > ends or self._stops > 1):
                    self._tell(
                        "killed", service.spec.service, f"still there after {service.spec.drain_seconds:.0f} s or two signals"
                    )
                    child.kill()
                    ends = None
        service.stage = "stopped"
        self._tell("stopped", service.spec.service)

    def _spawn(self, service: Service) -> None:
        spec = service.spec
        argv = spec.argv
        argv += (spec.listen_flag, service.listen) if service.listen else ()
        argv += (spec.metrics_flag, service.metrics) if service.metrics else ()
        child = Child(
            argv, self._log(spec.service), environment=spec.environment, on_output=lambda lines: self._heard(service, lines)
        )
        service.child, service.stage, service.due = child, "starting", child.started_seconds + spec.ready_seconds
        self._register(child, lambda: self._died(service, child))
        self._tell("starting", spec.service, seconds=spec.ready_seconds)

    def _heard(self, service: Service, lines: list[bytes]) -> None:
        if service.stage != "starting" or service.child is None:
            return
        ready = next(filter(None, map(_ready_line, lines)), None)
        if ready is not None:
            # The real addresses are kept: after a restart the others find it where it was.
            service.listen = ready.get("listen") or service.listen
            service.metrics = (ready.get("metrics") or service.metrics) if service.metrics else ""
            service.version = ready.get("version", "")
            service.stage, service.due, service.was_ready, service.failing = "ready", None, True, False
            self._tell("ready", service.spec.service, service.listen, time.monotonic() - service.child.started_seconds)

    def _died(self, service: Service, child: Child) -> None:
        child.reap()
        service.stage, service.due = "dead", None
        if self._restarting:
            self._restart_later(service)

    def _restart_later(self, service: Service) -> None:
        assert service.child is not None
        now, name = time.monotonic(), service.spec.service
        policy, words = service.policy, describe_exit(service.child.returncode or 0)
        delay = policy.delay_after_death(now)
        service.failing = delay is None
        if delay is None:
            limit = f"died more than {policy.restarts_max} times in {policy.window_seconds:.0f} s"
            if service.spec.given_up:
                raise GaveUp(self._obituary(name, service.child, f"{limit}, giving up"), name)
            delay, words = policy.backoff_max_seconds, f"{words}, {limit}"
        service.stage, service.due, service.restarts = "backoff", now + delay, service.restarts + 1
        self._tell("died", name, f"{words}; it starts again in {delay:.2g} s", delay)

    def _out_of_time(self, service: Service) -> None:
        service.due = None
        if service.stage == "backoff":
            self._spawn(service)
        elif service.child is not None:  # starting: its death is dealt with like any other
            self._tell("killed", service.spec.service, f"not ready after {service.spec.ready_seconds:.0f} s")
            service.child.kill()

    def _check_bring_up(self) -> None:
        if self.stop_requested:
            raise StopRequested
        for name, service in self.services.items():
            if service.stage == "dead" and service.child is not None:
                what = "stopped" if service.was_ready else "did not become ready"
                raise StartFailed(self._obituary(name, service.child, what), name)

    def _obituary(self, name: str, child: Child, what: str) -> str:
        ended = describe_exit(child.returncode) if child.returncode is not None else "still running"
        return f"{name} {what} ({ended}); all of its log: {self._log(name).path}\n{child.last_words()}".rstrip()

    def _register(self, child: Child, ended: Callable[[], object]) -> None:
        for fd, read in child.pipes():
            self._selector.register(fd, selectors.EVENT_READ, self._reader(fd, read))
        fds = [fd for fd, _ in child.pipes()] + [child.pidfd]

        def end() -> None:
            for fd in fds:
                if fd in self._selector.get_map():
                    self._selector.unregister(fd)
            ended()

        self._selector.register(child.pidfd, selectors.EVENT_READ, end)

    def _reader(self, fd: int, read: Callable[[], bool]) -> Callable[[], None]:
        def run() -> None:
            if not read():
                self._selector.unregister(fd)

        return run

    def _turn(self, ends: float | None = None) -> None:
        """Wait for the next thing that happens, and act on it. `ends`: monotonic seconds at which the caller wants to look."""
        dues = [service.due for service in self.services.values() if service.due is not None] + ([] if ends is None else [ends])
        ready = self._selector.select(max(0.0, min(dues) - time.monotonic()) if dues else None)
        for key, _ in ready:
            if key.fileobj in self._selector.get_map():  # not taken out by one that came before
                key.data()
        now = time.monotonic()
        for service in self.services.values():
            if service.due is not None and now >= service.due:
                self._out_of_time(service)

    def _log(self, name: str) -> ServiceLog:
        if name not in self._files:
            self._files[name] = ServiceLog(self._logs, name)
        return self._files[name]

    def _tell(self, kind: EventKind, name: str, text: str = "", seconds: float = 0.0) -> None:
        self._listener(Event(kind, name, text, seconds))


def _ready_line(line: bytes) -> dict[str, str] | None:
    """A ready line as its fields, or None."""
    if not line.startswith(b"{"):
        return None
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and fields.get("ready") is True else None

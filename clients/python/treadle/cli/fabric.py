"""A fabric on one machine: which services it has, how they are started, in what order they come and go.

Owns the command lines of the services and the life of one `treadle up`, from the sweep to the drain. Does not supervise
(supervisor) or print (up, background).
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path

from treadle.cli.events import Event, describe
from treadle.cli.gateway import get, join_address, reachable_url
from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord
from treadle.cli.segments import claimed, segment_dir, sweep_abandoned
from treadle.cli.service_log import ServiceLog
from treadle.cli.supervisor import READY_SECONDS, GaveUp, JobSpec, Service, ServiceSpec, StartFailed, StopRequested, Supervisor
from treadle.contract.errors import InvalidArgument, NotFound, TreadleError, Unavailable

SUPERVISOR = "supervisor"  # name of its log
POOL, WORKER, GATEWAY = "engram-pool", "inference-worker", "inference-gateway"
MODULES = {POOL: "engram_pool", WORKER: "inference_worker", GATEWAY: "inference_gateway"}
DRAIN_ORDER = (GATEWAY, WORKER, POOL)  # nobody loses what it still calls
DEFAULT_MODEL = "smollm2-135m"
DEMO_TABLE = "smollm2-demo"
GATEWAY_PORT = 8000
PORT_BASE = 7400
SERVICE_DRAIN_SECONDS = 10.0  # what a service gives its calls; the supervisor waits longer (DRAIN_SECONDS)
PORT_OFFSETS = {POOL: (1, 11), WORKER: (4, 14)}  # on PORT_BASE: the ports that each service has by itself
FETCH_SECONDS_MAX = 1800.0  # 93 MB over a slow line, then a conversion of about a minute on a busy machine
LOAD_SECONDS_MAX = 600.0


class EngramTransport(StrEnum):
    """How rows reach the worker; auto: mapped where the pool is on its host."""

    AUTO = "auto"
    MAPPED = "mapped"
    LOCAL = "local"
    RPC = "rpc"


class EngramFusion(StrEnum):
    """What becomes of the rows; shadow: all is computed, nothing is added to the hidden state."""

    SHADOW = "shadow"
    ON = "on"


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """What to bring up. `port_base` 0: free ports.

    model:     a folder, or a name that `treadle model fetch` knows
    served_as: name under which clients ask for it; "": the name that was given, or for a folder what the worker makes of it
    """

    model: str = DEFAULT_MODEL
    served_as: str = ""
    engram: bool = True
    engram_transport: EngramTransport = EngramTransport.AUTO
    engram_fusion: EngramFusion = EngramFusion.SHADOW
    host: str = "127.0.0.1"
    gateway_port: int = GATEWAY_PORT
    port_base: int = PORT_BASE
    api_key_file: str = ""
    ready_seconds: float = READY_SECONDS

    def __post_init__(self) -> None:
        if not 0 <= self.gateway_port <= 65535 or not 0 <= self.port_base <= 65535 - 14:
            raise InvalidArgument("ports lie between 0 (a free one) and 65535")
        if not self.api_key_file and not is_loopback(self.host):
            raise InvalidArgument(f"--host {self.host} lets other machines in: give --api-key-file too")
        if self.ready_seconds <= 0:
            raise InvalidArgument("--timeout is a positive number of seconds")

    def to_json(self) -> str:
        """As one line for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FabricOptions:
        """The options that `to_json` wrote."""
        fields = json.loads(text)
        fields["engram_transport"] = EngramTransport(fields["engram_transport"])
        fields["engram_fusion"] = EngramFusion(fields["engram_fusion"])
        return cls(**fields)


def check_installed(engram: bool) -> None:
    """NotFound, saying what to install, if a service that is needed is not there."""
    needed = [name for name in MODULES if engram or name != POOL]
    missing = [name for name in needed if importlib.util.find_spec(MODULES[name]) is None]
    if missing:
        raise NotFound(f"not installed: {', '.join(missing)}; pip install 'treadle[fabric]'")


def is_loopback(host: str) -> bool:
    """True for names and numbers of this machine alone."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")


def check_port_free(service: str, host: str, port: int, advice: str) -> None:
    """Unavailable, with the advice, if another process listens there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: a closing connection is no obstacle
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            words = f"{service} cannot listen on {join_address(host, port)}: {error.strerror}"
            raise Unavailable(f"{words}; {advice}") from None


class FabricRun:
    """One life of a fabric. `listener` is told what happens; `run` returns after the drain."""

    def __init__(self, folder: RunFolder, options: FabricOptions, listener: Callable[[Event], None]) -> None:
        self.folder, self.options = folder, options
        self._listener = listener
        self._segments = segment_dir(folder.home)
        self._supervisor = Supervisor(folder.logs, self._heard)  # it opens nothing before the lock is ours
        self._log = ServiceLog(folder.logs, SUPERVISOR)
        self._gateway_url = reachable_url(join_address(options.host, options.gateway_port)) if options.gateway_port else ""
        self._me = ProcessMark.of(os.getpid())
        self._stage, self._step, self._model_dir, self._served_as = "starting", "", "", options.served_as

    def run(self, on_ready: Callable[[FabricState], None], on_locked: Callable[[], None] = lambda: None) -> None:
        """Sweep, bring up, call `on_ready`, watch until a stop is requested, drain. `on_locked`: this home is ours from here on.

        Raises Unavailable (already up, port taken), StartFailed, GaveUp; StopRequested if stopped while it came up. The
        drain is done in every case; before it, what went wrong is in the supervisor's log and in the run folder.
        """
        try:
            check_installed(self.options.engram)
            with self.folder.lock(), claimed(self._segments) as freed, self._supervisor.signals():
                try:
                    on_locked()
                    self._prepare(freed)
                    self._bring_up()
                    self._stage = "ready"
                    self.folder.forget_failure()
                    on_ready(self._record())
                    self._supervisor.watch()
                except StopRequested:
                    raise
                except Exception as error:  # whatever it is, nobody may be there to hear it
                    self._write_failure(error)
                    raise
                finally:
                    self._take_down()
        finally:
            self._log.close()

    def _write_failure(self, error: Exception) -> None:
        words = str(error) if isinstance(error, TreadleError) else "".join(traceback.format_exception(error))
        service = error.service if isinstance(error, (StartFailed, GaveUp)) and error.service else SUPERVISOR
        self._write_log(f"the fabric ends: {words}")
        self.folder.write_failure(service, words)

    def _prepare(self, freed: int) -> None:
        self._record()
        self._check_ports()
        freed += sweep_abandoned(self.folder.home)
        if freed:
            self._heard(Event("done", "sweep", f"freed {freed / 2**20:.0f} MiB that a crashed run had left in shared memory"))

    def _check_ports(self) -> None:
        options = self.options
        if options.gateway_port:
            advice = "choose another with --gateway-port (0: a free one)"
            check_port_free(GATEWAY, options.host, options.gateway_port, advice)
        for service, offsets in PORT_OFFSETS.items():
            if options.port_base and (options.engram or service != POOL):
                for offset in offsets:
                    advice = "choose free ports with --port-base 0, or another base"
                    check_port_free(service, "127.0.0.1", options.port_base + offset, advice)

    def _bring_up(self) -> None:
        options, supervisor = self.options, self._supervisor
        self._model_dir = self._find_model()
        pool = ""
        if options.engram:
            pool = supervisor.start(self._pool_spec()).listen
            supervisor.run(load_demo_table(pool, self._model_dir))
        worker = supervisor.start(self._worker_spec(pool)).listen
        gateway = supervisor.start(self._gateway_spec(worker))
        self._gateway_url = reachable_url(gateway.listen)
        supervisor.wait_until(GATEWAY, "its first look at the worker", self._gateway_ready, options.ready_seconds)

    def _gateway_ready(self) -> bool:
        try:
            get(f"{self._gateway_url}/ready")
        except Unavailable:
            return False
        return True

    def _take_down(self) -> None:
        self._stage = "draining"
        try:
            self._supervisor.drain(DRAIN_ORDER)
        finally:
            self._supervisor.close()
            self.folder.forget()

    def _find_model(self) -> str:
        """The model's folder; fetched first where a name is given."""
        model = Path(self.options.model).expanduser()
        if (model / "config.json").exists():
            return str(model.absolute())
        if os.sep in self.options.model:
            raise NotFound(f"{model} is not a model folder: it has no config.json")
        self._served_as = self._served_as or self.options.model
        return fetched_folder(self._supervisor.run(fetch_model(self.options.model)))

    def _pool_spec(self) -> ServiceSpec:
        argv = (*service_module(POOL), "--segment-dir", str(self._segments))
        return replace(self._internal(POOL, argv), given_up=False)  # worker and gateway answer without it

    def _worker_spec(self, pool: str) -> ServiceSpec:
        options = self.options
        argv = (*service_module(WORKER), "--model", self._model_dir)
        argv += ("--served-model-name", self._served_as) if self._served_as else ()
        if pool:
            argv += ("--engram-model", DEMO_TABLE, "--engram-pool", pool)
            argv += ("--engram-transport", options.engram_transport, "--engram-fusion", options.engram_fusion)
        else:
            argv += ("--engram-model", "none")
        return self._internal(WORKER, argv)

    def _gateway_spec(self, worker: str) -> ServiceSpec:
        options = self.options
        argv = (*service_module(GATEWAY), "--worker", worker)
        if options.api_key_file:
            argv += ("--api-key-file", options.api_key_file)
        listen = join_address(options.host, options.gateway_port)
        return ServiceSpec(GATEWAY, argv, listen, ready_seconds=options.ready_seconds, environment=child_environment())

    def _internal(self, service: str, argv: tuple[str, ...]) -> ServiceSpec:
        base = self.options.port_base
        listen, metrics = (f"127.0.0.1:{base + offset if base else 0}" for offset in PORT_OFFSETS[service])
        return ServiceSpec(
            service, argv, listen, metrics, ready_seconds=self.options.ready_seconds, environment=child_environment()
        )

    def _heard(self, event: Event) -> None:
        if event.kind in ("starting", "progress", "done"):
            self._step = f"{event.name}: {event.text}" if event.text else event.name
        if event.kind != "progress":
            self._record()
            self._write_log(describe(event))
        try:
            self._listener(event)
        except OSError:  # the terminal is gone; the drain goes on
            self._listener = lambda event: None

    def _write_log(self, words: str) -> None:
        self._log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {words.rstrip()}\n".encode())

    def _record(self) -> FabricState:
        services = tuple(map(_record_of, self._supervisor.services.values()))
        step = self._step if self._stage == "starting" else ""
        state = FabricState(
            self._me,
            self._stage,
            self._gateway_url,
            str(self._segments),
            step,
            self._model_dir,
            self.options.api_key_file,
            services,
        )
        self.folder.write(state)
        return state


def fetch_model(name: str) -> JobSpec:
    """The job that puts a known model into the cache and prints where it is."""
    argv = (*python_module("treadle.cli"), "model", "fetch", name, "--json")
    return JobSpec("model-fetch", argv, FETCH_SECONDS_MAX, child_environment())


def fetched_folder(output: bytes) -> str:
    """The folder in what `treadle model fetch --json` printed. StartFailed if it is not there."""
    try:
        folder = str(json.loads(output)["path"])
    except (ValueError, KeyError, TypeError) as error:
        raise StartFailed(f"`treadle model fetch --json` did not print a path: {output[:200]!r}") from error
    return folder


def load_demo_table(pool: str, model_dir: str) -> JobSpec:
    """The job that loads seeded random rows for the demo profile into a pool."""
    argv = (
        *python_module("treadle.cli"), "pool", "load", DEMO_TABLE, "--random", "--profile", DEMO_TABLE,
        "--tokenizer", str(Path(model_dir) / "tokenizer.json"), "--pool", pool, "--json",
    )  # fmt: skip
    return JobSpec("table-load", argv, LOAD_SECONDS_MAX, child_environment())


def python_module(module: str) -> tuple[str, ...]:
    """The command of a Python module in this environment."""
    return (sys.executable, "-m", module)


def service_module(service: str) -> tuple[str, ...]:
    """The command of one of our services, without its own settings."""
    return (*python_module(MODULES[service]), "--drain-seconds", f"{SERVICE_DRAIN_SECONDS:g}")


def child_environment() -> dict[str, str]:
    """Our environment, with prompt output and one quiet compute thread (two spin against each other on a busy machine)."""
    defaults = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return defaults | dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}


def _record_of(service: Service) -> ServiceRecord:
    alive = service.child is not None and service.child.returncode is None
    return ServiceRecord(
        service.spec.service, service.shown_stage, service.listen, service.metrics, service.version, service.restarts,
        service.child.mark if alive and service.child is not None else None,
    )  # fmt: skip

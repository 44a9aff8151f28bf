"""A fabric on one machine: which services it has, how they are started, in what order they come and go.

Owns the command lines of the services and the life of one `treadle up`, from the sweep to the drain. Does not supervise
(supervisor) or print (up, background).
"""

from __future__ import annotations

import importlib.util
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from treadle.cli import jobs
from treadle.cli.events import Event, describe
from treadle.cli.fabric_options import SPEED_TABLE, EngramTable, FabricOptions
from treadle.cli.gateway import get, join_address, reachable_url
from treadle.cli.memories import GrownMemory, shipped_memory
from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord, read_worker_key
from treadle.cli.segments import claimed, segment_dir, sweep_abandoned
from treadle.cli.service_log import ServiceLog
from treadle.cli.supervisor import GaveUp, Service, ServiceSpec, StartFailed, StopRequested, Supervisor
from treadle.cli.terminal import size_text
from treadle.cli.worker_engine import WorkerEngine, worker_command
from treadle.contract.errors import InvalidArgument, NotFound, TreadleError, Unavailable
from treadle.contract.policy import TransportChoice

SUPERVISOR = "supervisor"  # name of its log
POOL, STORE, WORKER, GATEWAY = "engram-pool", "asm-store", "inference-worker", "inference-gateway"
MODULES = {POOL: "engram_pool", STORE: "asm_store", WORKER: "inference_worker", GATEWAY: "inference_gateway"}
VLLM_READY_FACTOR = 5  # it imports, starts two more processes and has its answers checked
SERVICE_DRAIN_SECONDS = 10.0  # what a service gives its calls; the supervisor waits longer (DRAIN_SECONDS)
DRAIN_FLAGS = ("--drain-seconds", f"{SERVICE_DRAIN_SECONDS:g}")
PORT_OFFSETS = {POOL: (1, 11), STORE: (2, 12), WORKER: (4, 14)}  # on PORT_BASE: the ports that each service has by itself
MEMORY = "memory"  # who speaks of memories among the events


def worker_names(count: int) -> tuple[str, ...]:
    """Names of so many workers: the first has the service's own."""
    return (WORKER, *(f"{WORKER}-{number}" for number in range(2, count + 1)))


def kind_of(name: str) -> str:
    """Which service one of that name is: the worker, for all workers."""
    return WORKER if name.startswith(f"{WORKER}-") else name


def services_of(options: FabricOptions) -> list[str]:
    """The kinds of services that a fabric has, in the order in which they come."""
    return [name for name in MODULES if (name != POOL or options.engram) and (name != STORE or options.asm)]


def check_installed(options: FabricOptions) -> None:
    """NotFound, saying what to install, if a service that is needed is not there."""
    missing = [name for name in services_of(options) if importlib.util.find_spec(MODULES[name]) is None]
    if missing:
        raise NotFound(f"not installed: {', '.join(missing)}; pip install 'treadle[fabric]'")


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
        self._memories: list[GrownMemory] = []  # that are to be loaded
        self._worker_key_file = ""  # before the lock is ours

    def run(self, on_ready: Callable[[FabricState], None], on_locked: Callable[[], None] = lambda: None) -> None:
        """Sweep, bring up, call `on_ready`, watch until a stop is requested, drain. `on_locked`: this home is ours from here on.

        Raises Unavailable (already up, port taken), StartFailed, GaveUp; StopRequested if stopped while it came up. The
        drain is done in every case; before it, what went wrong is in the supervisor's log and in the run folder.
        """
        try:
            check_installed(self.options)
            self._worker_command()  # refused before anything is started
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
        self._worker_key_file = str(self.folder.make_worker_key())
        self._record()
        self._memories = [GrownMemory.read(Path(folder)) for folder in self.options.memories]
        self._check_ports()
        freed += sweep_abandoned(self.folder.home)
        if freed:
            self._heard(Event("done", "sweep", f"freed {size_text(freed)} that a crashed run had left in shared memory"))

    def _check_ports(self) -> None:
        options = self.options
        if options.gateway_port:
            advice = "choose another with --gateway-port (0: a free one)"
            check_port_free(GATEWAY, options.host, options.gateway_port, advice)
        for service, offsets in PORT_OFFSETS.items():
            if options.port_base and service in services_of(options):
                for offset in offsets:
                    advice = "choose free ports with --port-base 0, or another base"
                    check_port_free(service, "127.0.0.1", options.port_base + offset, advice)

    def _bring_up(self) -> None:
        options, supervisor = self.options, self._supervisor
        self._model_dir = self._find_model()
        pool = ""
        if options.engram:
            self._choose_memories(Path(self._model_dir))
            pool = supervisor.start(self._pool_spec()).listen
            self._load(pool)
        store = supervisor.start(self._store_spec()).listen if options.asm else ""
        workers = {name: supervisor.start(self._worker_spec(name, pool, store)).listen for name in worker_names(options.workers)}
        gateway = supervisor.start(self._gateway_spec(workers, pool))
        self._gateway_url = reachable_url(gateway.listen)
        supervisor.wait_until(GATEWAY, "its first look at the worker", self._gateway_ready, options.ready_seconds)
        self._tell_refused(pool, workers[WORKER])

    def _choose_memories(self, model_dir: Path) -> None:
        """Settle what is loaded. A named folder that does not fit is an error; the shipped memory is left out and that is told."""
        options = self.options
        for memory in self._memories:
            if misfit := memory.misfit(model_dir):
                raise InvalidArgument(f"--memory {memory.folder}: {misfit}; `treadle engram grow` makes one for this model")
        if options.engram_table is EngramTable.SHIPPED:
            shipped = shipped_memory()
            misfit = "the installed engram-pool comes without a memory" if shipped is None else shipped.misfit(model_dir)
            if shipped is None or misfit:
                self._tell_memory(f"{misfit}: not loaded")
            else:
                self._memories.insert(0, shipped)
        names = [memory.name for memory in self._memories] + [SPEED_TABLE] * (options.engram_table is EngramTable.SPEED)
        if options.default_memory and options.default_memory not in names:
            raise InvalidArgument(f"--engram-default {options.default_memory}: not loaded; there is {', '.join(names) or 'none'}")

    def _load(self, pool: str) -> None:
        if self.options.engram_table is EngramTable.SPEED:
            self._supervisor.run(jobs.load_speed_table(pool, self._model_dir))
        for memory in self._memories:
            self._supervisor.run(jobs.load_memory(pool, memory))

    def _tell_refused(self, pool: str, worker: str) -> None:
        """Say which of the memories the worker refuses: their sizes fit, something else does not."""
        if not self._memories:
            return
        from treadle.client import Fabric  # gRPC takes 100 ms to import

        with Fabric(worker=worker, key=read_worker_key(self._worker_key_file)) as sdk:
            refusals = {memory.model: memory.refusal for memory in sdk.worker.status().engram_models if memory.refusal}
        for memory in self._memories:
            if memory.name not in refusals:
                continue
            if str(memory.folder) in self.options.memories:
                self._tell_memory(f"{memory.name} cannot be chosen: {refusals[memory.name]}")
            else:
                self._supervisor.run(jobs.remove_memory(pool, memory.name))
                self._tell_memory(f"{memory.name} was made for {memory.made_for}: not loaded ({refusals[memory.name]})")

    def _tell_memory(self, words: str) -> None:
        self._heard(Event("done", MEMORY, words))

    def _gateway_ready(self) -> bool:
        try:
            get(f"{self._gateway_url}/ready")
        except Unavailable:
            return False
        return True

    def _take_down(self) -> None:
        self._stage = "draining"
        try:
            self._supervisor.drain((GATEWAY, worker_names(self.options.workers), STORE, POOL))  # nobody loses what it still calls
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
        return jobs.fetched_folder(self._supervisor.run(jobs.fetch_model(self.options.model)))

    def _pool_spec(self) -> ServiceSpec:
        argv = (*service_module(POOL), "--segment-dir", str(self._segments))
        if self.options.engram_transport is TransportChoice.MOONCAKE:
            argv += ("--mooncake-listen", "127.0.0.1:0")  # a door that pools have only where they are told
        return replace(self._internal(POOL, argv), given_up=False)  # worker and gateway answer without it

    def _store_spec(self) -> ServiceSpec:
        folder = self.options.asm_dir or str(self.folder.home / "asm")  # where the service by itself keeps them too
        argv = (*service_module(STORE), "--data-dir", folder)
        return replace(self._internal(STORE, argv), given_up=False)  # a worker goes on with what it has mapped

    def _worker_spec(self, name: str, pool: str, store: str) -> ServiceSpec:
        options = self.options
        argv = (*self._worker_command(), *DRAIN_FLAGS, "--engine", options.engine, "--model", self._model_dir)
        # Past the gateway nobody's limits and tenants hold: what the machine's other users can reach asks for a key.
        argv += ("--api-key-file", self._worker_key_file)
        argv += ("--served-model-name", self._served_as) if self._served_as else ()
        if pool:
            argv += ("--engram-pool", pool, "--engram-transport", options.engram_transport)
            argv += ("--engram-fusion", options.engram_fusion)
            argv += ("--engram-model", options.default_memory) if options.default_memory else ()
        else:
            argv += ("--engram-transport", "off")
        argv += ("--asm-store", store) if store else ()
        spec = replace(self._internal(name, argv), given_up=options.workers == 1)  # else the others serve meanwhile
        return replace(spec, ready_seconds=VLLM_READY_FACTOR * spec.ready_seconds) if options.engine is WorkerEngine.VLLM else spec

    def _worker_command(self) -> tuple[str, ...]:
        return worker_command(self.options.engine, self.options.worker_command, MODULES[WORKER])

    def _gateway_spec(self, workers: Mapping[str, str], pool: str) -> ServiceSpec:
        options = self.options
        named = [f"{name}={address}" for name, address in workers.items()] if len(workers) > 1 else workers.values()
        argv = (*service_module(GATEWAY), "--worker", ",".join(named), "--worker-key-file", self._worker_key_file)
        argv += ("--engram-pool", pool) if pool else ()
        if options.api_key_file:
            argv += ("--api-key-file", options.api_key_file)
        listen = join_address(options.host, options.gateway_port)
        return ServiceSpec(GATEWAY, argv, listen, ready_seconds=options.ready_seconds, environment=jobs.child_environment())

    def _internal(self, service: str, argv: tuple[str, ...]) -> ServiceSpec:
        base = self.options.port_base if service in PORT_OFFSETS else 0  # workers beyond the first take free ports
        listen, metrics = (f"127.0.0.1:{base + offset if base else 0}" for offset in PORT_OFFSETS[kind_of(service)])
        return ServiceSpec(
            service, argv, listen, metrics, ready_seconds=self.options.ready_seconds, environment=jobs.child_environment()
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
            self._worker_key_file,
            services,
        )
        self.folder.write(state)
        return state


def service_module(service: str) -> tuple[str, ...]:
    """The command of one of our services, without its own settings."""
    return (*jobs.python_module(MODULES[service]), *DRAIN_FLAGS)


def _record_of(service: Service) -> ServiceRecord:
    alive = service.child is not None and service.child.returncode is None
    return ServiceRecord(
        service.spec.service, service.shown_stage, service.listen, service.metrics, service.version, service.restarts,
        service.child.mark if alive and service.child is not None else None,
    )  # fmt: skip

"""Where a scenario plays: real pools and clients under the supervisor of `treadle up`, a folder that goes with it.

The supervisor has the main thread, as it must; the scenario runs in a thread beside it and ends it.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from treadle.cli.events import Event
from treadle.cli.restarts import RestartPolicy
from treadle.cli.supervisor import Service, ServiceSpec, Supervisor
from treadle.client import Fabric
from treadle.contract import TreadleError
from treadle_loadtests.checking import Task
from treadle_loadtests.counters import Counters, totals

BACKOFF_SECONDS = 0.25  # the first of `treadle up`; here every one, as a hundred kills are not a broken service
POOL_READY_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.01


class ScenarioFailed(Exception):
    """The scenario itself could not go on; not a figure."""


@dataclass(slots=True)
class Stage:
    """Processes by name. `folder` is in shared memory and goes at the end, with all that is in it.

    prime_base, seeds: of the tables, in scenarios with pools
    """

    prime_base: int = 0
    seeds: tuple[int, ...] = ()
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="treadle-loadtest-", dir="/dev/shm")))
    pools: dict[str, str] = field(default_factory=dict)
    clients: dict[str, Counters] = field(default_factory=dict)
    restarts: list[str] = field(default_factory=list)
    _supervisor: Supervisor | None = None
    _failure: BaseException | None = None

    # -- before it begins ---------------------------------------------------------------------------------------------------

    def pool_spec(self, name: str, owners: Sequence[str], *flags: str) -> ServiceSpec:
        """A pool that is one of `owners`, on a port of its own that it keeps over restarts."""
        for owner in owners:
            self.pools.setdefault(owner, f"127.0.0.1:{free_port()}")
        listed = ",".join(f"{owner}={self.pools[owner]}" for owner in owners)
        segments = self.folder / name
        argv = (
            sys.executable, "-m", "engram_pool", "--segment-dir", str(segments), "--owner", name, "--owners", listed,
            "--log-level", "warning", *flags,
        )  # fmt: skip
        return ServiceSpec(
            name, argv, listen=self.pools[name], metrics="127.0.0.1:0", ready_seconds=POOL_READY_SECONDS, drain_seconds=STOP_SECONDS,
            given_up=False, environment=child_environment(),
        )  # fmt: skip

    def client_spec(self, number: int, engram: str, transport: str, tokens: int, rest_seconds: float = 0.0) -> ServiceSpec:
        """A checking client."""
        name = f"client-{number}-{transport}"
        self.clients[name] = Counters(self.folder / f"{name}.counters")
        task = Task(engram, transport, self.seeds, self.prime_base, tokens, number, str(self.clients[name].path), rest_seconds)
        argv = (sys.executable, "-m", "treadle_loadtests.checking", task.to_json())
        return ServiceSpec(
            name,
            argv,
            ready_seconds=POOL_READY_SECONDS,
            drain_seconds=STOP_SECONDS,
            given_up=False,
            environment=child_environment(),
        )

    # -- while it runs --------------------------------------------------------------------------------------------------------

    def play(self, pools: Sequence[ServiceSpec], prepare: Callable[[], None], clients: Sequence[ServiceSpec],
             scenario: Callable[[], None]) -> None:  # fmt: skip
        """Start pools, prepare, start clients, run the scenario, stop all. Raises what the scenario raised, ScenarioFailed, StartFailed."""
        supervisor = self._supervisor = Supervisor(self.folder / "logs", self._listen, _patience)
        try:
            with supervisor.signals():
                for spec in pools:
                    supervisor.start(spec)
                prepare()
                for spec in clients:
                    supervisor.start(spec)
                thread = threading.Thread(target=self._run, args=(scenario, supervisor), name="scenario")
                thread.start()
                supervisor.watch()
                thread.join(STOP_SECONDS)
                supervisor.drain([spec.service for spec in (*clients, *pools)])
        finally:
            supervisor.close()
        if self._failure is not None:
            raise self._failure

    def _run(self, scenario: Callable[[], None], supervisor: Supervisor) -> None:
        try:
            scenario()
        except BaseException as error:  # it is raised where the stage was set
            self._failure = error
        finally:
            supervisor.request_stop()

    def _listen(self, event: Event) -> None:
        if event.kind == "died":
            self.restarts.append(event.name)

    @property
    def stopping(self) -> bool:
        """Somebody asked for the end, e.g. by Ctrl-C."""
        return self._supervisor is not None and self._supervisor.stop_requested

    def service(self, name: str) -> Service:
        """A supervised process as it is now."""
        assert self._supervisor is not None
        return self._supervisor.services[name]

    def ready(self, name: str) -> bool:
        """True while it serves."""
        service = self.service(name)
        return service.stage == "ready" and service.child is not None and service.child.returncode is None

    def kill(self, name: str) -> None:
        """kill -9. The supervisor starts it again."""
        child = self.service(name).child
        assert child is not None
        with suppress(ProcessLookupError):
            os.kill(child.pid, signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = POOL_READY_SECONDS) -> float:
        """Until `condition` holds; how long it took. Raises ScenarioFailed after `seconds`, or once somebody asked for the end."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() - begun > seconds or self.stopping:
                raise ScenarioFailed(f"{'stopped' if self.stopping else f'after {seconds:.0f} s still not'}: {what}")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - begun

    def pause(self, seconds: float) -> None:
        """Let the clients work. Raises ScenarioFailed once somebody asked for the end."""
        until = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() >= until, "the end of a pause", seconds + 1)

    def answers(self, name: str, work: Callable[[Fabric], object]) -> bool:
        """True if `work` can be done at this pool now."""
        try:
            with Fabric(engram=self.pools[name], timeout_seconds=0.5) as fabric:
                work(fabric)
        except TreadleError:
            return False
        return True

    # -- afterwards -----------------------------------------------------------------------------------------------------------

    def seen(self, transport: str = "") -> dict[str, int]:
        """What the clients of one transport saw, or all of them."""
        return totals([counters.read() for name, counters in self.clients.items() if name.endswith(transport)])

    def reasons(self) -> list[str]:
        """What went wrong, in words, by client."""
        return [f"{name}: {reason}" for name, counters in self.clients.items() for reason in counters.reasons()]

    def clear(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def child_environment() -> dict[str, str]:
    """Ours, but that sources are compiled once: an installed service does not compile them at every start either."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _patience() -> RestartPolicy:
    return RestartPolicy(
        restarts_max=1 << 20, window_seconds=60.0, backoff_first_seconds=BACKOFF_SECONDS, backoff_max_seconds=BACKOFF_SECONDS
    )


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

"""Services under a load: stub workers and a gateway as processes of their own, each on the cores that it was given.

Owns starting, stopping and looking at processes from inside one event loop. What they die with is the thread of that loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from treadle.cli import tether
from treadle_loadtests.stage import ScenarioFailed

READY_SECONDS = 60.0
STOP_SECONDS = 40.0  # a drain and some air; then it is killed
POLL_SECONDS = 0.02
LOG_SHOWN_BYTES = 2000
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
Flags = Mapping[str, object]


@dataclass(slots=True)
class Running:
    """A process that printed its ready line. `listen`: host:port, kept over restarts."""

    name: str
    argv: Sequence[str]
    cores: frozenset[int]
    process: asyncio.subprocess.Process
    listen: str = ""

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        return self.process.pid

    def cpu_seconds(self) -> float:
        """User and system time since its start."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND

    def resident_bytes(self) -> int:
        """Memory that it has in RAM."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass(slots=True)
class Services:
    """An async context: what was started in it is ended with it, and its folder goes."""

    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="treadle-loadtest-")))
    running: dict[str, Running] = field(default_factory=dict)

    async def __aenter__(self) -> Services:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await asyncio.gather(*(self.stop(name) for name in reversed(self.running)))
        finally:
            for service in self.running.values():
                if service.process.returncode is None:
                    service.process.kill()
                    await service.process.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    async def stub(self, name: str, cores: frozenset[int], flags: Flags | None = None) -> Running:
        """A stub worker. flags: by the names of its settings."""
        return await self.start(name, [sys.executable, "-m", "treadle_loadtests.stub_worker", *written(flags or {})], cores)

    async def gateway(self, workers: Sequence[Running], cores: frozenset[int], flags: Flags | None = None) -> Running:
        """A gateway in front of workers, once it is ready to take requests."""
        mine = {"worker": ",".join(worker.listen for worker in workers), "worker_poll_seconds": 0.5, "log_level": "warning"}
        argv = [sys.executable, "-m", "inference_gateway", *written({**mine, **(flags or {})})]
        gateway = await self.start("gateway", argv, cores)
        await until(lambda: http_status(gateway.listen, "/ready"), 200, "the gateway is ready")
        return gateway

    async def start(
        self, name: str, argv: Sequence[str], cores: frozenset[int] = frozenset(), listen: str = "127.0.0.1:0"
    ) -> Running:
        """Start a service of ours and wait for its ready line. Raises ScenarioFailed with the end of its log."""
        # It goes when this thread does, however that ends.
        command = [sys.executable, tether.__file__, str(os.getpid()), *argv, "--listen", listen]
        with (self.folder / f"{name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=log)
        service = self.running[name] = Running(name, argv, cores, process)
        if cores:
            os.sched_setaffinity(process.pid, cores)  # before it has threads; they inherit it
        assert process.stdout is not None
        try:
            async with asyncio.timeout(READY_SECONDS):
                line = await process.stdout.readline()
        except TimeoutError as error:
            raise ScenarioFailed(f"{name} printed no ready line within {READY_SECONDS:g} s: {self.log(name)}") from error
        if not line:
            await process.wait()
            raise ScenarioFailed(f"{name} ended with code {process.returncode}: {self.log(name)}")
        service.listen = json.loads(line)["listen"]
        return service

    async def stop(self, name: str) -> int:
        """SIGTERM, and SIGKILL if it does not end; its exit code."""
        service = self.running[name]
        if service.process.returncode is None:
            service.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await service.process.wait()
        except TimeoutError:
            service.process.kill()
            return await service.process.wait()

    async def restart(self, name: str) -> None:
        """Stop it, and start it again where it listened before."""
        before = self.running[name]
        code = await self.stop(name)
        if code != 0:
            raise ScenarioFailed(f"{name} ended with code {code} when it was told to stop: {self.log(name)}")
        await self.start(name, before.argv, before.cores, before.listen)

    def log(self, name: str) -> str:
        """The end of a service's log."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-LOG_SHOWN_BYTES:]


@dataclass(slots=True)
class CpuShare:
    """What part of a core processes use from now on; 0 is this process."""

    services: Sequence[Running]
    _begun: float = field(default_factory=time.monotonic)
    _mine: float = field(default_factory=time.process_time)
    _theirs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._theirs = [service.cpu_seconds() for service in self.services]

    def shares(self) -> dict[str, float]:
        """By name, and this process as `client`."""
        seconds = time.monotonic() - self._begun
        used = {
            service.name: (service.cpu_seconds() - before) / seconds
            for service, before in zip(self.services, self._theirs, strict=True)
        }
        return used | {"client": (time.process_time() - self._mine) / seconds}


def cores_apart() -> tuple[frozenset[int], frozenset[int], str]:
    """A core for the gateway, the others for the rest, and what to say where there is but one."""
    there = sorted(os.sched_getaffinity(0))
    if len(there) == 1:
        return frozenset(there), frozenset(there), "one core for gateway, workers and client"
    return frozenset(there[:1]), frozenset(there[1:]), ""


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """This process on `cores` while the body runs."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def written(flags: Flags) -> list[str]:
    """Flags as a command line has them."""
    return [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]


async def http_status(address: str, path: str) -> int:
    """Status of a GET; 0 if nobody answers."""
    host, _, port = address.rpartition(":")
    try:
        reader, writer = await asyncio.open_connection(host, int(port))
    except OSError:
        return 0
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
        line = await reader.readline()
        return int(line.split()[1]) if line else 0
    except OSError:
        return 0
    finally:
        writer.close()


async def until(look: Callable[[], Awaitable[object]], wanted: object, what: str, seconds: float = READY_SECONDS) -> None:
    """Until `await look()` gives `wanted`. Raises ScenarioFailed after `seconds`."""
    end = time.monotonic() + seconds
    while (seen := await look()) != wanted:
        if time.monotonic() > end:
            raise ScenarioFailed(f"after {seconds:g} s still not: {what}; last seen: {seen}")
        await asyncio.sleep(POLL_SECONDS)

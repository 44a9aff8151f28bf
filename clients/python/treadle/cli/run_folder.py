"""The run folder of a fabric: who runs where, the lock that makes it one, the logs.

Owns `$TREADLE_HOME/run` (default `~/.cache/treadle/run`): `up.lock`, `state.json`, `worker.key`, `last-failure.json`, `logs/`. Does
not start or stop anything.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from treadle.cli.process_mark import ProcessMark
from treadle.contract.errors import DataLoss, Unavailable

SCHEMA = "treadle.run/1"
FAILURE_SCHEMA = "treadle.failure/1"
STATE_BYTES_MAX = 1 << 20
WORKER_KEY_BYTES = 32
FAILURE_WORDS_MAX = 16_384  # characters; a child's last lines fit


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """One service as its supervisor last saw it. `stage`: starting, ready, backoff, failing, dead or stopped."""

    service: str
    stage: str
    listen: str = ""
    metrics: str = ""
    version: str = ""
    restarts: int = 0
    process: ProcessMark | None = None


@dataclass(frozen=True, slots=True)
class FabricState:
    """A running fabric. `stage`: starting, ready or draining; `step`: what it is waiting for while it starts.

    api_key_file:    keys that its gateway accepts; "": it asks for none
    worker_key_file: the key that its workers ask for; "": a fabric of an older version, whose workers ask for none
    """

    supervisor: ProcessMark
    stage: str
    gateway_url: str
    segment_dir: str
    step: str = ""
    model_dir: str = ""
    api_key_file: str = ""
    worker_key_file: str = ""
    services: tuple[ServiceRecord, ...] = field(default=())

    def service(self, name: str) -> ServiceRecord | None:
        """The record of one service, if it has one."""
        return next((record for record in self.services if record.service == name), None)

    def worker_key(self) -> str | None:
        """The key to show to its workers, read now; None: they ask for none. Unavailable if the file is gone."""
        return read_worker_key(self.worker_key_file) if self.worker_key_file else None


@dataclass(frozen=True, slots=True)
class Failure:
    """Why the last fabric ended by itself. `time`: ISO 8601 with zone; `service`: whose fault; `log`: the file to read."""

    time: str
    service: str
    words: str
    log: str


def read_worker_key(path: str) -> str:
    """The key in a file that `RunFolder.make_worker_key` wrote. Unavailable if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise Unavailable(f"the key of the workers, {path}, cannot be read: {error.strerror}") from error


def home() -> Path:
    """$TREADLE_HOME, else `~/.cache/treadle`: the same home that fetched models are kept in."""
    set_home = os.environ.get("TREADLE_HOME")
    return Path(set_home).expanduser().absolute() if set_home else Path.home() / ".cache" / "treadle"


class RunFolder:
    """The run folder under `home`; made when it is first locked."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "run"
        self.logs = self.path / "logs"
        self.state_path = self.path / "state.json"
        self.worker_key_path = self.path / "worker.key"
        self.failure_path = self.path / "last-failure.json"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold `up.lock`: one fabric for each run folder. Unavailable, naming who holds it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.path.chmod(0o700)  # the logs may have made it first
        fd = os.open(self.path / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            self._take(fd)
            yield
        finally:
            os.close(fd)

    def write(self, state: FabricState) -> None:
        """Replace the state; a reader sees the old one or the new one."""
        _replace(self.state_path, {"schema": SCHEMA} | asdict(state))

    def read(self) -> FabricState | None:
        """The state of a live fabric, or None; what a crash left behind does not count. DataLoss if it cannot be read."""
        state = self.read_any()
        return state if state is not None and state.supervisor.alive() else None

    def read_any(self) -> FabricState | None:
        """The state that is there, also of a dead fabric."""
        try:
            with self.state_path.open(encoding="utf-8") as file:
                document = json.loads(file.read(STATE_BYTES_MAX))
            return _state_from(document)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DataLoss(f"{self.state_path} is not a state of {SCHEMA} ({error}); remove it once nothing runs") from error

    def make_worker_key(self) -> Path:
        """Write a new random key that workers shall ask for, for this user's eyes alone; its file. Only under the lock."""
        self.worker_key_path.unlink(missing_ok=True)
        fd = os.open(self.worker_key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(f"{secrets.token_hex(WORKER_KEY_BYTES)}\n")
        return self.worker_key_path

    def forget(self) -> None:
        """Remove the state, and the key of workers that are gone."""
        self.state_path.unlink(missing_ok=True)
        self.worker_key_path.unlink(missing_ok=True)

    def write_failure(self, service: str, words: str) -> Failure:
        """Keep why this fabric ends, for `treadle status` and `treadle logs`; what was kept before goes. Only under the lock."""
        log = self.logs / f"{service}.log"
        failure = Failure(time.strftime("%Y-%m-%dT%H:%M:%S%z"), service, words[:FAILURE_WORDS_MAX], str(log))
        _replace(self.failure_path, {"schema": FAILURE_SCHEMA} | asdict(failure))
        return failure

    def read_failure(self) -> Failure | None:
        """Why the last fabric ended, or None if it was asked to. DataLoss if it cannot be read."""
        try:
            with self.failure_path.open(encoding="utf-8") as file:
                document = json.loads(file.read(STATE_BYTES_MAX))
            if document.pop("schema") != FAILURE_SCHEMA:
                raise ValueError("another schema")
            return Failure(**document)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataLoss(f"{self.failure_path} is not a record of {FAILURE_SCHEMA} ({error}); remove it") from error

    def forget_failure(self) -> None:
        """Remove what was kept about the last failure."""
        self.failure_path.unlink(missing_ok=True)

    def _take(self, fd: int) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(self._who_is_up()) from None

    def _who_is_up(self) -> str:
        state = self.read_any()
        if state is None:
            return f"another `treadle up` is starting in {self.path}"
        return f"treadle is already up: pid {state.supervisor.pid}, {state.gateway_url}; `treadle down` stops it"


def _replace(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1), encoding="utf-8")
    partial.replace(path)


def _state_from(document: dict[str, Any]) -> FabricState:
    if document.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    services = []
    for record in document.pop("services"):
        process = record.pop("process")
        services.append(ServiceRecord(**record, process=ProcessMark(**process) if process else None))
    return FabricState(supervisor=ProcessMark(**document.pop("supervisor")), services=tuple(services), **document)

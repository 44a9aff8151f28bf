"""Settings of the gateway. Owns their checks; reading them from flags, environment and YAML is the chassis's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from treadle.chassis.settings import ServerSettings, WrongSetting, is_loopback, split_address

STOP_STRINGS_MAX = 16  # as far as a worker goes
METRICS_ON_LISTEN = "127.0.0.1:0"  # what every service has by default


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """OpenAI-compatible door to an inference worker."""

    listen: str = "127.0.0.1:8000"
    """Address of the HTTP server, host:port; port 0 takes a free one. Beyond loopback an api_key_file is needed."""
    metrics_listen: str = METRICS_ON_LISTEN
    """Leave as it is: /metrics is served on `listen`."""
    calls_max: int = 256
    """Most generations in progress at once; more are refused with 503."""
    drain_seconds: float = 30.0
    """Longest time for generations in progress to end after SIGTERM."""
    worker: str = "127.0.0.1:7404"
    """Address of the worker, host:port or unix:path."""
    api_key_file: Path | None = None
    """Keys, one a line, that open /v1/*; `KEY engram=NAME` names the memory of its requests that choose none. None: everybody."""
    worker_key_file: Path | None = None
    """File with keys, one a line; the first is shown to the worker."""
    worker_tls_root_file: Path | None = None
    """PEM roots that vouch for the worker; none: plain text."""
    worker_poll_seconds: float = 2.0
    """Time between two looks at the worker's status."""
    model: str | None = None
    """Name under which the model is served; none: the worker's name for it."""
    tokenizer_dir: Path | None = None
    """Folder with tokenizer.json and chat template; none: the worker's model folder. The digest must be the worker's."""
    request_timeout_seconds: float = 600.0
    """Longest time for a whole request; the worker gets what is left of it."""
    body_bytes_max: int = 4 << 20
    """Most bytes of a request's body; more are refused with 413."""
    body_seconds_max: float = 30.0
    """Longest time for a body to arrive."""
    messages_max: int = 2048
    """Most messages of one chat."""
    stop_strings_max: int = STOP_STRINGS_MAX
    """Most stop strings of one request, up to 16."""
    connections_max: int = 2048
    """Most open connections."""
    keep_alive_seconds: float = 15.0
    """Time between comments in a stream; the first opens it, so that a long prefill does not look like a dead connection."""
    idle_seconds: float = 75.0
    """How long a connection may take to send the head of a request, and how long it stays open without one; whole seconds."""
    encoder_threads: int = 2
    """Threads that render templates and tokenize."""

    def __post_init__(self) -> None:
        if not is_loopback(split_address(self.listen)[0]) and self.api_key_file is None:
            raise WrongSetting(f"listen: {self.listen} is beyond loopback; give api_key_file, or listen on 127.0.0.1")
        ServerSettings.__post_init__(self)
        if self.metrics_listen != METRICS_ON_LISTEN:
            raise WrongSetting("metrics_listen: the gateway serves /metrics on listen")
        if ":" not in self.worker:
            raise WrongSetting(f"worker: an address is host:port or unix:path, got {self.worker!r}")
        if not 1 <= self.stop_strings_max <= STOP_STRINGS_MAX:
            raise WrongSetting(f"stop_strings_max: 1 to {STOP_STRINGS_MAX}, got {self.stop_strings_max}")
        for name in (
            "worker_poll_seconds", "request_timeout_seconds", "body_bytes_max", "body_seconds_max", "messages_max",
            "connections_max", "keep_alive_seconds", "idle_seconds", "encoder_threads",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < 1e9:
                raise WrongSetting(f"{name}: above 0 and below 1e9, got {getattr(self, name)}")

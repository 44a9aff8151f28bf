"""Settings of the gateway. Owns their checks; reading them from flags, environment and YAML is the chassis's."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from inference_gateway.domain.fleet import MEMBERS_MAX
from inference_gateway.domain.routing import Routing
from treadle.chassis.settings import ServerSettings, WrongSetting, is_loopback, split_address

STOP_STRINGS_MAX = 16  # as far as a worker goes
WORKER = "127.0.0.1:7404"  # where nothing is said
REDIS_URL_VARIABLE = "TREADLE_REDIS_URL"
METRICS_ON_LISTEN = "127.0.0.1:0"  # what every service has by default


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """OpenAI-compatible door to an inference worker."""

    listen: str = "127.0.0.1:8000"
    """Address of the HTTP server, host:port; port 0 takes a free one. Beyond loopback an api_key_file is needed."""
    metrics_listen: str = METRICS_ON_LISTEN
    """Leave as it is: /metrics is served on `listen`."""
    metrics_public: bool = False
    """Beyond loopback: show /metrics, and the workers in /ready, to callers without a key."""
    grpc_listen: str = ""
    """Address of GatewayService (gRPC), host:port; 7405 is its usual port, 0 takes a free one; none: it is not served."""
    calls_max: int = 256
    """Most generations in progress at once; more are refused with 503."""
    drain_seconds: float = 30.0
    """Longest time for generations in progress to end after SIGTERM."""
    drain_grace_seconds: float = 1.0
    """So long of that the gateway says that it is not ready and still takes what comes late; 0: it takes nothing more."""
    worker: str = ""
    """Addresses of the workers, host:port or unix:path, with a comma between; NAME=ADDRESS gives one a name.
    Empty: those that register themselves, where there is a redis_url, else 127.0.0.1:7404."""
    redis_url: str = ""
    """redis://HOST:PORT/0 where workers register themselves; empty: what TREADLE_REDIS_URL says, unless `worker` lists them."""
    api_key_file: Path | None = None
    """Keys or their digests, one a line, with options, that open /v1/*; read again when it changes. None: everybody may call."""
    worker_key_file: Path | None = None
    """File with keys, one a line; the first is shown to the worker."""
    worker_tls_root_file: Path | None = None
    """PEM roots that vouch for the worker; none: plain text."""
    worker_tls_cert_file: Path | None = None
    """PEM certificate chain that is shown to workers and pools; with worker_tls_key_file. None: tls_cert_file."""
    worker_tls_key_file: Path | None = None
    """PEM private key of worker_tls_cert_file."""
    engram_pool: str = ""
    """Engram pools that are told of every prompt as soon as it is token ids, host:port by commas: rows on disks come nearer. None: nobody.
    Their state stands in /v1/treadle/status and on the page."""
    engram_pool_key_file: Path | None = None
    """File with keys, one a line; the first is shown to these pools."""
    engram_pool_tls_root_file: Path | None = None
    """PEM roots that vouch for these pools; none: plain text."""
    worker_poll_seconds: float = 2.0
    """Time between two looks at the worker's status."""
    routing: Routing = Routing.PREFIX
    """Whom to ask first: least-loaded, prefix (who has most of the prompt in its prefix cache, against its load) or session."""
    routing_load_tokens: int = 256
    """prefix: a request that runs or waits at a worker weighs as much as so many tokens of a prompt that are not cached there."""
    routing_imbalance_max: int = 8
    """prefix, session: a worker with so many requests more than the least loaded one is not preferred."""
    index_blocks_max: int = 1 << 18
    """prefix: most cached blocks that are indexed, of all workers together; about 260 bytes each."""
    model: str | None = None
    """Name under which the model is served; none: the worker's name for it."""
    tokenizer_dir: Path | None = None
    """Folder with tokenizer.json and chat template; none: the worker's model folder. The digest must be the worker's."""
    request_timeout_seconds: float = 600.0
    """Longest time for a whole request; the worker gets what is left of it."""
    worker_first_piece_seconds_max: float = 60.0
    """Longest silence of a worker before its answer; then another one is asked."""
    worker_idle_seconds_max: float = 30.0
    """Longest silence of a worker in the middle of its answer; then it ends with an error."""
    attempts_max: int = 3
    """Most workers asked for one generation, or for vectors, one after the other, while nothing has been answered."""
    hedge_seconds: float = 0.0
    """Without a first piece for so long a second worker is asked beside the first, for 5 % of the requests at most; 0: never."""
    queue_wait_seconds_max: float = 1.0
    """Longest wait for a place at a worker; who would wait longer is refused at once with 503."""
    queue_max: int = 256
    """Most requests that wait for a place."""
    queue_headroom: int = 1
    """Requests given to each worker beyond its batch, so that its next one is there when a place is free."""
    body_bytes_max: int = 4 << 20
    """Most bytes of a request's body; more are refused with 413."""
    headers_max: int = 100
    """Most header lines of a request; more are refused with 431."""
    header_bytes_max: int = 16384
    """Most bytes of its target and headers; more are refused with 431."""
    body_seconds_max: float = 30.0
    """Longest time for a body to arrive."""
    messages_max: int = 2048
    """Most messages of one chat."""
    stop_strings_max: int = STOP_STRINGS_MAX
    """Most stop strings of one request, up to 16."""
    choices_max: int = 8
    """Most answers to one prompt (`n`)."""
    prompts_max: int = 16
    """Most prompts of one completion request."""
    connections_max: int = 2048
    """Most open connections."""
    keep_alive_seconds: float = 15.0
    """Time between comments in a stream; the first opens it, so that a long prefill does not look like a dead connection."""
    idle_seconds: float = 75.0
    """How long a connection may take to send the head of a request, how long it stays open without one, and within what time its
    client takes 16 KiB of an answer that waits for it; whole seconds."""
    encoder_threads: int = 2
    """Threads that render templates and tokenize."""

    @property
    def engram_pools(self) -> tuple[str, ...]:
        """`engram_pool`, one by one."""
        return tuple(address.strip() for address in self.engram_pool.split(",") if address.strip())

    def __post_init__(self) -> None:
        if not is_loopback(split_address(self.listen)[0]) and self.api_key_file is None:
            raise WrongSetting(f"listen: {self.listen} is beyond loopback; give api_key_file, or listen on 127.0.0.1")
        ServerSettings.__post_init__(self)
        if self.metrics_listen != METRICS_ON_LISTEN:
            raise WrongSetting("metrics_listen: the gateway serves /metrics on listen")
        if self.grpc_listen:
            self.check_callers("grpc_listen", self.grpc_listen, by_certificate=False)
        if self.worker and self.redis_url:
            raise WrongSetting("worker, redis_url: give one, a list or a directory")
        _ = self.workers
        if (self.worker_tls_cert_file is None) != (self.worker_tls_key_file is None):
            raise WrongSetting("worker_tls_cert_file and worker_tls_key_file go together")
        if self.worker_tls_cert_file is not None and self.worker_tls_root_file is None:
            raise WrongSetting(
                "worker_tls_cert_file is shown in TLS: give worker_tls_root_file, the roots that vouch for the worker"
            )
        for name in ("routing_load_tokens", "routing_imbalance_max", "index_blocks_max"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise WrongSetting(f"{name}: 0 to {(1 << 31) - 1}, got {getattr(self, name)}")
        if not all(":" in address for address in self.engram_pools):
            raise WrongSetting(f"engram_pool: host:port or unix:path, separated by commas; got {self.engram_pool!r}")
        if not 1 <= self.stop_strings_max <= STOP_STRINGS_MAX:
            raise WrongSetting(f"stop_strings_max: 1 to {STOP_STRINGS_MAX}, got {self.stop_strings_max}")
        for name in (
            "worker_poll_seconds", "request_timeout_seconds", "body_bytes_max", "body_seconds_max", "messages_max", "choices_max", "prompts_max",
            "connections_max", "keep_alive_seconds", "idle_seconds", "encoder_threads", "headers_max", "header_bytes_max",
            "worker_first_piece_seconds_max", "worker_idle_seconds_max", "attempts_max", "queue_wait_seconds_max",
        ):  # fmt: skip
            if not 0 < getattr(self, name) < 1e9:
                raise WrongSetting(f"{name}: above 0 and below 1e9, got {getattr(self, name)}")
        for name in ("drain_grace_seconds", "hedge_seconds", "queue_max", "queue_headroom"):
            if not 0 <= getattr(self, name) < 1e9:
                raise WrongSetting(f"{name}: 0 or more and below 1e9, got {getattr(self, name)}")

    @property
    def looks_open(self) -> bool:
        """Whether whoever reaches the gateway may see the names of workers and tenants."""
        return self.metrics_public or is_loopback(split_address(self.listen)[0])

    @property
    def workers(self) -> dict[str, str]:
        """The workers' addresses by name, in their order. None: those of the directory.

        Raises WrongSetting for what is no address, and a name that comes twice.
        """
        found: dict[str, str] = {}
        if not self.worker and self.directory_url:
            return found
        for entry in (self.worker or WORKER).split(","):
            name, given, address = entry.strip().rpartition("=")
            if ":" not in address or (given and not name):
                raise WrongSetting(f"worker: an address is host:port or unix:path, got {entry.strip()!r}")
            name = name or address
            if name in found:
                raise WrongSetting(f"worker: {name!r} comes twice")
            found[name] = address
        if len(found) > MEMBERS_MAX:
            raise WrongSetting(f"worker: up to {MEMBERS_MAX} of them, got {len(found)}")
        return found

    @property
    def directory_url(self) -> str:
        """Of the Redis where workers register themselves; "": `worker` lists them."""
        return "" if self.worker else self.redis_url or os.environ.get(REDIS_URL_VARIABLE, "")

"""Settings of the worker: flags, TREADLE_WORKER_* and YAML keys. Torch is not imported to read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference_worker.domain.fusion_mode import FusionMode
from inference_worker.domain.limits import Limits
from treadle.chassis.settings import ServerSettings, WrongSetting
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import Late, WaitPolicy


class EngramTransport(StrEnum):
    """How Engram rows come: the words of TransportChoice, and off."""

    AUTO = "auto"
    MAPPED = "mapped"
    LOCAL = "local"
    RING = "ring"
    SOCKET = "socket"
    RPC = "rpc"
    MOONCAKE = "mooncake"
    OFF = "off"


class Precision(StrEnum):
    """Number format of weights and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Settings(ServerSettings):
    """Runs one language model behind treadle's WorkerService."""

    listen: str = "127.0.0.1:7404"
    """Address to listen on, host:port; port 0 takes a free one."""
    metrics_listen: str = "127.0.0.1:7414"
    """Address of /metrics, host:port; port 0 takes a free one."""
    model: str = "smollm2-135m"
    """A model that `treadle model fetch` knows, or the path of a Llama, Qwen2 or Qwen3 model folder."""
    served_model_name: str = ""
    """Name under which the model is served; empty: the name or the folder's name."""
    dtype: Precision = Precision.FLOAT32
    """float32 or bfloat16."""
    threads: int = 1
    """Compute threads of torch."""
    sequences_max: int = 16
    """Most requests in the batch at once."""
    step_tokens_max: int = 256
    """Most tokens of one step: decoding and prefill chunks together."""
    requests_waiting_max: int = 64
    """Most requests waiting for a place in the batch; more are refused."""
    context_tokens_max: int = 2048
    """Most tokens of prompt and answer together; the model's own limit applies where it is lower."""
    kv_tokens_max: int = 65536
    """Most tokens of KV that running requests reserve together."""
    prefix_cache_bytes_max: int = 512 << 20
    """Bytes of KV kept for later requests with the same beginning; 0: none."""
    engram_pool: str = "127.0.0.1:7401"
    """Address of the Engram pool whose memories requests may choose; empty: none."""
    engram_model: str = ""
    """Name of the default memory, of requests that choose none; empty or none: no default."""
    engram_version: str = ""
    """Its version, 64 hexadecimal digits, for ever; empty: the current one, followed when it changes."""
    engram_memories_max: int = 32
    """Most memory versions open at once; beyond it the least recently used without requests is closed."""
    engram_transport: EngramTransport = EngramTransport.AUTO
    """auto (mapped, else ring, socket, rpc), mapped, local, ring, socket, mooncake, rpc; off: no memories at all."""
    engram_fusion: FusionMode = FusionMode.AUTO
    """on: rows are added to the hidden state; shadow: all computed, nothing added; auto: on for memories with fusion weights."""
    engram_fusion_weights: Path | None = None
    """File of the default memory's fusion weights, instead of those that the pool keeps."""
    engram_prefetch: bool = True
    """Look up all layers at the start of a step; false: each at its layer."""
    engram_wait_seconds_max: float = 1.0
    """Longest wait for rows at one layer: of requests that name none, and the ceiling for those that name more."""
    engram_late: Late = Late.MASK
    """After that: mask (go on without, degraded) or fail, for requests that do not say."""
    engram_open_seconds_max: float = 60.0
    """How long to try to reach the pool and find the default memory at the start, and how long a request waits for an opening."""
    engram_key_file: Path | None = None
    """File whose first line that is no comment is the key shown to the pool."""
    engram_tls_root_file: Path | None = None
    """PEM roots that vouch for the pool; without it the pool is called in plain text."""

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.threads < 1:
            raise WrongSetting(f"threads: at least 1, got {self.threads}")
        if not self.model:
            raise WrongSetting("model: a name or a folder, got nothing")
        if self.engram_memories_max < 1:
            raise WrongSetting(f"engram_memories_max: at least 1, got {self.engram_memories_max}")
        if self.has_default_memory and not self.engram_pool:
            raise WrongSetting(f"engram_model: {self.engram_model!r} needs an engram_pool")
        if self.engram_fusion_weights is not None and not self.has_default_memory:
            raise WrongSetting("engram_fusion_weights: they are the default memory's; name it with engram_model")
        if self.engram_open_seconds_max < 0:
            raise WrongSetting(f"engram_open_seconds_max: 0 or more, got {self.engram_open_seconds_max}")
        try:
            _ = self.limits, self.policy
        except InvalidArgument as error:
            raise WrongSetting(str(error)) from error

    @property
    def limits(self) -> Limits:
        """The engine's limits."""
        return Limits(
            sequences_max=self.sequences_max, step_tokens_max=self.step_tokens_max, requests_waiting_max=self.requests_waiting_max,
            context_tokens_max=self.context_tokens_max, kv_tokens_max=self.kv_tokens_max,
            prefix_cache_bytes_max=self.prefix_cache_bytes_max,
        )  # fmt: skip

    @property
    def policy(self) -> WaitPolicy:
        """What requests that say nothing want done about late memory."""
        return WaitPolicy(self.engram_wait_seconds_max, self.engram_late)

    @property
    def watches_pool(self) -> bool:
        """True if requests may choose memories of a pool."""
        return bool(self.engram_pool) and self.engram_transport is not EngramTransport.OFF

    @property
    def has_default_memory(self) -> bool:
        """True if a memory is to be opened at the start, for requests that choose none."""
        return self.engram_model not in ("", "none") and self.engram_transport is not EngramTransport.OFF

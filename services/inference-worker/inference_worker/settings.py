"""Settings of the worker: flags, TREADLE_WORKER_* and YAML keys. Torch is not imported to read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference_worker.domain.limits import Limits
from treadle.chassis.settings import ServerSettings, WrongSetting
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import Late, WaitPolicy


class EngramFusionMode(StrEnum):
    """What happens to Engram rows once they are gated and projected."""

    SHADOW = "shadow"  # all computed, nothing added to the hidden state
    ON = "on"


class EngramTransport(StrEnum):
    """How Engram rows come; `auto` maps them if the pool is on this host, else rpc."""

    AUTO = "auto"
    MAPPED = "mapped"
    LOCAL = "local"
    RPC = "rpc"
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
    engram_model: str = "smollm2-demo"
    """Name of the Engram model in the pool; empty or none: no Engram."""
    engram_version: str = ""
    """Its version, 64 hexadecimal digits; empty: the current one at the start."""
    engram_pool: str = "127.0.0.1:7401"
    """Address of the Engram pool."""
    engram_transport: EngramTransport = EngramTransport.AUTO
    """auto, mapped, local, rpc or off."""
    engram_fusion: EngramFusionMode = EngramFusionMode.SHADOW
    """shadow: all computed, nothing added to the hidden state; on: added."""
    engram_fusion_weights: Path | None = None
    """File of the fusion's weights, where the Engram model names their digest; else they are made from a seed."""
    engram_prefetch: bool = True
    """Look up all layers at the start of a step; false: each at its layer."""
    engram_wait_seconds_max: float = 1.0
    """Longest wait for rows at one layer: of requests that name none, and the ceiling for those that name more."""
    engram_late: Late = Late.MASK
    """After that: mask (go on without, degraded) or fail, for requests that do not say."""
    engram_open_seconds_max: float = 60.0
    """How long to try to reach the pool and find the model in it at the start."""
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
    def wants_engram(self) -> bool:
        """True if an Engram memory is to be opened."""
        return self.engram_model not in ("", "none") and self.engram_transport is not EngramTransport.OFF

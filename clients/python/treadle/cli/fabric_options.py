"""What a fabric is to be: one frozen record, checked when it is made, that travels to the background process as JSON.

Owns names, defaults and the checks that need nothing but the options themselves. Does not look at files, ports or models (fabric).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum

from treadle.cli.supervisor import READY_SECONDS
from treadle.cli.worker_engine import WorkerEngine
from treadle.contract.errors import InvalidArgument
from treadle.contract.policy import TransportChoice

DEFAULT_MODEL = "smollm2-135m"
SPEED_TABLE = "smollm2-demo"  # name of the random table of the speed profile
NO_MEMORY = "none"
GATEWAY_PORT = 8000
PORT_BASE = 7400
WORKERS_MAX = 16  # on one machine: each loads the model


class EngramFusion(StrEnum):
    """What becomes of the rows; shadow: all is computed, nothing is added to the hidden state; auto: on for trained weights."""

    AUTO = "auto"
    ON = "on"
    SHADOW = "shadow"


class EngramTable(StrEnum):
    """What the pool holds from the start, besides the folders that are named.

    shipped: the grown memory that comes with the package; requests choose it
    speed:   a random table of the size that papers measure with, looked up for every request and shadowed: for speed figures
    none:    nothing
    """

    SHIPPED = "shipped"
    SPEED = "speed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """What to bring up. `port_base` 0: free ports.

    model:          a folder, or a name that `treadle model fetch` knows
    served_as:      name under which clients ask for it; "": the name that was given, or for a folder what the worker makes of it
    engram:         False: no pool, and nothing of what follows
    asm:            False: no store of dictionaries
    asm_dir:        where the store keeps them, absolute; "": in the fabric's home
    memories:       folders of grown memories to load, absolute
    engram_default: memory of requests that choose none; "": none, but the table itself with the speed profile
    engine:         of the workers
    workers:        how many there are; they share the pool's tables, and the gateway routes among them
    worker_command: what starts the worker, in the shell's words; "": as the engine needs it
    """

    model: str = DEFAULT_MODEL
    served_as: str = ""
    engram: bool = True
    engram_table: EngramTable = EngramTable.SHIPPED
    memories: tuple[str, ...] = ()
    engram_default: str = ""
    engram_transport: TransportChoice = TransportChoice.AUTO
    engram_fusion: EngramFusion = EngramFusion.AUTO
    host: str = "127.0.0.1"
    gateway_port: int = GATEWAY_PORT
    port_base: int = PORT_BASE
    api_key_file: str = ""
    ready_seconds: float = READY_SECONDS
    engine: WorkerEngine = WorkerEngine.EMBEDDED
    worker_command: str = ""
    workers: int = 1
    asm: bool = True
    asm_dir: str = ""

    def __post_init__(self) -> None:
        if not 0 <= self.gateway_port <= 65535 or not 0 <= self.port_base <= 65535 - 14:
            raise InvalidArgument("ports lie between 0 (a free one) and 65535")
        if not self.api_key_file and not is_loopback(self.host):
            raise InvalidArgument(f"--host {self.host} lets other machines in: give --api-key-file too")
        if not 1 <= self.workers <= WORKERS_MAX:
            raise InvalidArgument(f"--workers: 1 to {WORKERS_MAX}, got {self.workers}")
        if self.ready_seconds <= 0:
            raise InvalidArgument("--timeout is a positive number of seconds")
        if not self.asm and self.asm_dir:
            raise InvalidArgument("--no-asm starts no store: leave --asm-dir out")
        if not self.engram and (self.memories or self.engram_default not in ("", NO_MEMORY)):
            raise InvalidArgument("--no-engram starts no pool: leave --memory and --engram-default out")

    @property
    def default_memory(self) -> str:
        """Memory of requests that choose none; "": none."""
        if self.engram_default:
            return "" if self.engram_default == NO_MEMORY else self.engram_default
        return SPEED_TABLE if self.engram and self.engram_table is EngramTable.SPEED else ""

    def to_json(self) -> str:
        """As one line for another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> FabricOptions:
        """The options that `to_json` wrote."""
        fields = json.loads(text)
        kinds = {
            "engram_table": EngramTable,
            "engram_transport": TransportChoice,
            "engram_fusion": EngramFusion,
            "engine": WorkerEngine,
        }
        for name, kind in kinds.items():
            fields[name] = kind(fields[name])
        return cls(**fields | {"memories": tuple(fields["memories"])})


def is_loopback(host: str) -> bool:
    """True for names and numbers of this machine alone."""
    return host in ("localhost", "::1", "[::1]") or host.startswith("127.")

"""One client that attaches to a pool, in a process of its own: what it takes, how long, and how much memory it adds.

    python -m treadle_bench.attach_client ADDRESS MODEL

Prints one JSON line when attached and one when warm, then keeps its mapping until standard input ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from treadle.client import Endpoint
from treadle.client.engram import EngramHandle, EngramPool
from treadle.contract.warm_state import WarmState

WARM_SECONDS_MAX = 120.0
LOOK_SECONDS = 0.002


def main() -> None:
    """Attach, gather, warm up, stay."""
    address, name = sys.argv[1:3]
    with EngramPool(Endpoint(address)) as pool:
        resident = next(model for model in pool.list_models() if model.model.name == name)  # connected, modules imported
        before = added_to_host()
        begun = time.perf_counter()
        handle = pool.open(name, resident.version, transport="mapped")
        opened = time.perf_counter()
        _gather(handle)
        gathered = time.perf_counter()
        _say({"open_seconds": opened - begun, "first_gather_seconds": gathered - opened, "added_bytes": _since(before)})
        while handle.warm_state is WarmState.WARMING:
            if time.perf_counter() - opened > WARM_SECONDS_MAX:
                break
            time.sleep(LOOK_SECONDS)
        warm = time.perf_counter() - opened
        _gather(handle)
        _say({"warm_seconds": warm, "warm_state": handle.warm_state.value, "added_bytes": _since(before), "pss_bytes": pss_bytes()})
        sys.stdin.read()
        handle.close()


def added_to_host() -> dict[str, int]:
    """Bytes that exist because of this process alone: its anonymous memory, and its page tables (VmPTE).

    Pages of the table are not among them: they are the pool's, one copy for the host, whoever maps them.
    """
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines())
    return {name: int(fields[field].split()[0]) << 10 for name, field in (("anonymous", "RssAnon"), ("page_tables", "VmPTE"))}


def pss_bytes() -> int:
    """This process's share of all that it maps, tables included: the kernel divides each page by the processes that map it."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def _since(before: Mapping[str, int]) -> dict[str, int]:
    return {name: value - before[name] for name, value in added_to_host().items()}


def _gather(handle: EngramHandle) -> None:
    """One token's rows of each layer, spread over its table."""
    for layer in handle.layers:
        rows = np.linspace(0, handle.model.rows_hashed(layer) - 1, handle.model.columns, dtype=np.int64)
        handle.gather(layer, rows.reshape(1, -1))


def _say(figures: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(figures) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()

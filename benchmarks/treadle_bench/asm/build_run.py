"""One build in a process of its own, so that its memory and time are its own: `python -m treadle_bench.asm.build_run` < order.json.

Owns the measurement. Reads {"model", "prefix", "traces", "out", "settings", "base"} and prints one line of JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

from treadle.chassis.threads import set_compute_threads

MIB = 1 << 20


def main() -> int:
    """Build, and say what it took."""
    set_compute_threads(1)
    from asm_store.building.build import Build, Order
    from asm_store.building.recipe import Recipe
    from treadle.nn.model import CausalLM
    from treadle_bench.asm.options import settings_of

    asked = json.load(sys.stdin)
    model = CausalLM.load(Path(asked["model"]))
    marks: dict[str, float] = {}

    def watch(what: str, done: int, of: int) -> None:
        marks.setdefault(what, time.process_time())

    recipe = Recipe("bench", settings_of(asked["settings"]), held_out_every=0)
    order = Order(
        recipe, Path(asked["model"]), "bench", tuple(asked["prefix"]), tuple(tuple(trace) for trace in asked["traces"]), Path(asked["out"]),
        base=Path(asked["base"]) if asked["base"] else None,
    )  # fmt: skip
    before, begun = _resident_mib(), time.process_time()
    dictionary, _ = Build(order, watch, model=model).run()
    ended = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    told = {
        "cpu_seconds": ended - begun,
        "prefix_cpu_seconds": marks["collecting states"] - marks["reading the prefix"],
        "collect_cpu_seconds": marks["clustering layers"] - marks["collecting states"],
        "cluster_cpu_seconds": marks["writing"] - marks["clustering layers"],
        "resident_before_mib": before, "peak_mib": peak, "bytes": dictionary.nbytes,
        "prefix_kv_mib": len(asked["prefix"]) * model.config.kv_values_per_token * 4 / MIB,
    }  # fmt: skip
    print(json.dumps(told))
    return 0


def _resident_mib() -> float:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024


if __name__ == "__main__":
    sys.exit(main())

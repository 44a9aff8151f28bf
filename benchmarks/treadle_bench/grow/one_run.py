"""One run in one process and one thread: `python -m treadle_bench.grow.one_run RUN --work DIR --texts DIR --model DIR [--quick]
[--stop-at TOKENS]`.

Owns nothing but the choice of what a run's kind means.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from treadle.chassis.threads import set_compute_threads
from treadle.contract.errors import TreadleError
from treadle_bench.grow.runs import Kind, Run

FAILED = 1


def main() -> int:
    """Do one run; what it found lies in the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Run.parse)
    for name in ("work", "texts", "model"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--stop-at", type=int, default=0)
    arguments = parser.parse_args()
    run = replace(arguments.run, stop_at=arguments.stop_at)
    try:
        do(run, arguments.work, arguments.texts, arguments.model, quick=arguments.quick)
    except TreadleError as error:
        print(f"{arguments.run.key}: {error}", file=sys.stderr)
        return FAILED
    return 0


def do(run: Run, work: Path, texts: Path, model: Path, *, quick: bool) -> None:
    """Make a run's records. model: folder of the language model. Raises what growing, measuring and the rivals raise."""
    import torch

    from treadle.nn.frozen import FrozenLM
    from treadle_bench.grow import lora_run, measuring, memory_run, ngram_run
    from treadle_bench.grow.material import load_material, overlaps_of
    from treadle_bench.grow.other_texts import load_domain
    from treadle_bench.grow.store import Store

    torch.set_num_threads(1)
    store, material = Store(work), load_material(run.domain, texts, model)
    sample = measuring.QUICK if quick else None
    if run.kind is Kind.FROZEN:
        overlaps = overlaps_of(load_domain(run.domain, texts), model / "tokenizer.json")
        if not measuring.note_overlaps(store, material, overlaps):
            measuring.measure_frozen(run, material, FrozenLM.load(model), store, sample or measuring.WHOLE, overlaps)
    elif run.kind is Kind.NGRAM:
        ngram_run.measure_ngrams(run, material, model, store)
    elif run.kind is Kind.LORA:
        lora_run.measure_lora(run, material, model, store, sample)
    else:
        memory_run.measure_memory(run, material, FrozenLM.load(model), model, store, sample)


if __name__ == "__main__":
    set_compute_threads(1)
    sys.exit(main())

"""`treadle bench memories`: one batch in which every request uses a memory of its own, against one in which all use the same.

All variants share one language model, one worker's catalogue and one pool process, and take turns step by step: a decoding step
of each, in an order drawn anew, so that a busy machine is busy for all. Memories have the size of grown ones (4-bit rows, bf16
projections) and random content; their rows are fused, not shadowed. And what adding one costs, in the pool and in the worker.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from engram_pool.growing import folder as grown_folder
from engram_pool.growing.memory import Layer, Memory, template_of
from engram_pool.growing.recipe import Recipe
from inference_worker.adapters.engram_pool import PoolOfMemories
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.report import StepReport
from inference_worker.domain.request import Request, Sampling
from inference_worker.domain.resident_versions import Choice
from treadle.client import Endpoint
from treadle.client.engram import EngramPool, StepPrefetcher
from treadle.contract.policy import WaitPolicy
from treadle.nn import model_fetch
from treadle.nn.model import CausalLM
from treadle.nn.token_map import compressed_token_map
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Goal, Row, interleave, progress, rows_of

MEMORIES = 16  # and requests in the batch
ONE, MANY, HALF, NONE = "one memory", f"{MEMORIES} memories", f"{MEMORIES // 2} memories and none", "no memory"
VARIANTS = (ONE, MANY, HALF, NONE)
PRECISION = "int4"  # what `treadle engram grow` writes unless told otherwise
PROMPT_TOKENS = 16  # of a prefill step's requests: 16 of them fill a step of STEP_TOKENS
STEP_TOKENS = 256
WARM_STEPS = 4
DECODE_STEPS, DECODE_STEPS_QUICK = 160, 24
PREFILL_STEPS, PREFILL_STEPS_QUICK = 24, 4
ROW_RMS = 0.05  # of fp32 rows before they are rounded to PRECISION
VALUE_RMS = 0.1  # of what a memory adds to the hidden state, about
RATIO_MIN = 0.95  # tokens a second with many memories, of those with one
POOL_BYTES_MAX = 1.1  # of the pool for one more memory, of its rows and fusion weights
WORKER_BYTES_MAX = 1.0  # private bytes of the worker for one more memory, of the memory's own: it copies no rows, and no model
OPEN_SECONDS_MAX = 60.0
WAIT = WaitPolicy(10.0)  # rows are never given up: a degraded step would be a faster one


@dataclass(frozen=True, slots=True)
class Added:
    """What one more memory cost, and what it is, in bytes.

    pool:   shared memory of the host
    worker: its private memory
    rows, fusion: as the manifest counts them, and as the file of weights has them
    """

    pool: int
    worker: int
    rows: int
    fusion: int


def measure(*, quick: bool, transport: str, model_dir: Path | None) -> tuple[list[Row], list[Goal]]:
    """Tokens a second of both phases for each variant, and what adding a memory costs. Needs 1.5 GB of memory."""
    shape = {"batch": MEMORIES, "transport": transport}
    with _worker(model_dir or model_fetch.fetch("smollm2-135m"), transport) as (engines, catalogue, added):
        prefill = _prefill(engines, catalogue, PREFILL_STEPS_QUICK if quick else PREFILL_STEPS)
        decode = _decode(engines, catalogue, DECODE_STEPS_QUICK if quick else DECODE_STEPS)
    rows = [
        *rows_of(prefill, {"phase": "prefill", **shape}, "tok/s", ONE),
        *rows_of(decode, {"phase": "decode", **shape}, "tok/s", ONE),
    ]
    goals = [
        Goal(f"{row.params['phase']}: tokens/s with {MANY}, of those with one", row.ratio, RATIO_MIN, at_least=True)
        for row in rows
        if row.name == MANY and row.ratio is not None
    ]
    return rows + _byte_rows(added), goals + _byte_goals(added)


def _prefill(engines: dict[str, Engine], catalogue: Catalogue, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of steps that compute the prompts of a whole batch."""

    def step(name: str, number: int) -> float:
        answers = _ask(engines[name], catalogue, name, seed=number, new_tokens=1)
        reports = run_until_done(engines[name], answers)
        _check(answers)
        return _rate(reports)

    for name in engines:
        step(name, -1)  # warm: buffers, learnt deadlines
    return interleave({name: partial(step, name) for name in engines}, rounds, what="prefill")


def _decode(engines: dict[str, Engine], catalogue: Catalogue, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of steps that compute one token of each request; the batches of all variants grow side by side."""
    answers = {name: _ask(engine, catalogue, name, seed=7, new_tokens=rounds + WARM_STEPS + 2) for name, engine in engines.items()}
    for engine in engines.values():
        for _ in range(WARM_STEPS):
            engine.step()

    def step(name: str, _round: int) -> float:
        report = engines[name].step()
        assert report is not None, "every request has more tokens to come than there are steps"
        assert report.decode_tokens == MEMORIES, f"{report.decode_tokens} tokens decoded in a step of {MEMORIES} requests"
        return _rate([report])

    samples = interleave({name: partial(step, name) for name in engines}, rounds, what="decode")
    for name, engine in engines.items():
        run_until_done(engine, answers[name])
        _check(answers[name])
    return samples


def _ask(engine: Engine, catalogue: Catalogue, variant: str, *, seed: int, new_tokens: int) -> list[Answer]:
    """Submit a batch of requests of made-up prompts, with the memories of the variant; the same prompts for all variants."""
    chance, answers = np.random.default_rng(seed + 1), []
    for place in range(MEMORIES):
        prompt = tuple(int(token) for token in chance.integers(100, 40_000, size=PROMPT_TOKENS))
        sampling = Sampling(max_tokens=new_tokens, ignore_eos=True)
        answers.append(Answer())
        engine.submit(Request(prompt=prompt, sampling=sampling, policy=WAIT), answers[-1], _lease(catalogue, variant, place))
    return answers


def _lease(catalogue: Catalogue, variant: str, place: int) -> Lease[EngramMemory]:
    if variant == NONE or (variant == HALF and place % 2):
        return Lease()
    return catalogue.take(Choice(_name(0 if variant == ONE else place))).result(OPEN_SECONDS_MAX)


def _check(answers: Sequence[Answer]) -> None:
    """A step that lost rows, or failed, is no figure."""
    for answer in answers:
        if answer.error is not None:
            raise answer.error
        if answer.piece.degraded:
            raise RuntimeError("rows were missing; is the pool still there?")


def _rate(reports: Sequence[StepReport]) -> float:
    return sum(report.prefill_tokens + report.decode_tokens for report in reports) / sum(report.seconds for report in reports)


# -- memories, and who holds them --------------------------------------------------------------------------------------------


@contextmanager
def _worker(folder: Path, transport: str) -> Iterator[tuple[dict[str, Engine], Catalogue, list[Added]]]:
    """A pool with MEMORIES memories, a worker's catalogue with all of them open, an engine a variant, and what each memory cost."""
    vocabulary, model = read_vocabulary(folder / "tokenizer.json"), CausalLM.load(folder, torch.float32)
    limits = Limits(sequences_max=MEMORIES, step_tokens_max=STEP_TOKENS, prefix_cache_bytes_max=0)
    with ExitStack() as stack:
        endpoint = Endpoint(stack.enter_context(pool_process()).address)
        pool = stack.enter_context(EngramPool(endpoint))
        loaded = _load(pool, folder / "tokenizer.json", model.config.hidden)
        opener = Opener(model.config, folder / "tokenizer.json")
        catalogue = Catalogue(PoolOfMemories(endpoint, transport), opener, open_max=MEMORIES)
        stack.callback(catalogue.close)
        catalogue.update(pool.list_models())
        _ = opener.token_map  # made at the first opening, once for all
        added = [_open(catalogue, place, *sizes) for place, sizes in enumerate(loaded)]
        engines = {
            name: Engine(
                model, vocabulary, limits, prefetcher=StepPrefetcher(policy=WAIT), engram_wait_seconds_max=WAIT.wait_seconds_max
            )
            for name in VARIANTS
        }
        yield engines, catalogue, added


def _load(pool: EngramPool, tokenizer_json: Path, hidden: int) -> list[tuple[int, int, int]]:
    """Make the memories and load them, one after the other: (bytes in the pool, of rows, of fusion weights) of each."""
    token_map, compressed = compressed_token_map(tokenizer_json)
    sizes = []
    for place in progress(range(MEMORIES), MEMORIES, "making memories"):
        with tempfile.TemporaryDirectory(prefix="treadle-bench-memory-") as parent:
            grown = Path(parent) / _name(place)
            model = grown_folder.write(
                grown, _random_memory(_name(place), token_map, compressed, hidden, seed=place), PRECISION, {}
            )
            fusion = (grown / grown_folder.FUSION).stat().st_size
            before = pool.status().table_bytes
            pool.load_grown(grown)
            rows = sum(model.table(layer).rows * model.row.bytes for layer in model.layers)
            sizes.append((pool.status().table_bytes - before, rows, fusion))
    return sizes


def _random_memory(name: str, token_map: NDArray[np.int32], compressed: int, hidden: int, seed: int) -> Memory:
    """A memory of the default size whose rows and projections are noise of about the spread of grown ones."""
    recipe, chance = Recipe(seed=seed), torch.Generator().manual_seed(seed)
    template = template_of(name, recipe, token_map, compressed, pad_id=2)
    inputs, layers = recipe.dim * template.columns, {}
    for layer in template.layers:
        rows = torch.randn((template.rows_hashed(layer), recipe.dim), generator=chance) * ROW_RMS
        wkv = torch.randn((2, hidden, inputs), generator=chance) / (ROW_RMS * inputs**0.5)
        wkv[1] *= VALUE_RMS
        layers[layer] = Layer(rows, wkv.reshape(2 * hidden, inputs), torch.ones(hidden), torch.ones(hidden))
    return Memory(template, token_map, layers)


def _open(catalogue: Catalogue, place: int, pool_bytes: int, rows: int, fusion: int) -> Added:
    """Have the catalogue open a memory, and see by how much this process grew."""
    gc.collect()
    before = _own_bytes()
    catalogue.take(Choice(_name(place))).result(OPEN_SECONDS_MAX).release()
    return Added(pool_bytes, _own_bytes() - before, rows, fusion)


def _own_bytes() -> int:
    """Memory of this process that belongs to no file: mapped rows lie in the pool's segments, and are not among it."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def _name(place: int) -> str:
    return f"memory-{place:02}"


def _byte_rows(added: Sequence[Added]) -> list[Row]:
    measured = {
        "adding a memory, pool": [each.pool for each in added],
        "adding a memory, worker": [each.worker for each in added],
    }
    params = {"rows_MB": round(added[0].rows / 1e6, 2), "fusion_MB": round(added[0].fusion / 1e6, 2), "rows": PRECISION}
    return [
        Row(name, params, "MB", float(np.median(values)) / 1e6, float(np.percentile(values, 99)) / 1e6, len(values))
        for name, values in measured.items()
    ]


def _byte_goals(added: Sequence[Added]) -> list[Goal]:
    pool, worker = (
        float(np.median([part / (each.rows + each.fusion) for part, each in zip(parts, added, strict=True)]))
        for parts in ([each.pool for each in added], [each.worker for each in added])
    )
    return [
        Goal("adding a memory: bytes of the pool, of its rows and fusion weights", pool, POOL_BYTES_MAX),
        Goal("adding a memory: private bytes of the worker, of its rows and fusion weights", worker, WORKER_BYTES_MAX),
    ]

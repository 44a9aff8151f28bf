"""A real pool, real engines and a reference for both: the embedded engine, and the explicit forward that it stands on."""

from __future__ import annotations

import gc
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

import engram_pool
from inference_worker.adapters.engram_pool import PoolOfMemories
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.request import Request, Sampling
from treadle.client.endpoint import Endpoint
from treadle.client.engram import EngramHandle, EngramPool, StepPrefetcher
from treadle.contract.fusion_mode import FusionMode
from treadle.contract.windows import Windows
from treadle.nn import model_fetch
from treadle.nn.demo_profile import smollm2_demo_template
from treadle.nn.model import CausalLM
from treadle.vllm import MemoryConfig, engine_arguments
from treadle.vllm.outcomes import RequestOutcome, outcome_of

GRACE_SECONDS = 20.0
# Read when vLLM is imported, which the fixtures do: one process and not three, no network, its caches in a folder that goes with the run.
CACHE = tempfile.mkdtemp(prefix="treadle-vllm-cache-")
os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", OMP_NUM_THREADS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CACHE_ROOT=CACHE,
    TORCHINDUCTOR_CACHE_DIR=f"{CACHE}/inductor", VLLM_LOGGING_LEVEL="WARNING",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def _cache_folder() -> Iterator[None]:
    yield
    shutil.rmtree(CACHE, ignore_errors=True)


@dataclass(frozen=True)
class RunningPool:
    """A pool's process. current: the versions it holds, by name."""

    address: str
    process: subprocess.Popen[str]

    def client(self) -> EngramPool:
        return EngramPool(Endpoint(self.address))

    @property
    def current(self) -> dict[str, str]:
        with self.client() as pool:
            return {one.model.name: one.version for one in pool.list_models() if one.current}

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """While inside, it does nothing: no lookup that needs its process comes back."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def started_pool(folder: Path) -> Iterator[RunningPool]:
    command = [
        sys.executable, "-m", "engram_pool", "--segment-dir", str(folder), "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield RunningPool(json.loads(process.stdout.readline())["listen"], process)
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def load_kjv(pool: EngramPool, name: str = "kjv") -> None:
    """The memory that is shipped: grown from text, for SmolLM2."""
    pool.load_grown(Path(engram_pool.__path__[0]) / "shipped" / "kjv", name)


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    return model_fetch.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory, smollm_folder: Path) -> Iterator[RunningPool]:
    """With the shipped memory and the random demonstration table, whose fusion has a convolution."""
    with started_pool(tmp_path_factory.mktemp("pool") / "segments") as running:
        with running.client() as client:
            load_kjv(client)
            client.load_random(*smollm2_demo_template(smollm_folder / "tokenizer.json"))
        yield running


@pytest.fixture(scope="module")
def start_pool() -> Iterator[Callable[[Path], RunningPool]]:
    """Starts pools with the shipped memory, to be frozen or killed; ended with the module."""
    with ExitStack() as stack:

        def start(folder: Path) -> RunningPool:
            running = stack.enter_context(started_pool(folder))
            with running.client() as client:
                load_kjv(client)
            return running

        yield start


@dataclass(frozen=True)
class Said:
    """An answer: its tokens and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]
    cached: int = 0
    outcome: RequestOutcome | None = None
    finish: str | None = None
    degraded: bool = False

    def same_as(self, other: Said) -> None:
        """Raise unless the tokens are the same and no log-probability differs by more than 1e-4."""
        assert self.tokens == other.tokens
        worst = max(abs(one - two) for one, two in zip(self.logprobs, other.logprobs, strict=True))
        assert worst <= 1e-4, f"log-probabilities differ by up to {worst:.6f}"


class RunningEngine:
    """vLLM in this process, as a user starts it."""

    def __init__(self, folder: Path, config: MemoryConfig, **options: Any) -> None:
        from vllm import LLM

        defaults = {
            "dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 8, "block_size": 32,
            "kv_cache_memory_bytes": 256 << 20, "disable_log_stats": False, "seed": 0,
        }  # fmt: skip
        self.llm = LLM(**(defaults | engine_arguments(folder, config) | options))

    def say(self, *asked: tuple[Any, str | None], tokens: int = 12, **ours: Any) -> list[Said]:
        """Answers of one batch. asked: (token ids or a prompt of vLLM's, memory or None: what the engine says)"""
        from vllm import SamplingParams

        prompts, params = [], []
        for prompt, memory in asked:
            prompts.append(prompt if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)})
            chosen = ours | ({} if memory is None else {"engram": memory})
            params.append(
                SamplingParams(
                    temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False, extra_args={"treadle": chosen}
                )
            )
        return [self._said(output) for output in self.llm.generate(prompts, params, use_tqdm=False)]

    def reports(self) -> Any:
        (reports,) = self.llm.collective_rpc("take_engram_reports")
        return reports

    @property
    def batch(self) -> Any:
        """The EngramBatch of the process."""
        return self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.engram

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def close(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        cleanup_dist_env_and_memory()

    @staticmethod
    def _said(output: Any) -> Said:
        (completion,) = output.outputs
        logprobs = [found[token].logprob for token, found in zip(completion.token_ids, completion.logprobs or [], strict=True)]
        outcome = outcome_of(output)
        return Said(
            list(completion.token_ids), logprobs, output.num_cached_tokens or 0, outcome, completion.finish_reason,
            outcome is not None and outcome.degraded,
        )  # fmt: skip


@pytest.fixture(scope="module")
def engines() -> Iterator[Callable[..., RunningEngine]]:
    """Makes engines; those of a module are closed with it."""
    with ExitStack() as stack:

        def make(folder: Path, config: MemoryConfig, **options: Any) -> RunningEngine:
            engine = RunningEngine(folder, config, **options)
            stack.callback(engine.close)
            return engine

        yield make


class Embedded:
    """The embedded engine on SmolLM2 with the memories of a pool: what vLLM's answers must be."""

    def __init__(self, folder: Path, pool: RunningPool, mode: FusionMode) -> None:
        self._model = CausalLM.load(folder)
        self._vocabulary = read_vocabulary(folder / "tokenizer.json")
        self._opener = Opener(self._model.config, folder / "tokenizer.json", mode)
        self._pool, self._running = PoolOfMemories(Endpoint(pool.address), "mapped"), pool
        self._memories: dict[str, EngramMemory] = {}
        self._engine = Engine(
            self._model, self._vocabulary, Limits(step_tokens_max=512, prefix_cache_bytes_max=0), prefetcher=StepPrefetcher()
        )

    def say(self, prompt: Sequence[int], memory: str, tokens: int = 12) -> Said:
        request = Request(tuple(prompt), Sampling(max_tokens=tokens, ignore_eos=True, top_logprobs=0))
        answer = Answer()
        self._engine.submit(request, answer, Lease(None if memory == "none" else self._memory(memory)))
        run_until_done(self._engine, [answer])
        assert answer.error is None, answer.error
        assert not answer.piece.degraded
        return Said(list(answer.piece.token_ids), [entry.logprob for entry in answer.piece.logprobs])

    def close(self) -> None:
        for memory in self._memories.values():
            memory.handle.close()

    def _memory(self, name: str) -> EngramMemory:
        if name not in self._memories:
            found = next(one for one in self._pool.resident() if one.model.name == name and one.current)
            self._memories[name] = self._opener.open(self._pool, found.model, found.version)
        return self._memories[name]


@pytest.fixture(scope="session")
def embedded(smollm_folder: Path, pool: RunningPool) -> Iterator[Embedded]:
    """With every memory fused, random ones too."""
    torch.set_num_threads(1)
    engine = Embedded(smollm_folder, pool, FusionMode.ON)
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> CausalLM:
    return CausalLM.load(smollm_folder)


class Explicit:
    """The explicit forward over a whole sequence at once, its rows looked up beforehand: no chunks, no caches, no batch."""

    def __init__(self, model: CausalLM, folder: Path, pool: RunningPool) -> None:
        self._model, self._opener = model, Opener(model.config, folder / "tokenizer.json", FusionMode.ON)
        self._pool, self._running = PoolOfMemories(Endpoint(pool.address), "mapped"), pool

    def say(self, memory: str | None, prompt: Sequence[int], is_id: NDArray[np.bool_], answer: Sequence[int]) -> Said:
        """Its choice after `prompt`, and after each token of `answer`. is_id: [prompt], False where a token takes part in no n-gram."""
        tokens = [*prompt, *answer[:-1]]
        opened = None if memory is None else self._opener.open(self._pool, *self._found(memory))
        kv = self._model.new_kv(None if opened is None else opened.history_widths)
        before = None
        if opened is not None:
            live = torch.from_numpy(np.concatenate([is_id, np.ones(len(answer) - 1, dtype=np.bool_)]))
            assert isinstance(opened.handle, EngramHandle)
            rows = opened.handle.lookup(self._windows(tokens, ~live.numpy(), opened.model.order_max - 1))

            def before(layer: int, hidden: torch.Tensor) -> torch.Tensor:
                if layer not in rows:
                    return hidden
                return hidden + opened.fusion.forward(layer, hidden, torch.from_numpy(rows[layer]), live, [0, len(tokens)], [kv])

        ids = torch.tensor(tokens, dtype=torch.int64)
        hidden = self._model.forward(ids, torch.arange(len(tokens)), [0, len(tokens)], [kv], before)
        logprobs = torch.log_softmax(self._model.logits(hidden[len(prompt) - 1 :]), -1)
        if opened is not None:
            opened.handle.close()
        chosen = logprobs.argmax(-1).tolist()
        return Said(chosen, [float(row[token]) for row, token in zip(logprobs, chosen, strict=True)])

    def _found(self, memory: str) -> tuple[Any, str]:
        found = next(one for one in self._pool.resident() if one.model.name == memory and one.current)
        return found.model, found.version

    @staticmethod
    def _windows(tokens: Sequence[int], dead: NDArray[np.bool_], depth: int) -> Windows:
        plain = Windows.of_sequences([(tokens, 0)], depth)
        return Windows(plain.tokens, plain.starts, plain.lookback, dead if dead.any() else None)


@pytest.fixture(scope="session")
def explicit(smollm: CausalLM, smollm_folder: Path, pool: RunningPool) -> Callable[..., Said]:
    return Explicit(smollm, smollm_folder, pool).say


@pytest.fixture(scope="session")
def explicit_of(pool: RunningPool) -> Callable[..., Said]:
    """The same for the model of a folder."""
    return lambda folder, *asked: Explicit(CausalLM.load(folder), folder, pool).say(*asked)


@pytest.fixture(scope="session")
def verses(smollm_folder: Path) -> Callable[[int, int], list[int]]:
    """Tokens of a text that the shipped memory was not grown from, but from its like: (length, where to begin)."""
    tokenizer = Tokenizer.from_file(str(smollm_folder / "tokenizer.json"))
    path = Path(engram_pool.__path__[0]) / "shipped" / "kjv-held-out.txt.xz"
    ids = tokenizer.encode(lzma.decompress(path.read_bytes()).decode()[:80_000]).ids

    def take(length: int, first: int = 0) -> list[int]:
        return list(ids[first : first + length])

    return take

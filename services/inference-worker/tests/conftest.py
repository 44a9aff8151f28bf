"""Models for the worker's tests: a tiny random one, made here in a moment, and the small real one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_worker.adapters.prefix_kv_file import map_prefix_kv
from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.catalogue import Catalogue
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.lease import Lease
from inference_worker.domain.limits import Limits
from inference_worker.domain.memory_opening import Opener
from inference_worker.domain.ports import Prefetcher
from inference_worker.domain.prefix_catalogue import PrefixCatalogue
from inference_worker.domain.prefix_opening import PrefixOpener
from inference_worker.domain.request import Piece, Request
from inference_worker.domain.resident_versions import Choice
from inference_worker.domain.text import Vocabulary
from treadle.client.asm import MappedDictionary, map_folder
from treadle.client.engram import EngramHandle, StepPrefetcher, fake_handle
from treadle.client.engram.sources import FakeSource
from treadle.contract import EngramModel, Fusion, RowLayout, Table
from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    Dictionary,
    DictionarySettings,
    KeyMode,
    Prefix,
    RowDtype,
    tensor_name,
)
from treadle.contract.dictionary_file import PREFIX_KV_FILE, read_manifest, tensor_info, write_folder
from treadle.contract.families import demo_model
from treadle.contract.table_manifest import version_of_rows
from treadle.nn import model_fetch
from treadle.nn.demo_profile import smollm2_demo_template
from treadle.nn.fusion import EngramFusion
from treadle.nn.kv import SequenceKV
from treadle.nn.lookup_keys import join_heads, lookup_keys
from treadle.nn.model import CausalLM
from treadle.nn.model_identity import dictionary_model
from treadle.nn.token_map import compressed_token_map, token_map_digest

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 4, 2, 8, 48
TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
END = 256  # the tiny model's end-of-sequence token; 0 to 255 are bytes
PATIENCE_SECONDS = 60.0  # for what takes milliseconds on a quiet machine


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with four layers whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    generator = torch.Generator().manual_seed(7)

    def weight(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    weights = {"model.embed_tokens.weight": weight(END + 8, HIDDEN, scale=1.0), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        weights |= {
            f"{at}input_layernorm.weight": torch.ones(HIDDEN),
            f"{at}post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{at}self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{at}self_attn.o_proj.weight": weight(HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            f"{at}mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
        }
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "vocab_size": END + 8,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True, "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    tokenizer = Tokenizer(models.BPE(vocab={character: place for place, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def _byte_of(character: str) -> int:
    """Printable characters of the byte-level alphabet stand for themselves, the others for 256 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return ord(character) if ord(character) < 256 else hidden[ord(character) - 256]


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> CausalLM:
    return CausalLM.load(tiny_folder)


@pytest.fixture(scope="session")
def tiny_vocabulary(tiny_folder: Path) -> Vocabulary:
    return read_vocabulary(tiny_folder / "tokenizer.json")


@pytest.fixture
def tiny_engine(tiny: CausalLM, tiny_vocabulary: Vocabulary) -> Callable[..., Engine]:
    """Makes engines on the tiny model; limits by name."""

    def make(**limits: int) -> Engine:
        return Engine(tiny, tiny_vocabulary, Limits(**{"step_tokens_max": 64, "context_tokens_max": 200} | limits))

    return make


@pytest.fixture(scope="session")
def tiny_engram(tiny_folder: Path) -> TinyEngram:
    """An Engram model for layers 1 and 2 of the tiny model, its token map, and random rows."""
    token_map, size = compressed_token_map(tiny_folder / "tokenizer.json")
    model = demo_model(
        "tiny", layers=(1, 2), token_map=token_map_digest(token_map), compressed_vocab_size=size, pad_id=2, prime_base=101, heads=2,
        row=RowLayout(32, 16, "bf16"), fusion=Fusion("demo"),
    )  # fmt: skip
    return model, token_map, random_rows(model)


def random_rows(model: EngramModel, seed: int = 3) -> dict[int, NDArray[np.uint8]]:
    """bf16 rows of every layer."""
    generator, tables = np.random.default_rng(seed), {}
    for layer in model.layers:
        values = generator.standard_normal((model.rows_hashed(layer), model.row.dim), dtype=np.float32) * 0.055
        tables[layer] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)  # bf16 is the upper half of fp32
    return tables


@dataclass(frozen=True)
class GrownVersion:
    """One version of a memory for the tiny model, as a pool keeps it. It is a ResidentVersion."""

    model: EngramModel
    tables: dict[int, NDArray[np.uint8]]
    weights: bytes
    current: bool = True

    @property
    def version(self) -> str:
        return self.model.version

    def write(self, folder: Path, token_map: NDArray[np.int32]) -> Path:
        """Write it as a grown folder, which a real pool loads."""
        folder.mkdir()
        tensors = {f"{layer}.rows": torch.from_numpy(rows) for layer, rows in self.tables.items()}
        save_file(tensors | {"token_map": torch.from_numpy(token_map)}, folder / "rows.safetensors")
        (folder / "manifest.json").write_bytes(self.model.to_json())
        (folder / "fusion.safetensors").write_bytes(self.weights)
        (folder / "card.json").write_text("{}")
        return folder


class CountedHandle(EngramHandle):
    """A handle that tells its pool when it is closed."""

    def __init__(self, pool: FakePool, grown: GrownVersion, delay_seconds: float) -> None:
        super().__init__(grown.model, grown.version, FakeSource(grown.model, grown.tables, pool.token_map, delay_seconds))
        self._pool = pool

    def close(self) -> None:
        super().close()
        self._pool.closed.append((self.model.name, self.version))


class FakePool:
    """A pool in this process, whose openings fail or hang as a test wishes.

    failures: what an opening of a name raises; hanging: openings of a name wait until the event is set
    listed:   how often it was asked what it holds; silent: what it raises then; hanging_lists: it answers once the event is set
    """

    address = "fake:1"

    def __init__(self, tiny_engram: TinyEngram) -> None:
        self._template, self.token_map, _ = tiny_engram
        self._versions: dict[tuple[str, str], GrownVersion] = {}
        self.begun: list[str] = []
        self.opened: list[tuple[str, str]] = []
        self.closed: list[tuple[str, str]] = []
        self.failures: dict[str, Exception] = {}
        self.hanging: dict[str, threading.Event] = {}
        self.delay_seconds = 0.0  # of rows
        self.listed = 0
        self.silent: Exception | None = None
        self.hanging_lists: threading.Event | None = None

    def grow(self, name: str, seed: int = 0, form: str = "v4.1") -> GrownVersion:
        """Add a version of a memory, the current one from now on."""
        template = replace(self._template, name=name, fusion=Fusion(form))
        tables = random_rows(template, seed)
        weights = EngramFusion.build(template, HIDDEN, seed, delta_rms=1.0).to(torch.bfloat16).to_bytes()
        model = replace(template, fusion=Fusion(form, sha256(weights).hexdigest()))
        model = model.with_tables({layer: Table(len(rows), version_of_rows(rows)) for layer, rows in tables.items()})
        return self.put(GrownVersion(model, tables, weights))

    def put(self, grown: GrownVersion) -> GrownVersion:
        """Hold a version, the current one of its name from now on."""
        self._versions[grown.model.name, grown.version] = grown
        self.promote(grown.model.name, grown.version)
        return grown

    def promote(self, name: str, version: str) -> None:
        """Make a version the current one."""
        for key, grown in self._versions.items():
            if key[0] == name:
                self._versions[key] = replace(grown, current=key[1] == version)

    def remove(self, name: str) -> None:
        """Take all versions of a memory out."""
        self._versions = {key: grown for key, grown in self._versions.items() if key[0] != name}

    def resident(self) -> list[GrownVersion]:
        """See MemoryPool."""
        self.listed += 1
        if self.hanging_lists is not None:
            assert self.hanging_lists.wait(30)
        if self.silent is not None:
            raise self.silent
        return list(self._versions.values())

    def open(self, model: str, version: str) -> CountedHandle:
        """See MemoryPool."""
        self.begun.append(model)
        if model in self.hanging:
            assert self.hanging[model].wait(30)
        if model in self.failures:
            raise self.failures[model]
        self.opened.append((model, version))
        return CountedHandle(self, self._versions[model, version], self.delay_seconds)

    def read_fusion(self, model: str, version: str) -> bytes:
        """See MemoryPool."""
        return self._versions[model, version].weights


@pytest.fixture
def fake_pool(tiny_engram: TinyEngram) -> FakePool:
    return FakePool(tiny_engram)


@pytest.fixture
def opener(tiny: CausalLM, tiny_folder: Path) -> Opener:
    return Opener(tiny.config, tiny_folder / "tokenizer.json")


@pytest.fixture
def catalogues(fake_pool: FakePool, opener: Opener) -> Iterator[Callable[..., Catalogue]]:
    """Makes catalogues of the fake pool that have heard what it holds; closed in the end."""
    with ExitStack() as stack:

        def make(*, open_max: int = 8, default: Choice | None = None, observer: Any = None, heard: bool = True) -> Catalogue:
            catalogue = Catalogue(fake_pool, opener, open_max=open_max, default=default, observer=observer)
            stack.callback(catalogue.close)
            if heard:
                catalogue.update(fake_pool.resident())
            return catalogue

        yield make


class Collected:
    """A PrefixCollector that keeps everything."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[torch.Tensor, ...]] = {}

    def take(self, layer: int, queries: torch.Tensor, rotated: torch.Tensor, a: torch.Tensor, log_z: torch.Tensor) -> None:
        self.layers[layer] = tuple(part.clone() for part in (queries, rotated, a, log_z))


@dataclass(frozen=True)
class KeptPrefix:
    """A version that a store keeps, in a folder. It is a ResidentVersion."""

    model: Dictionary
    folder: Path
    current: bool = True

    @property
    def version(self) -> str:
        return self.model.version


class FakeStore:
    """A store in this process: real folders, really mapped, whose openings fail as a test wishes."""

    address = "fake:2"

    def __init__(self) -> None:
        self.kept: list[KeptPrefix] = []
        self.opened: list[str] = []
        self.closed: list[str] = []
        self.failure: Exception | None = None
        self.silent: Exception | None = None

    def put(self, folder: Path) -> KeptPrefix:
        """Keep a folder's version, the current one of its name from now on."""
        new = KeptPrefix(read_manifest(folder), folder)
        self.kept = [replace(each, current=False) if each.model.name == new.model.name else each for each in self.kept] + [new]
        return new

    def resident(self) -> list[KeptPrefix]:
        """See Source."""
        if self.silent is not None:
            raise self.silent
        return list(self.kept)

    def open(self, name: str, version: str, expected: Mapping[str, str]) -> CountedPrefix:
        """See DictionaryStore."""
        if self.failure is not None:
            raise self.failure
        (kept,) = [each for each in self.kept if each.version == version]
        kept.model.fingerprint.require(expected)
        self.opened.append(version)
        return CountedPrefix(map_folder(kept.folder), self.closed)


class CountedPrefix:
    """A MappedPrefix that tells when it is closed."""

    def __init__(self, mapped: MappedDictionary, closed: list[str]) -> None:
        self._mapped, self._closed = mapped, closed
        self.dictionary, self.version = mapped.dictionary, mapped.version
        self.tensors, self.path, self.prefix_kv_path = mapped.tensors, mapped.path, mapped.prefix_kv_path

    def close(self) -> None:
        self._mapped.close()
        self._closed.append(self.version)


@pytest.fixture
def fake_store() -> FakeStore:
    return FakeStore()


@pytest.fixture(scope="session")
def make_prefix(tiny: CausalLM, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the folder of a dictionary with an entry for every query of some traces, keyed by the query where it stands: a request
    that is one of the traces is answered exactly."""

    def make(
        prefix: Sequence[int], traces: Sequence[Sequence[int]], *, name: str = "rules", keep_kv: bool = True,
        cosine_min: float = 0.999, layers: Sequence[int] = range(LAYERS), **settings: Any,
    ) -> Path:  # fmt: skip
        kv, states, count = tiny.new_kv(), Collected(), len(prefix)
        tiny.forward(torch.tensor(prefix), torch.arange(count), [0, count], [kv])
        starts = np.cumsum([0, *map(len, traces)]).tolist()
        positions = torch.cat([torch.arange(count, count + len(trace)) for trace in traces])
        tokens = torch.tensor([token for trace in traces for token in trace])
        tiny.forward(tokens, positions, starts, [tiny.new_kv() for _ in traces], shared=kv, collect=states)
        exact: dict[str, Any] = {"key": KeyMode.OWN_POSITION, "dtype": RowDtype.F32, "entries": len(tokens) * HEADS // KV_HEADS}
        chosen = DictionarySettings(**(exact | settings))
        tensors: dict[str, tuple[str, NDArray[Any]]] = {}
        for layer in layers:
            queries, rotated, a, log_z = states.layers[layer]
            keys = lookup_keys(queries, rotated, tiny.rope, chosen, tiny.config).transpose(0, 1).flatten(1, 2)
            values, logs = (join_heads(part, chosen, tiny.config).transpose(0, 1).flatten(1, 2) for part in (a, log_z))
            parts = {"keys": keys, "states": values, "log_z": logs}
            tensors |= {tensor_name(layer, part): ("F32", rows.contiguous().numpy()) for part, rows in parts.items()}
            tensors[tensor_name(layer, "counts")] = ("I32", np.ones(keys.shape[:2], np.int32))
            spread = np.linspace(cosine_min, 1, QUANTILES, dtype=np.float32)
            tensors[tensor_name(layer, "cosine_quantiles")] = ("F32", np.tile(spread, (len(keys), 1)))
        folder = tmp_path_factory.mktemp("prefix")
        digest = _write_prefix_kv(folder / PREFIX_KV_FILE, kv) if keep_kv else None
        dictionary = Dictionary(
            name, dictionary_model(tiny_folder, tiny.config), tuple(layers), Prefix(_ids_digest(prefix), count, (count,)),
            Calibration(_ids_digest(tokens.tolist()), len(traces), len(tokens)), chosen,
            tuple((each, tensor_info(rows, dtype)) for each, (dtype, rows) in sorted(tensors.items())), digest,
        )  # fmt: skip
        write_folder(folder, dictionary, {each: rows for each, (_, rows) in tensors.items()})
        return folder

    return make


def _write_prefix_kv(path: Path, kv: SequenceKV) -> str:
    save_file({"kv": kv.block(0, kv.length).kv}, path)
    return sha256(path.read_bytes()).hexdigest()


def _ids_digest(ids: Sequence[int]) -> str:
    return sha256(np.array(ids, dtype="<i4").tobytes()).hexdigest()


@pytest.fixture
def prefix_catalogues(fake_store: FakeStore, tiny: CausalLM, tiny_folder: Path) -> Iterator[Callable[..., PrefixCatalogue]]:
    """Makes catalogues of the fake store that have heard what it keeps; closed in the end."""
    opener = PrefixOpener(lambda: dictionary_model(tiny_folder, tiny.config), tiny.config.positions_max, map_prefix_kv)
    with ExitStack() as stack:

        def make(*, open_max: int = 8, observer: Any = None, heard: bool = True) -> PrefixCatalogue:
            catalogue = PrefixCatalogue(fake_store, opener, open_max=open_max, observer=observer)
            stack.callback(catalogue.close)
            if heard:
                catalogue.update(fake_store.resident())
            return catalogue

        yield make


@pytest.fixture
def take() -> Callable[..., Lease[EngramMemory]]:
    """Takes a lease by name and waits for it."""

    def lease(catalogue: Catalogue, model: str, version: str = "") -> Lease[EngramMemory]:
        return catalogue.take(Choice(model, version)).result(30)

    return lease


@pytest.fixture
def soon() -> Callable[[Callable[[], bool]], None]:
    """Waits until something is so that another thread or process does; PATIENCE_SECONDS at most."""

    def wait(is_so: Callable[[], bool]) -> None:
        never, until = threading.Event(), time.monotonic() + PATIENCE_SECONDS
        while not is_so():
            assert time.monotonic() < until
            never.wait(0.001)

    return wait


@pytest.fixture
def engines(tiny: CausalLM, tiny_vocabulary: Vocabulary) -> Callable[..., Engine]:
    """Makes engines on the tiny model with a default memory; limits by name."""

    def make(
        memory: EngramMemory | None = None, *, prefetcher: Prefetcher | None = None, prefetch: bool = True,
        wait_seconds_max: float = 1.0, **limits: int,
    ) -> Engine:  # fmt: skip
        chosen = Limits(**{"step_tokens_max": 64, "context_tokens_max": 200} | limits)
        looks_up = prefetcher or StepPrefetcher(prefetch=prefetch)
        return Engine(tiny, tiny_vocabulary, chosen, memory, prefetcher=looks_up, engram_wait_seconds_max=wait_seconds_max)

    return make


@pytest.fixture(scope="session")
def demo_handle(smollm_folder: Path) -> Iterator[EngramHandle]:
    """The demo profile of the real model, with random rows in this process."""
    model, token_map = smollm2_demo_template(smollm_folder / "tokenizer.json")
    with fake_handle(model, token_map, random_rows(model)) as handle:
        yield handle


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    """The small real model; fetched and converted where it is not there."""
    return model_fetch.fetch("smollm2-135m")


@pytest.fixture(scope="session")
def smollm(smollm_folder: Path) -> CausalLM:
    return CausalLM.load(smollm_folder)


@pytest.fixture(scope="session")
def smollm_vocabulary(smollm_folder: Path) -> Vocabulary:
    return read_vocabulary(smollm_folder / "tokenizer.json")


@pytest.fixture(scope="session")
def chat_ids(smollm_folder: Path) -> Callable[[str], tuple[int, ...]]:
    """A question in the real model's chat template, as token ids."""
    tokenizer = Tokenizer.from_file(str(smollm_folder / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

    def ids(question: str) -> tuple[int, ...]:
        text = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return tuple(tokenizer.encode(text).ids)

    return ids


@pytest.fixture
def ask() -> Callable[..., list[Piece]]:
    """Submits requests together, runs the engine until all are answered, and returns the whole answers."""

    def run(engine: Engine, *requests: Request) -> list[Piece]:
        answers = [Answer() for _ in requests]
        for request, answer in zip(requests, answers, strict=True):
            engine.submit(request, answer)
        run_until_done(engine, answers)
        for answer in answers:
            assert answer.error is None, answer.error
        return [answer.piece for answer in answers]

    return run


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Waits until something is so; PATIENCE_SECONDS at most."""

    async def wait(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_so():  # noqa: ASYNC110 - what is waited for happens on another thread
                await asyncio.sleep(0.001)

    return wait


@pytest.fixture
def prompt() -> Callable[..., tuple[int, ...]]:
    """Pseudo-random byte tokens."""

    def make(length: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(0, END, length).tolist())

    return make

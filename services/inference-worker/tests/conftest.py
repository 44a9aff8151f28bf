"""Models for the worker's tests: a tiny random one, made here in a moment, and the small real one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inference_worker.adapters.tokenizer_file import read_vocabulary
from inference_worker.domain.answer import Answer, run_until_done
from inference_worker.domain.engine import Engine
from inference_worker.domain.engram import EngramMemory
from inference_worker.domain.limits import Limits
from inference_worker.domain.request import Piece, Request
from inference_worker.domain.text import Vocabulary
from treadle.client.engram import EngramHandle, fake_handle
from treadle.contract import EngramModel, Fusion, RowLayout
from treadle.contract.families import demo_model
from treadle.nn import model_fetch
from treadle.nn.demo_profile import smollm2_demo_template
from treadle.nn.model import CausalLM
from treadle.nn.token_map import compressed_token_map, token_map_digest

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 4, 2, 8, 48
TinyEngram = tuple[EngramModel, NDArray[np.int32], dict[int, NDArray[np.uint8]]]
END = 256  # the tiny model's end-of-sequence token; 0 to 255 are bytes


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


def random_rows(model: EngramModel) -> dict[int, NDArray[np.uint8]]:
    """bf16 rows of every layer."""
    generator, tables = np.random.default_rng(3), {}
    for layer in model.layers:
        values = generator.standard_normal((model.rows_hashed(layer), model.row.dim), dtype=np.float32) * 0.055
        tables[layer] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8)  # bf16 is the upper half of fp32
    return tables


@pytest.fixture
def engines(tiny: CausalLM, tiny_vocabulary: Vocabulary) -> Callable[..., Engine]:
    """Makes engines on the tiny model with a memory; limits by name."""

    def make(memory: EngramMemory | None, **limits: int) -> Engine:
        return Engine(tiny, tiny_vocabulary, Limits(**{"step_tokens_max": 64, "context_tokens_max": 200} | limits), memory)

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
    """Waits until something is so; ten seconds at most."""

    async def wait(is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_so():  # noqa: ASYNC110 - what is waited for happens on another thread
                await asyncio.sleep(0.001)

    return wait


@pytest.fixture
def prompt() -> Callable[..., tuple[int, ...]]:
    """Pseudo-random byte tokens."""

    def make(length: int, seed: int = 0) -> tuple[int, ...]:
        return tuple(np.random.default_rng(seed).integers(0, END, length).tolist())

    return make

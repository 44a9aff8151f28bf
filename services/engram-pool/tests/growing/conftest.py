"""A tiny model with a tokenizer of its own, and a text that repeats itself enough to be learnt."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from engram_pool.growing.corpus import Corpus, blocks_of, digest_of, tokenise
from engram_pool.growing.grower import Grower, spread_of
from engram_pool.growing.memory import Memory
from engram_pool.growing.recipe import Recipe
from treadle.nn.frozen import FrozenLM
from treadle.nn.token_map import compressed_token_map

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)

LENGTH = 32
RECIPE = Recipe(layers=(1, 2), dim=32, heads=2, prime_base=101, block_tokens=LENGTH, mix_every=3)
NAMES = ["Abel", "Cain", "Seth", "Enosh", "Kenan", "Jared", "Enoch", "Noah", "Shem", "Ham", "Japheth", "Terah"]


def sentences(count: int, seed: int = 0) -> str:
    """Lines in which the third word follows from the first two, which a memory of n-grams can learn."""
    draw = np.random.default_rng(seed)
    pairs = draw.integers(0, len(NAMES), (count, 2))
    return (
        "\n".join(f"{NAMES[a]} begat {NAMES[(5 * a + 3) % 12]} and {NAMES[b]} saw {NAMES[(a + 7 * b) % 12]} ." for a, b in pairs)
        + "\n"
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([sentences(300)], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = transformers.LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(11)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model(model_folder: Path) -> FrozenLM:
    return FrozenLM.load(model_folder, torch.float32)


@pytest.fixture(scope="session")
def corpus(model_folder: Path) -> Corpus:
    text, other = tokenise(
        model_folder / "tokenizer.json", [("names", sentences(900)), ("other", "the fish swam far away . " * 120)]
    )
    blocks, mix = blocks_of(text.tokens, LENGTH), blocks_of(other.tokens, LENGTH)
    held = len(blocks) // 10
    return Corpus(blocks[held:], blocks[:held], mix[:-2], mix[-2:], digest_of([text]), ("names",))


@pytest.fixture(scope="session")
def token_map(model_folder: Path) -> tuple[NDArray[np.int32], int]:
    return compressed_token_map(model_folder / "tokenizer.json")


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    return RECIPE


@pytest.fixture(scope="session")
def fresh(model: FrozenLM, corpus: Corpus, token_map: tuple[NDArray[np.int32], int]) -> Callable[[Recipe], Memory]:
    """Returns a function: recipe -> a memory that nothing has been learnt into."""

    def make(recipe: Recipe) -> Memory:
        spread = spread_of(model, corpus.train, recipe.layers)
        return Memory.begin("names", recipe, *token_map, 2, model.config.hidden, spread)

    return make


@pytest.fixture(scope="session")
def grown(model: FrozenLM, corpus: Corpus, fresh: Callable[[Recipe], Memory]) -> Grower:
    grower = Grower(model, fresh(RECIPE), corpus, RECIPE)
    for _ in grower.run():
        pass
    return grower

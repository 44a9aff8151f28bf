"""A language model of a few thousand weights, and a memory for it: real services run it as they run a large one, in a moment.

Its tokens are bytes, its weights random: what it says means nothing, when and whether it says it does.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from treadle.contract import EngramModel, Fusion, RowLayout
from treadle.contract.families import demo_model
from treadle.nn.token_map import compressed_token_map, token_map_digest

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 32, 4, 4, 2, 8, 48
END = 256  # end of sequence; 0 to 255 are bytes
CONTEXT_TOKENS = 4096
MEMORY, MEMORY_LAYERS = "tiny-memory", (1, 2)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tiny_model(folder: Path) -> Path:
    """Write a Llama folder with tokenizer and chat template; its path."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(7)

    def weight(*shape: int, scale: float = 0.3) -> NDArray[np.float32]:
        return chance.standard_normal(shape, dtype=np.float32) * np.float32(scale)

    weights = {"model.embed_tokens.weight": weight(END + 8, HIDDEN, scale=1.0), "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{at}{norm}.weight"] = np.ones(HIDDEN, np.float32)
        for name, rows in (("q_proj", HEADS), ("k_proj", KV_HEADS), ("v_proj", KV_HEADS)):
            weights[f"{at}self_attn.{name}.weight"] = weight(rows * HEAD_DIM, HIDDEN)
        weights[f"{at}self_attn.o_proj.weight"] = weight(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            weights[f"{at}mlp.{name}.weight"] = weight(INTERMEDIATE, HIDDEN)
        weights[f"{at}mlp.down_proj.weight"] = weight(HIDDEN, INTERMEDIATE)
    save_file(weights, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "intermediate_size": INTERMEDIATE, "vocab_size": END + 8,
        "max_position_embeddings": CONTEXT_TOKENS, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
        "eos_token_id": END,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def memory_template(folder: Path) -> tuple[EngramModel, NDArray[np.int32]]:
    """The manifest without tables of a memory that fits the model, and its token map int32 [V]."""
    token_map, size = compressed_token_map(folder / "tokenizer.json")
    model = demo_model(
        MEMORY, layers=MEMORY_LAYERS, token_map=token_map_digest(token_map), compressed_vocab_size=size, pad_id=2, prime_base=101,
        heads=2, row=RowLayout(32, 16, "bf16"), fusion=Fusion("demo"),
    )  # fmt: skip
    return model, token_map


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer

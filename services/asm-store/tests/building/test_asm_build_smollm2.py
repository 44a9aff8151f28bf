"""A prefix of a real model, from text to answers: what a dictionary keeps of it, and what building one takes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np

from asm_store.building.build import Build, Order
from asm_store.building.prefix import load_tokenizer, prefix_tokens
from asm_store.building.recipe import Recipe
from treadle.contract.dictionary import DictionarySettings
from treadle.nn.model import CausalLM

EXTRA_BYTES_MAX = 512 << 20
ASKED = {
    "balance": ("how much is in my {} account", "what is left in my {} savings"),
    "transfer": ("send money to my {} friend", "move funds into the {} account"),
    "weather": ("will it rain on the {} trip", "how warm is it for a {} walk"),
    "recipe": ("how do i cook a {} soup", "what goes into a {} cake"),
    "alarm": ("wake me for the {} meeting", "set a timer for my {} tea"),
    "music": ("play a {} song", "put on some {} jazz"),
}
WORDS = (
    "new",
    "old",
    "green",
    "small",
    "french",
    "quiet",
    "long",
    "first",
    "sunday",
    "lazy",
    "bright",
    "cold",
    "sweet",
    "early",
    "plain",
)


def examples() -> list[str]:
    """Questions with their intents, in an order that is always the same."""
    made = [
        f"Query: {form.format(word)}\nIntent: {intent}\n\n"
        for word, (intent, forms) in itertools.product(WORDS, ASKED.items())
        for form in forms
    ]
    return [made[place] for place in np.random.default_rng(5).permutation(len(made))]


def memory_bytes(field: str) -> int:
    """VmRSS, or VmHWM, its peak since it was last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) << 10


def test_a_dictionary_predicts_as_its_prefix_does_and_costs_little_to_make(
    smollm2: CausalLM, smollm2_folder: Path, tmp_path: Path
) -> None:
    tokenizer, texts = load_tokenizer(smollm2_folder), examples()
    prefix = prefix_tokens(tokenizer, texts[:16], begins=True)
    traces = tuple(tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts[16:106])
    order = Order(
        Recipe("intents", DictionarySettings(entries=256)), smollm2_folder, "smollm2-135m", prefix, traces, tmp_path / "out"
    )
    build = Build(order, model=smollm2)
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    dictionary, card = build.run()
    extra = memory_bytes("VmHWM") - before
    assert 200 < dictionary.prefix.tokens < 400
    assert dictionary.nbytes < 4 << 20
    found, nothing = card["fidelity"]["dictionary"], card["fidelity"]["nothing"]
    assert found["agreement"] > nothing["agreement"] + 0.3, card["fidelity"]
    assert found["agreement"] > 0.7
    assert found["kl"] < nothing["kl"] / 5
    assert 0 < extra < EXTRA_BYTES_MAX
    assert json.loads((tmp_path / "out" / "card.json").read_text())["version"] == dictionary.version

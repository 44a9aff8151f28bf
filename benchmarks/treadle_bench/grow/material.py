"""What runs work on: a domain and the other texts as blocks of token ids, the corpus of a memory, the frozen model.

Owns which blocks are which. Does not train or measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_pool.growing.corpus import Corpus, blocks_of, digest_of, tokenise
from treadle_bench.grow.domains import HELD, Domain, Split, overlap
from treadle_bench.grow.other_texts import OTHERS, load_domain, mix_text, other_text

BLOCK_TOKENS = 512
VALIDATION = Split.VALIDATION.value
MEASURED = (*(split.value for split in HELD), *OTHERS)  # the sets of every figure; validation is only chosen on

Blocks = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Material:
    """A domain's blocks int64 [n, BLOCK_TOKENS]: the corpus to learn from, and every set to measure by name."""

    domain: str
    domain_digest: str
    corpus: Corpus
    sets: Mapping[str, Blocks]


def material_of(domain: Domain, texts: Path, tokenizer_json: Path) -> Material:
    """Tokenise a domain and the other texts. Units follow each other; what is left behind the last whole block is left out."""
    wanted = [(split.value, domain.text(split)) for split in Split]
    wanted += [(name, other_text(name, texts)) for name in OTHERS] + [("mix", mix_text(texts))]
    tokens = {text.name: text for text in tokenise(tokenizer_json, wanted)}
    blocks = {name: blocks_of(text.tokens, BLOCK_TOKENS) for name, text in tokens.items()}
    train = [tokens[Split.TRAIN.value]]
    corpus = Corpus(
        train=blocks[Split.TRAIN.value], held_out=blocks[VALIDATION], mix=blocks["mix"], other=blocks["mix"][:0],
        digest=digest_of(train), names=(domain.name,),
    )  # fmt: skip
    return Material(domain.name, domain.digest, corpus, {name: blocks[name] for name in (VALIDATION, *MEASURED)})


def overlaps_of(domain: Domain, tokenizer_json: Path) -> dict[str, dict[str, Any]]:
    """Of each held-out split by name, the fields of its `Overlap` with the training text."""
    units = [unit for split in (Split.TRAIN, *HELD) for unit in domain.units[split]]
    tokens = dict(
        zip((unit.text for unit in units), tokenise(tokenizer_json, [(unit.name, unit.text) for unit in units]), strict=True)
    )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokens[text].tokens.tolist()
        return ids

    return {split.value: asdict(overlap(domain, split, encode)) for split in HELD}


def load_material(domain: str, texts: Path, model: Path) -> Material:
    """The material of a domain by name, for the tokenizer of the model in folder `model`."""
    return material_of(load_domain(domain, texts), texts, model / "tokenizer.json")


def some_blocks(blocks: Blocks, count: int) -> NDArray[np.int64]:
    """Numbers of `count` blocks spread evenly over a set, all where there are no more; the same for every run, so that runs pair."""
    return np.unique(np.linspace(0, len(blocks) - 1, min(count, len(blocks))).round().astype(np.int64))

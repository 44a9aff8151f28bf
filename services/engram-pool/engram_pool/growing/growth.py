"""One growth from text to folder: prepare, train with checkpoints, measure, write.

Owns the order of the work, what is measured for the card, and the warnings a person should see. Does not print (`commands`).
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_pool.growing import checkpoint, folder
from engram_pool.growing.card import CARD_SCHEMA, read_card
from engram_pool.growing.corpus import Corpus
from engram_pool.growing.evaluation import Scores, in_precision, score, shuffled
from engram_pool.growing.grower import Grower, Report, spread_of
from engram_pool.growing.memory import Memory
from engram_pool.growing.recipe import Recipe
from treadle.chassis.interrupts import interrupts_held
from treadle.contract import EngramModel
from treadle.contract.errors import FingerprintMismatch, InvalidArgument
from treadle.contract.row_layout import row_layout
from treadle.nn.frozen import FrozenLM
from treadle.nn.token_map import compressed_token_map, token_map_digest
from treadle.nn.weights import weights_digest

CPU = torch.device("cpu")
CHECKPOINT = "checkpoint.safetensors"
CHECKPOINT_SECONDS = 60.0  # at most this much work is lost by a kill
EVAL_BLOCKS = 40  # blocks of each text that the card's perplexities are measured on, spread evenly
KNOWN_PERPLEXITY = 6.0  # a text that the frozen model predicts this well, it has mostly seen
TOKENS_FEW = 100_000  # below this most of what is learnt is style
REPEATED_MANY = 0.2  # of the held-out tokens: from here on the figures measure reciting

Watch = Callable[[Report], None]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What to grow: into `out`, beside the model in `model_folder`. `source` says in words where the text comes from."""

    name: str
    model_folder: Path
    model_name: str
    out: Path
    precision: str
    recipe: Recipe
    corpus: Corpus
    mix_names: tuple[str, ...] = ()
    source: str = ""
    parent: Path | None = None  # a grown folder whose rows are learnt further, its projections frozen


class Growth:
    """Carries out one order. say: called with what is being done now, and with warnings."""

    def __init__(self, order: Order, say: Say, *, device: str = "cpu") -> None:
        chosen = device_of(device)
        self.order, self._say = order, say
        self._work = order.out.with_name(f".{order.out.name}.growing")
        if order.out.exists():
            raise InvalidArgument(f"{order.out}: is there already; choose another place with --out, or remove it")
        row_layout(order.precision, order.recipe.dim)  # hours before it is needed
        self._make_room()
        self._say("loading the model")
        self.model = FrozenLM.load(order.model_folder, device=chosen)
        if max(order.recipe.layers) >= self.model.config.layers:
            raise InvalidArgument(
                f"layers {list(order.recipe.layers)}: the model has {self.model.config.layers} layers, counted from 0"
            )
        self._weights = weights_digest(order.model_folder)
        self._parent = folder.read(order.parent) if order.parent is not None else None
        self._memory = self._begin()
        self._tokens_learnt = 0
        self._warn()

    def train(self, watch: Watch) -> None:
        """Take every step that is left, saving a checkpoint each CHECKPOINT_SECONDS and when interrupted.

        SIGINT and SIGTERM are heard between steps, where the state is whole; then KeyboardInterrupt is raised. A step that fails
        leaves the checkpoint before it.
        """
        grower = Grower(self.model, self._memory, self.order.corpus, self.order.recipe)
        path, identity = self._work / CHECKPOINT, self._identity()
        self._work.mkdir(exist_ok=True)
        if path.is_file():
            grower.restore(checkpoint.load(path, identity))
            self._say(f"going on from step {grower.step_done} of {len(grower.plan)}")
        saved = time.monotonic()
        with interrupts_held() as interrupted:
            for report in grower.run():
                watch(report)
                if interrupted():
                    checkpoint.save(path, grower.state(), identity)
                    self._say(
                        f"interrupted behind step {report.step} of {report.steps}; the same command goes on, with --restart it begins again"
                    )
                    raise KeyboardInterrupt
                if time.monotonic() - saved > CHECKPOINT_SECONDS:
                    checkpoint.save(path, grower.state(), identity)
                    saved = time.monotonic()
        checkpoint.save(path, grower.state(), identity)
        self._memory, self._tokens_learnt = grower.memory.to(CPU), grower.tokens_done

    def restart(self) -> None:
        """Forget the checkpoint of an earlier run to the same place."""
        shutil.rmtree(self._work, ignore_errors=True)

    def finish(self, tick: Callable[[str, int, int], None]) -> tuple[EngramModel, dict[str, Any]]:
        """Measure and write the folder; the manifest and the card. tick: (what is measured, blocks done, blocks in all)"""
        figures = self._measure(tick)
        card = self._card(figures)
        model = folder.write(self.order.out, self._memory, self.order.precision, card)
        shutil.rmtree(self._work, ignore_errors=True)
        return model, read_card(self.order.out)

    def _make_room(self) -> None:
        """The place for the checkpoint, before anything takes time."""
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            if not any(self._work.iterdir()):
                self._work.rmdir()  # nothing stays behind of an order that is refused later
        except OSError as error:
            raise InvalidArgument(f"--out {self.order.out}: {self._work} cannot be made: {error.strerror}") from error

    def _begin(self) -> Memory:
        order = self.order
        token_map, compressed = compressed_token_map(order.model_folder / "tokenizer.json")
        if self._parent is not None:
            grown_for = self._parent.card["model"].get("weights", self._weights)
            if grown_for != self._weights:
                raise FingerprintMismatch(f"{order.parent}: weights of the model", grown_for, self._weights)
            digest = token_map_digest(token_map)
            if digest != self._parent.model.token_map:
                raise FingerprintMismatch("token_map", str(self._parent.model.token_map), digest)
            return self._parent.memory.named(order.name)
        eos = self.model.config.eos_token_ids
        spread = spread_of(self.model, order.corpus.train, order.recipe.layers)
        return Memory.begin(order.name, order.recipe, token_map, compressed, eos[0] if eos else 0, self.model.config.hidden, spread)

    def _warn(self) -> None:
        order, there = self.order, self.order.corpus.train.size
        wanted = order.recipe.tokens_max
        learnt = min(there, wanted) if wanted else there
        if wanted > there:
            self._say(f"warning: --tokens {wanted}: the text has {there} to learn from, each is learnt from once")
        if order.corpus.repeated > REPEATED_MANY:
            self._say(
                f"warning: {order.corpus.repeated:.0%} of the held-out text stands word for word in what is learnt: its figures measure reciting"
            )
        if order.recipe.passes > 1 and order.recipe.projection_rate > 0:
            self._say(
                f"warning: {order.recipe.passes} passes: from the second on every n-gram looks known, the gate learns to trust blindly, "
                "and text that was not learnt gets worse (held-out perplexity +46 % after four passes)"
            )
        if learnt < TOKENS_FEW:
            self._say(
                f"warning: {learnt} tokens: most of what so little text gives is its style; {TOKENS_FEW} or more give a memory"
            )
        # A few blocks are enough to tell a text that the model knows by heart.
        perplexity = score(self.model, _spread(order.corpus.held_out, 8)).perplexity
        self._say(f"the frozen model's perplexity on held-out text: {perplexity:.2f}")
        if perplexity < KNOWN_PERPLEXITY:
            self._say("warning: the model has mostly seen this text already: there is little to gain")

    def _measure(self, tick: Callable[[str, int, int], None]) -> dict[str, Scores]:
        """Perplexities for the card, with the rows as they will be served."""
        served = in_precision(self._memory, self.order.precision)
        states: Mapping[str, Memory | None] = {"off": None, "on": served, "shuffled": shuffled(served)}
        texts = {"held_out": self.order.corpus.held_out, "other_text": self.order.corpus.other}
        figures = {}
        for text, blocks in texts.items():
            for state, memory in states.items():
                if len(blocks) and not (text == "other_text" and state == "shuffled"):
                    what = f"{text} {state}"
                    some = _spread(blocks, EVAL_BLOCKS)
                    figures[what] = score(self.model, some, memory, tick=lambda at, of, what=what: tick(what, at, of))  # type: ignore[misc]
        return figures

    def _identity(self) -> dict[str, str]:
        order = self.order
        return {
            "name": order.name, "text": order.corpus.digest, "blocks": order.corpus.blocks_digest,
            "recipe": json.dumps(order.recipe.to_json()), "model": self._weights, "parent": self._parent.model.version if self._parent is not None else "",
        }  # fmt: skip

    def _card(self, figures: Mapping[str, Scores]) -> dict[str, Any]:
        order, corpus = self.order, self.order.corpus
        perplexity: dict[str, dict[str, float]] = {}
        for what, scores in figures.items():
            text, state = what.split()
            perplexity.setdefault(text, {})[state] = round(scores.perplexity, 4)
            perplexity[text]["tokens"] = len(scores.nats) * scores.tokens
        return {
            "schema": CARD_SCHEMA, "name": order.name, "precision": order.precision, "recipe": order.recipe.to_json(),
            "model": {
                "name": order.model_name, "layers": self.model.config.layers, "hidden": self.model.config.hidden, "weights": self._weights,
            },
            "tokens_learnt": self._tokens_learnt,
            "text": {
                "names": list(corpus.names), "digest": corpus.digest, "source": order.source, "train_tokens": int(corpus.train.size),
                "held_out_tokens": int(corpus.held_out.size), "held_out_repeated": round(corpus.repeated, 4), "mix": list(order.mix_names), "mix_tokens": int(corpus.mix.size),
            },
            "parent": None if self._parent is None else {"name": self._parent.model.name, "version": self._parent.model.version},
            "perplexity": perplexity, "seed": order.recipe.seed,
            "rows_learnt": {str(layer): int(part.rows.any(1).sum()) for layer, part in self._memory.layers.items()},
            "made_with": {
                "torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine(),
                "dtype": str(self.model.dtype).removeprefix("torch."), "device": str(self.model.device),
            },
        }  # fmt: skip


def rows_only(recipe: Recipe, parent: EngramModel, *, passes: int) -> Recipe:
    """The recipe for adding a text to `parent`: its sizes, projections frozen, no other text."""
    return replace(
        recipe, layers=parent.layers, orders=parent.orders, heads=parent.heads, dim=parent.row.dim, prime_base=parent.primes[0][0][0],
        projection_rate=0.0, mix_every=0, passes=passes,
    )  # fmt: skip


def device_of(name: str) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`. Raises InvalidArgument where this torch, or this machine, has no such device."""
    if name == "cpu":
        return torch.device(name)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number or "0").isdigit():
        raise InvalidArgument(f"--device: cpu, cuda or cuda:N, got {name!r}")
    found = torch.cuda.device_count()
    if int(number or 0) >= found:
        raise InvalidArgument(
            f"--device {name}: torch {torch.__version__} sees {found} GPUs here; leave the option out for the CPU"
        )
    return torch.device(kind, int(number or 0))


def _spread(blocks: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """At most `count` blocks, evenly over all."""
    if len(blocks) <= count:
        return blocks
    return blocks[np.linspace(0, len(blocks) - 1, count).round().astype(np.int64)]

"""The demo's second act: a long prefix built, published and asked for, as a user would, and what came of it.

Owns the order of it, its figures and what counts as failed. What is asked and how is in `demo_prefix_answers`, how it looks in
`demo_prefix_report`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from treadle.cli import jobs
from treadle.cli.conversation import connect
from treadle.cli.demo_fabric import record_of
from treadle.cli.demo_prefix_answers import NAME, SOURCE, TEXT_FILE, TRACES_FILE, Asked, Likelihood, answers, likelihood
from treadle.cli.fabric import STORE, WORKER
from treadle.cli.held_out import tokenizer_of
from treadle.cli.run_folder import FabricState, RunFolder
from treadle.cli.supervisor import JobSpec, StartFailed, Supervisor
from treadle.contract.errors import DataLoss

if TYPE_CHECKING:
    from treadle.cli.terminal import StepView

ENTRIES = 256  # a quarter of the prefix KV's bytes at these 570 tokens


@dataclass(slots=True)
class PrefixAct:
    """What was built, published and asked; empty where it did not come that far.

    card:          what `treadle asm build` says of the dictionary; build_seconds: of the whole command
    published:     what `treadle asm publish` says
    """

    card: dict[str, Any] = field(default_factory=dict)
    build_seconds: float = 0.0
    published: dict[str, Any] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)
    likelihood: Likelihood | None = None

    @property
    def version(self) -> str:
        """Of the dictionary."""
        return str(self.card.get("version", ""))

    @property
    def prefix_tokens(self) -> int:
        """Tokens that it stands for."""
        return int(self.card["prefix"]["tokens"])

    @property
    def fidelity(self) -> dict[str, dict[str, float]]:
        """Next-token agreement and KL against the text itself, on traces kept from learning: behind the `dictionary`, behind `nothing`."""
        return self.card.get("fidelity") or {}

    @property
    def seconds_to_first(self) -> dict[str, float]:
        """Median time to the first token, for each way of asking."""
        ways = ("with_text", "again", "without", "behind")
        return {way: median(getattr(one, way).seconds_to_first for one in self.asked) for way in ways}

    def same(self, way: str) -> int:
        """How many answers are those of the text in the prompt."""
        return sum(getattr(one, way).text.strip() == one.with_text.text.strip() for one in self.asked)

    def document(self) -> dict[str, Any]:
        """JSON values."""
        if not self.asked:
            return {"left_out": "it did not come that far"}
        return {
            "name": NAME, "version": self.version, "prefix_tokens": self.prefix_tokens, "entries": ENTRIES, "build_seconds": self.build_seconds,
            "publish_seconds": self.published.get("seconds"), "sizes": self.card["sizes"], "fidelity": self.fidelity,
            "answers": [one.document() for one in self.asked], "same_answers": {way: self.same(way) for way in ("without", "behind")},
            "seconds_to_first": self.seconds_to_first, "likelihood": self.likelihood and asdict(self.likelihood),
        }  # fmt: skip

    def wrong(self) -> list[str]:
        """What is not as it should be, in words."""
        found = [words for one in self.asked for words in one.wrong(self.version, self.prefix_tokens)]
        if (self.published.get("version"), self.published.get("current")) != (self.version, True):
            found.append(f"{NAME}: {self.version[:12]} was built, the store has made {self.published.get('version')} current")
        held_out = {name: figures["agreement"] for name, figures in self.fidelity.items()}
        if held_out.get("dictionary", 0.0) <= held_out.get("nothing", 1.0):
            found.append(
                f"{NAME}: next-token agreement on held-out traces is not better than without: {held_out or 'none was measured'}"
            )
        if self.same("behind") <= self.same("without"):
            found.append(
                f"{NAME}: {self.same('behind')} of {len(self.asked)} answers behind it are those of the text in the prompt, "
                f"{self.same('without')} with neither"
            )
        scored = self.likelihood
        if scored is not None and scored.behind <= scored.without:
            found.append(
                f"{NAME}: the text's answers are no likelier behind it than without: {scored.behind:.2f}, {scored.without:.2f}"
            )
        seconds = self.seconds_to_first
        if seconds["behind"] >= seconds["with_text"]:
            found.append(
                f"{NAME}: the first token behind it came after {seconds['behind']:.2f} s, with the text after {seconds['with_text']:.2f} s"
            )
        return found


def build(act: PrefixAct, state: FabricState, home: Path, view: StepView) -> None:
    """Build and publish, by the commands that a user would give. Raises StartFailed, StopRequested."""
    logs, out = RunFolder(home).logs, home / NAME
    began = time.monotonic()
    act.card = _printed(jobs.build_prefix(NAME, state.model_dir, TEXT_FILE, TRACES_FILE, out, ENTRIES, SOURCE), logs, view)
    act.build_seconds = time.monotonic() - began
    act.published = _printed(jobs.publish_prefix(out, record_of(state, STORE).listen), logs, view)
    view.rest()


def ask(act: PrefixAct, state: FabricState, model: str) -> Iterator[Asked]:
    """The answers as they come. Raises Unavailable."""
    with connect(state.gateway_url, None) as client:
        for one in answers(client, model):
            act.asked.append(one)
            yield one


def score(act: PrefixAct, state: FabricState) -> list[str]:
    """Have the answers scored; what kept it from being done, in words."""
    from treadle.client import Fabric  # gRPC takes 100 ms to import

    tokenizer = tokenizer_of(Path(state.model_dir) / "tokenizer.json")

    def ids_of(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    with Fabric(worker=record_of(state, WORKER).listen, key=state.worker_key()) as sdk:
        try:
            act.likelihood = likelihood(sdk.worker, ids_of, act.asked)
        except DataLoss as error:
            return [f"{NAME}: {error}"]
    return []


def _printed(spec: JobSpec, logs: Path, view: StepView) -> dict[str, Any]:
    """The JSON document that a command prints."""
    supervisor = Supervisor(logs, view)
    try:
        with supervisor.signals():
            output = supervisor.run(spec)
        return dict(json.loads(output))
    except ValueError as error:
        raise StartFailed(f"{spec.name} did not print a JSON document: {error}", spec.name) from error
    finally:
        supervisor.close()

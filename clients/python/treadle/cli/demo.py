"""`treadle demo`: a fabric of its own, the same prompts without and with the shipped memory, what it does to text that it has not
learnt, where its rows came from; then a long prefix, built, published and asked for; and nothing left behind.

Owns the order of the show and what counts as failed in the first act. What is asked is in `demo_answers` and `held_out`, what is compared
in `demo_evidence`, how it looks in `demo_report`; the second act is `demo_prefix`, the fabric `demo_fabric`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli import demo_answers, demo_prefix, demo_prefix_report, demo_report, jobs
from treadle.cli.conversation import connect
from treadle.cli.demo_answers import Pair
from treadle.cli.demo_evidence import PoolCounters, Served, gathered, wrong_counts
from treadle.cli.demo_fabric import demo_fabric, interruptible, record_of, temporary_home
from treadle.cli.demo_prefix import PrefixAct
from treadle.cli.events import Event
from treadle.cli.fabric import POOL, WORKER
from treadle.cli.fabric_options import DEFAULT_MODEL, FabricOptions
from treadle.cli.gateway import get, served_model
from treadle.cli.held_out import NO_MEMORY, Score, blocks_of, measure
from treadle.cli.memories import GrownMemory, held_out_text, shipped_memory
from treadle.cli.run_folder import FabricState, RunFolder
from treadle.cli.supervisor import JobSpec, StartFailed, StopRequested, Supervisor
from treadle.cli.terminal import EXIT_INTERRUPTED, StepView, print_error, print_json, stderr, stdout
from treadle.cli.worker_engine import WorkerEngine
from treadle.contract.errors import InvalidArgument, NotFound
from treadle.contract.policy import TransportChoice

if TYPE_CHECKING:
    from treadle.contract import EngramModel

HELD_OUT_TOKENS_MIN = 4096  # on a few hundred, chance alone moves shuffled rows by nearly as much as is allowed
HELD_OUT_TOKENS = HELD_OUT_TOKENS_MIN  # three times that is a minute's work for one slow core; more makes the figures steadier
WITH_RATIO_MAX = 0.9  # perplexity with the memory over that without it
SHUFFLED_RATIO_MAX = 0.02  # how far that with shuffled rows may be from it; on few tokens, of any text, chance has its part
SHUFFLED_BAND = f"±{100 * SHUFFLED_RATIO_MAX:.0f} %"
BENCH_SECONDS_MAX = 900.0


@dataclass(slots=True)
class Show:
    """What the demo found; `failures` empty: all went well."""

    model: str = ""
    engine: str = ""
    memory: GrownMemory | None = None
    pairs: list[Pair] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    served: dict[str, Served] = field(default_factory=dict)
    counted: PoolCounters | None = None
    prefix: PrefixAct = field(default_factory=PrefixAct)
    processes: dict[str, int] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """What `demo --json` prints."""
        memory, scores = self.memory, self.scores
        return {
            "ok": not self.failures, "model": self.model, "engine": self.engine,
            "memory": memory and {"name": memory.name, "version": memory.model.version, "card": memory.card},
            "answers": [pair.document() for pair in self.pairs],
            "perplexity": {variant: score.document() for variant, score in zip(("without", "with", "shuffled"), scores.values(), strict=False)},
            "served": [one.document() for one in self.served.values()],
            "pool_counted": self.counted and {"rows_sent": self.counted.rows_sent, "weights_bytes": self.counted.weights_bytes},
            "prefix": self.prefix.document(), "processes": self.processes,
            "bench": self.bench, "failures": self.failures,
        }  # fmt: skip


def demo(
    model: Annotated[str, typer.Option(help="A model folder (Hugging Face layout), or a name to fetch.")] = DEFAULT_MODEL,
    engram_transport: Annotated[TransportChoice, typer.Option(help="How rows reach the worker.")] = TransportChoice.MAPPED,
    tokens: Annotated[
        int,
        typer.Option(
            min=HELD_OUT_TOKENS_MIN,
            help=f"Tokens of held-out text to measure on. Shuffled rows are expected within {SHUFFLED_BAND} of none.",
        ),
    ] = HELD_OUT_TOKENS,
    engine: Annotated[
        WorkerEngine, typer.Option(help="What runs the model. vllm: needs the environment that `make vllm-env` makes.")
    ] = WorkerEngine.EMBEDDED,
    worker_command: Annotated[str, typer.Option(help="What starts the worker; default: as the engine needs it.")] = "",
    bench: Annotated[
        bool, typer.Option(help="Also compare tokens/s with a large random table: without, local, mapped, rpc.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Show what the shipped memory does to answers and to held-out text, and what a long prefix costs as attention states.

    The same prompts and the same text without the memory, with it, and with its rows in each other's places; then where the rows came
    from. Then a text is built into a dictionary and published, and questions are answered with the text in their prompt, with neither, and
    behind the dictionary. A figure that is not as expected is an error.
    """
    show = Show()
    try:
        with interruptible(), temporary_home(show.failures) as home, StepView() as view:
            folder, served_as = _model(model, home, view)
            show.memory = _memory(Path(folder))
            shuffled = _shuffle(show.memory, home)
            options = FabricOptions(
                model=folder, served_as=served_as, memories=(str(home / shuffled.name),), engram_transport=engram_transport, gateway_port=0,
                port_base=0, engine=engine, worker_command=worker_command,
            )  # fmt: skip
            with demo_fabric(options, home, view, show.failures) as state:
                view.rest()
                before = _pool_counters(state)
                _answers(state, show, quiet=as_json)
                _perplexities(state, show, shuffled.name, tokens, view, quiet=as_json)
                _evidence(state, before, show, shuffled, engram_transport, quiet=as_json)
                _engine(state, show, engine, quiet=as_json)
                _prefix(state, home, show, view, quiet=as_json)
                _processes(state, RunFolder(home), show, quiet=as_json)
                if bench:
                    _bench(state, home, view, show, quiet=as_json)
    except (KeyboardInterrupt, StopRequested):
        stderr().print("stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print_json(show.document())
    for failure in show.failures:
        print_error(failure)
    if show.failures:
        raise typer.Exit(1)


def _model(model: str, home: Path, view: StepView) -> tuple[str, str]:
    """(folder, name to serve it under): found in, or fetched into, the usual cache, not the temporary home."""
    if (Path(model).expanduser() / "config.json").exists():
        return str(Path(model).expanduser().absolute()), ""
    supervisor = Supervisor(home / "run" / "logs", view)
    try:
        with supervisor.signals():
            return jobs.fetched_folder(supervisor.run(jobs.fetch_model(model))), model
    finally:
        supervisor.close()


def _memory(model_dir: Path) -> GrownMemory:
    memory = shipped_memory()
    if memory is None:
        raise NotFound(
            "the installed engram-pool comes without a memory to show; pip install --force-reinstall treadle-engram-pool"
        )
    if misfit := memory.misfit(model_dir):
        raise InvalidArgument(f"{misfit}; the demo shows the memory that was made for {memory.made_for}")
    return memory


def _shuffle(memory: GrownMemory, home: Path) -> EngramModel:
    """A second memory with the same rows in wrong places, made beside the fabric's own files."""
    from treadle.cli.shuffled_memory import write_shuffled

    name = f"{memory.name}-shuffled"
    return write_shuffled(memory.folder, home / name, name=name)


def _answers(state: FabricState, show: Show, quiet: bool) -> None:
    assert show.memory is not None
    show.model = served_model(state.gateway_url)
    with connect(state.gateway_url, None) as client:
        for pair in demo_answers.pairs(client, show.model, show.memory.name):
            if not quiet and not show.pairs:
                stdout().print(demo_report.answers_title(show.model, show.memory), soft_wrap=True)
            show.pairs.append(pair)
            show.failures += pair.wrong(show.memory.name)
            if not quiet:
                stdout().print(demo_report.pair_view(pair))


def _perplexities(state: FabricState, show: Show, shuffled: str, tokens: int, view: StepView, quiet: bool) -> None:
    """Held-out text through the worker: without, with, and with the rows in wrong places."""
    from treadle.client import Fabric  # gRPC takes 100 ms to import

    assert show.memory is not None
    blocks = blocks_of(held_out_text(), Path(state.model_dir) / "tokenizer.json", tokens)

    def tick(done: int, of: int) -> None:
        view(Event("progress", "held-out text", f"block {done} of {of}"))

    with Fabric(worker=record_of(state, WORKER).listen, key=state.worker_key()) as sdk:
        show.scores = measure(sdk.worker, blocks, (NO_MEMORY, show.memory.name, shuffled), tick)
    view.rest()
    without, informed, wrong_rows = show.scores.values()
    ratio, spoilt = informed.perplexity / without.perplexity, wrong_rows.perplexity / without.perplexity
    if ratio >= WITH_RATIO_MAX:
        show.failures.append(f"perplexity with the memory is {ratio:.3f}x of that without it; below {WITH_RATIO_MAX}x was expected")
    if abs(spoilt - 1.0) > SHUFFLED_RATIO_MAX:
        show.failures.append(
            f"perplexity with shuffled rows is {spoilt:.3f}x of that without it; within {SHUFFLED_BAND} was expected"
        )
    show.failures += [
        f"{score.degraded} blocks were measured with rows missing" for score in show.scores.values() if score.degraded
    ]
    if not quiet:
        stdout().print(demo_report.perplexity_view(list(show.scores.values()), SHUFFLED_BAND))


def _pool_counters(state: FabricState) -> PoolCounters:
    from treadle.client import Fabric

    pool = record_of(state, POOL)
    with Fabric(engram=pool.listen) as sdk:
        return PoolCounters.of(sdk.engram.list_models(), get(f"http://{pool.metrics}/metrics").decode())


def _evidence(
    state: FabricState, before: PoolCounters, show: Show, shuffled: EngramModel, transport: TransportChoice, quiet: bool
) -> None:
    """What the answers, the worker and the pool say of the rows has to be one story."""
    from treadle.client import Fabric

    assert show.memory is not None
    pool, worker = record_of(state, POOL).listen, record_of(state, WORKER).listen
    with Fabric(engram=pool, worker=worker, key=state.worker_key()) as sdk:
        show.served = gathered(show.pairs, show.scores, sdk.worker.status(), sdk.engram.list_models(), before)
    show.counted = _pool_counters(state).since(before)
    for model in (show.memory.model, shuffled):
        show.failures += show.served[model.name].wrong(model.version, transport)
    show.failures += wrong_counts(show.served.values(), show.counted)
    if not quiet:
        stdout().print(demo_report.served_table(list(show.served.values())))
        stdout().print(demo_report.counted_words(show.counted), style="dim")


def _engine(state: FabricState, show: Show, asked: WorkerEngine, quiet: bool) -> None:
    """The worker itself says what runs its model."""
    from treadle.client import Fabric

    with Fabric(worker=record_of(state, WORKER).listen, key=state.worker_key()) as sdk:
        status = sdk.worker.status()
    show.engine = f"{status.engine} {status.engine_version}, {status.dtype}"
    if status.engine != asked:
        show.failures.append(f"the worker runs the engine {status.engine or 'that it does not name'}, {asked} was asked for")
    if not quiet:
        stdout().print(f"the model ran on the engine {show.engine}", style="dim")


def _prefix(state: FabricState, home: Path, show: Show, view: StepView, quiet: bool) -> None:
    """The second act. Where it cannot be built or published, that is a failure and the rest goes on."""
    act = show.prefix
    try:
        demo_prefix.build(act, state, home, view)
    except StartFailed as error:
        show.failures.append(str(error))
        return
    if not quiet:
        stdout().print(demo_prefix_report.built_view(act))
    for asked in demo_prefix.ask(act, state, show.model):
        if not quiet:
            stdout().print(demo_prefix_report.asked_view(asked))
    show.failures += [*demo_prefix.score(act, state), *act.wrong()]
    if not quiet:
        stdout().print(demo_prefix_report.figures_table(act))
        stdout().print(demo_prefix_report.origin_words(act), style="dim", markup=False)


def _processes(state: FabricState, folder: RunFolder, show: Show, quiet: bool) -> None:
    """The same process of each service has to have done all of it."""
    now = folder.read() or state
    for before in state.services:
        after = record_of(now, before.service)
        show.processes[before.service] = after.process.pid if after.process else 0
        if after.restarts or after.process != before.process:
            show.failures.append(f"{before.service} was started again in between; `treadle logs {before.service}` says why")
    if not quiet:
        stdout().print(demo_report.processes_words(show.processes), style="dim")


def _bench(state: FabricState, home: Path, view: StepView, show: Show, quiet: bool) -> None:
    """The comparison of tokens/s with the speed profile's table, in a process of its own against the demo's pool."""
    argv = (
        *jobs.python_module("treadle.cli"), "bench", "chat", "--quick", "--json",
        "--pool", record_of(state, POOL).listen, "--model-dir", state.model_dir,
    )  # fmt: skip
    supervisor = Supervisor(RunFolder(home).logs, view)
    try:
        with supervisor.signals():
            show.bench = json.loads(supervisor.run(JobSpec("bench", argv, BENCH_SECONDS_MAX, jobs.child_environment())))
    except (StartFailed, ValueError) as error:
        show.failures.append(str(error))
        return
    finally:
        supervisor.close()
    view.rest()
    if not show.bench.get("rows"):
        show.failures.append("`treadle bench chat` measured nothing")
    elif not quiet:
        stdout().print(demo_report.bench_table(show.bench))
        stdout().print("\n".join(demo_report.bench_goals(show.bench)), style="dim", markup=False)

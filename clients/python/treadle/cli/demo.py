"""`treadle demo`: a fabric of its own, three questions, the figures, and nothing left behind.

Owns the order of the show and what counts as failed. How figures look is in `demo_report`.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.cli import fabric
from treadle.cli.background import BackgroundFabric
from treadle.cli.conversation import Answer, Conversation, connect
from treadle.cli.demo_report import bench_goals, bench_table, engram_figures, engram_table, fusion_words
from treadle.cli.fabric import POOL, WORKER, EngramFusion, EngramTransport, FabricOptions, child_environment, python_module
from treadle.cli.gateway import served_model
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord
from treadle.cli.supervisor import JobSpec, StartFailed, StopRequested, Supervisor
from treadle.cli.terminal import EXIT_INTERRUPTED, StepView, print_error, print_json, stderr, stdout

QUESTIONS = (
    "What is the capital of France?",
    "In one sentence: what does a loom do?",
    "Name three things that are made of thread.",
)
ANSWER_TOKENS_MAX = 64  # five seconds each on two busy cores
BENCH_SECONDS_MAX = 900.0


@dataclass(slots=True)
class Show:
    """What the demo found, as its JSON document; `failures` empty: all went well."""

    model: str = ""
    fusion: str = ""
    answers: list[dict[str, Any]] = field(default_factory=list)
    engram: dict[str, Any] = field(default_factory=dict)
    bench: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def demo(
    model: Annotated[str, typer.Option(help="A model folder (Hugging Face layout), or a name to fetch.")] = fabric.DEFAULT_MODEL,
    engram_transport: Annotated[EngramTransport, typer.Option(help="How rows reach the worker.")] = EngramTransport.MAPPED,
    engram_fusion: Annotated[
        EngramFusion, typer.Option(help="shadow: compute all, add nothing. on: add the rows' part.")
    ] = EngramFusion.SHADOW,
    bench: Annotated[bool, typer.Option(help="Compare tokens/s without Engram, local, mapped and rpc.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document at the end.")] = False,
) -> None:
    """Bring up a fabric, ask three questions, show what the memory did, take all of it down."""
    show = Show()
    try:
        with _interruptible(), _temporary_home(show) as home, StepView() as view:
            options = _options(model, engram_transport, engram_fusion, home, view)
            with _fabric(options, home, view, show) as state:
                view.rest()
                _questions(state, show, quiet=as_json)
                _figures(state, show, quiet=as_json)
                if bench:
                    _bench(state, home, view, show, quiet=as_json)
    except (KeyboardInterrupt, StopRequested):
        stderr().print("stopped")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        print_json(_document(show))
    for failure in show.failures:
        print_error(failure)
    if show.failures:
        raise typer.Exit(1)


def _options(model: str, transport: EngramTransport, fusion: EngramFusion, home: Path, view: StepView) -> FabricOptions:
    """The demo's fabric: free ports, and a model folder found in (or fetched into) the usual cache, not the temporary home."""
    folder, served_as = model, ""
    if not (Path(model).expanduser() / "config.json").exists():
        served_as = model
        supervisor = Supervisor(home / "run" / "logs", view)
        try:
            with supervisor.signals():
                folder = fabric.fetched_folder(supervisor.run(fabric.fetch_model(model)))
        finally:
            supervisor.close()
    return FabricOptions(
        model=folder, served_as=served_as, engram_transport=transport, engram_fusion=fusion, gateway_port=0, port_base=0
    )  # fmt: skip


@contextmanager
def _fabric(options: FabricOptions, home: Path, view: StepView, show: Show) -> Iterator[FabricState]:
    """The fabric, up; afterwards drained, and that nothing is left of it is checked."""
    background = BackgroundFabric(options, RunFolder(home), tether=True)
    state = None
    try:
        state = background.wait_up(view)
        yield state
    finally:
        code = background.stop()
        if code:
            show.failures.append(f"the fabric ended with exit code {code}")
        if state is not None:
            left = _left_behind(state)
            show.failures += left
            if not left:
                stderr().print("the fabric is down; no process and nothing in shared memory is left")


def _left_behind(state: FabricState) -> list[str]:
    left = [
        f"{record.service} still runs (pid {record.process.pid})"
        for record in state.services
        if record.process and record.process.alive()
    ]
    if Path(state.segment_dir).exists():
        left.append(f"{state.segment_dir} is still there")
    return left


def _questions(state: FabricState, show: Show, quiet: bool) -> None:
    show.model, show.fusion = served_model(state.gateway_url), ""
    console = stdout()
    if not quiet:
        console.print(
            f"\n[bold]Three questions to {show.model}[/] through {state.gateway_url}/v1 (OpenAI's own client)\n", soft_wrap=True
        )
    with connect(state.gateway_url, None) as client:
        for question in QUESTIONS:
            if not quiet:
                console.print(f"[bold cyan]> {question}[/]")
            talk = Conversation(client, show.model, max_tokens=ANSWER_TOKENS_MAX, temperature=0.0)
            answer = talk.ask(question, _ignore if quiet else _write)
            if not quiet:
                _write("\n\n")
            if answer.stopped:
                raise KeyboardInterrupt
            show.answers.append(_answer_document(question, answer))
            show.failures += _wrong_with(question, answer)


def _answer_document(question: str, answer: Answer) -> dict[str, Any]:
    return {
        "question": question, "answer": answer.text, "finish_reason": answer.finish_reason, "usage": answer.usage,
        "seconds_to_first": answer.seconds_to_first, "seconds": answer.seconds, "treadle": answer.memory,
    }  # fmt: skip


def _wrong_with(question: str, answer: Answer) -> list[str]:
    wrong = []
    if not answer.text.strip():
        wrong.append(f"the answer to {question!r} is empty")
    if answer.broke_off:
        wrong.append(f"the answer to {question!r} broke off")
    if answer.memory.get("degraded"):
        wrong.append(f"the answer to {question!r} was made with memory missing")
    return wrong


def _figures(state: FabricState, show: Show, quiet: bool) -> None:
    """What each Engram layer did, from the worker's own counters."""
    from treadle.client import Fabric  # gRPC takes 100 ms to import

    with Fabric(worker=_record(state, WORKER).listen) as sdk:
        show.engram = engram_figures(sdk.worker.status())
    show.fusion = "on" if show.engram["fused"] else "shadow"
    layers = show.engram["layers"]
    if not layers:
        show.failures.append("the worker has no Engram layers")
    for layer in layers:
        if not layer["tickets"] or layer["tickets"] != layers[0]["tickets"]:
            show.failures.append(
                f"layer {layer['layer']}: {layer['tickets']} tickets, layer {layers[0]['layer']} had {layers[0]['tickets']}"
            )
        if layer["rows_missing"]:
            show.failures.append(f"layer {layer['layer']}: {layer['rows_missing']} rows never came")
    if not quiet:
        console = stdout()
        console.print(engram_table(show.engram))
        console.print(fusion_words(show.engram), style="dim")


def _bench(state: FabricState, home: Path, view: StepView, show: Show, quiet: bool) -> None:
    """The comparison of tokens/s, in a process of its own against the demo's pool."""
    argv = (
        *python_module("treadle.cli"), "bench", "chat", "--quick", "--json",
        "--pool", _record(state, POOL).listen, "--model-dir", state.model_dir,
    )  # fmt: skip
    supervisor = Supervisor(RunFolder(home).logs, view)
    try:
        with supervisor.signals():
            show.bench = json.loads(supervisor.run(JobSpec("bench", argv, BENCH_SECONDS_MAX, child_environment())))
    except (StartFailed, ValueError) as error:
        show.failures.append(str(error))
        return
    finally:
        supervisor.close()
    view.rest()
    if not show.bench.get("rows"):
        show.failures.append("`treadle bench chat` measured nothing")
    elif not quiet:
        stdout().print(bench_table(show.bench))
        stdout().print("\n".join(bench_goals(show.bench)), style="dim", markup=False)


@contextmanager
def _temporary_home(show: Show) -> Iterator[Path]:
    """A home for this run alone; kept for its logs if something failed."""
    home = Path(tempfile.mkdtemp(prefix="treadle-demo-"))
    kept = True
    try:
        yield home
        kept = bool(show.failures)
    except (KeyboardInterrupt, StopRequested):
        kept = False
        raise
    finally:
        if kept:
            stderr().print(f"logs are kept in {home / 'run' / 'logs'}", soft_wrap=True)
        else:
            shutil.rmtree(home, ignore_errors=True)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM drains as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _record(state: FabricState, service: str) -> ServiceRecord:
    record = state.service(service)
    if record is None:
        raise StartFailed(f"the fabric has no {service}")
    return record


def _document(show: Show) -> dict[str, Any]:
    return {
        "ok": not show.failures, "model": show.model, "fusion": show.fusion, "answers": show.answers, "engram": show.engram,
        "bench": show.bench, "failures": show.failures,
    }  # fmt: skip


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _ignore(text: str) -> None:
    """Nobody watches the answer come."""

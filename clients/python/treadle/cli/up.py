"""`treadle up` and `treadle down`: a fabric on this machine comes and goes.

Owns their options and what they print; the life of a fabric is in `fabric`, its background process in `background`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from treadle.cli import fabric
from treadle.cli.background import BackgroundFabric
from treadle.cli.fabric import FabricRun
from treadle.cli.fabric_options import (
    DEFAULT_MODEL,
    GATEWAY_PORT,
    PORT_BASE,
    EngramFusion,
    EngramTable,
    FabricOptions,
)
from treadle.cli.gateway import ServedName, first_key, served_names
from treadle.cli.process_group import kill_group
from treadle.cli.process_mark import ProcessMark
from treadle.cli.run_folder import FabricState, RunFolder, ServiceRecord, home
from treadle.cli.segments import sweep_abandoned
from treadle.cli.supervisor import DRAIN_SECONDS, READY_SECONDS, StopRequested
from treadle.cli.terminal import EXIT_INTERRUPTED, StepView, print_json, size_text, stderr, stdout
from treadle.cli.worker_engine import WorkerEngine
from treadle.contract.errors import Unavailable
from treadle.contract.policy import TransportChoice

DOWN_SECONDS = 4 * DRAIN_SECONDS + 10.0  # gateway, workers together, store and pool, one after another; then files and locks
MEMORIES_TOLD_MAX = 8  # in one line
KILL_SECONDS = 5.0  # the kernel needs milliseconds, unless a disk hangs


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is up; `treadle down` stops it.")] = False,
    model: Annotated[str, typer.Option(help="A model folder (Hugging Face layout), or a name to fetch.")] = DEFAULT_MODEL,
    engram: Annotated[bool, typer.Option(help="Start a pool whose memories requests can choose.")] = True,
    engram_table: Annotated[
        EngramTable,
        typer.Option(
            help="shipped: load the memory that comes with treadle. speed: a large random table for every request, shadowed. none."
        ),
    ] = EngramTable.SHIPPED,
    memory: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder that `treadle engram grow` wrote, to load; can be given several times.", exists=True, file_okay=False
        ),
    ] = None,
    engram_default: Annotated[str, typer.Option(help="Memory of requests that choose none; not given: none.")] = "",
    engram_transport: Annotated[TransportChoice, typer.Option(help="How rows reach the worker.")] = TransportChoice.AUTO,
    engram_fusion: Annotated[
        EngramFusion,
        typer.Option(help="on: add the rows' part. shadow: compute all, add nothing. auto: on for memories that were grown."),
    ] = EngramFusion.AUTO,
    asm: Annotated[bool, typer.Option(help="Start a store of dictionaries, the long prefixes that requests can choose.")] = True,
    asm_dir: Annotated[
        Path | None,
        typer.Option(help="Where the store keeps them; default: asm in $TREADLE_HOME, else in ~/.cache/treadle.", file_okay=False),
    ] = None,
    engine: Annotated[
        WorkerEngine, typer.Option(help="What runs the model. vllm: needs the environment that `make vllm-env` makes.")
    ] = WorkerEngine.EMBEDDED,
    worker_command: Annotated[
        str, typer.Option(help="What starts the worker, e.g. 'PYTHON -m inference_worker'; default: as the engine needs it.")
    ] = "",
    workers: Annotated[int, typer.Option(help="How many workers; each loads the model, all read the one pool.")] = 1,
    served_model_name: Annotated[
        str, typer.Option(help="Name under which clients ask for the model; default: the model's own.")
    ] = "",
    host: Annotated[str, typer.Option(help="Address of the gateway. Beyond loopback it needs --api-key-file.")] = "127.0.0.1",
    gateway_port: Annotated[int, typer.Option(help="Port of the gateway; 0: a free one.")] = GATEWAY_PORT,
    port_base: Annotated[int, typer.Option(help="Base of the other services' ports; 0: free ones.")] = PORT_BASE,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with keys that the gateway accepts, one a line.", exists=True)
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Longest wait for one service to be ready, seconds; five times that for vllm.")
    ] = READY_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document once it is up.")] = False,
) -> None:
    """Bring up pool, store, worker and gateway on this machine, and keep them up."""
    options = FabricOptions(
        model=model, served_as=served_model_name, engram=engram, engram_table=engram_table,
        memories=tuple(str(folder.absolute()) for folder in memory or ()), engram_default=engram_default,
        engram_transport=engram_transport, engram_fusion=engram_fusion, host=host, gateway_port=gateway_port, port_base=port_base,
        ready_seconds=timeout, engine=engine, worker_command=worker_command, workers=workers,
        api_key_file=str(api_key_file.absolute()) if api_key_file else "",
        asm=asm, asm_dir=str(asm_dir.absolute()) if asm_dir else "",
    )  # fmt: skip
    folder = RunFolder(home())
    first_key(options.api_key_file)  # it asks its gateway what it serves: with no key to show, say so before anything starts
    try:
        with StepView() as view:
            if detach:
                state = BackgroundFabric(options, folder).wait_up(view)
                view.rest()
                print_up(folder, state, as_json, "`treadle down` stops it.")
            else:
                FabricRun(folder, options, view).run(partial(_print_up_in_foreground, folder, view, as_json))
    except (StopRequested, KeyboardInterrupt):
        stderr().print("stopped before it was up")
        raise typer.Exit(EXIT_INTERRUPTED) from None


def _print_up_in_foreground(folder: RunFolder, view: StepView, as_json: bool, state: FabricState) -> None:
    view.rest()
    print_up(folder, state, as_json, "Ctrl-C stops it.")


def print_up(folder: RunFolder, state: FabricState, as_json: bool, how_to_stop: str) -> None:
    """Say where everything is, for people or for programs."""
    key = first_key(state.api_key_file)
    names = served_names(state.gateway_url, key)
    model = names[0].id
    if as_json:
        print_json(up_document(folder, state, names))
        return
    from rich.markup import escape

    console = stdout()
    lines = [f"[bold green]treadle is up[/] (pid {state.supervisor.pid}). {how_to_stop}"]
    lines += [f"  [bold]{'OpenAI API':<18}[/] {state.gateway_url}/v1   model {escape(model)}"]
    for record in state.services:
        metrics = f"{state.gateway_url}/metrics" if record.service == fabric.GATEWAY else f"http://{record.metrics}/metrics"
        lines += [f"  {record.service:<18} {record.listen:<21} metrics {metrics}"]
    lines += [f"  {'memories':<18} {escape(memory_line(names))}"] if state.service(fabric.POOL) else []
    lines += [f"  {'logs':<18} {escape(str(folder.logs))}", ""]
    for line in lines:
        console.print(line, soft_wrap=True)
    for line in curl_lines(state.gateway_url, model, bool(key)):
        console.print(line, soft_wrap=True, markup=False)


def curl_lines(url: str, model: str, with_key: bool) -> list[str]:
    """A request to paste into a shell."""
    body = '{"model": "%s", "messages": [{"role": "user", "content": "What is a loom?"}]}' % model  # noqa: UP031 - braces
    key = ["  -H 'Authorization: Bearer KEY' \\"] if with_key else []
    return [f"curl {url}/v1/chat/completions \\", "  -H 'Content-Type: application/json' \\", *key, f"  -d '{body}'"]


def memory_line(names: Sequence[ServedName]) -> str:
    """Which memories can be chosen and how, from what the gateway lists: the model first, then its aliases."""
    base, aliases = names[0], [name for name in names[1:] if name.engram]
    if not aliases:
        return "none to choose; `treadle pool load --grown FOLDER` brings one, nothing has to restart"
    told = ", ".join(name.engram for name in aliases[:MEMORIES_TOLD_MAX]) + (", …" if len(aliases) > MEMORIES_TOLD_MAX else "")
    default = f"; {base.engram} unless they choose" if base.engram else ""
    return f'{told}{default}: requests choose by "model": "{aliases[0].id}", people by treadle chat --engram {aliases[0].engram}'


def up_document(folder: RunFolder, state: FabricState, names: Sequence[ServedName]) -> dict[str, Any]:
    """What `up --json` prints."""
    memories = [
        {"name": name.engram, "version": name.version, "model": name.id, "default": name.engram == names[0].engram}
        for name in names[1:] if name.engram
    ]  # fmt: skip
    return {
        "gateway_url": state.gateway_url, "model": names[0].id, "model_dir": state.model_dir, "pid": state.supervisor.pid,
        "worker_key_file": state.worker_key_file, "segment_dir": state.segment_dir, "logs": str(folder.logs), "memories": memories,
        "services": [asdict(record) for record in state.services],
    }  # fmt: skip


def down(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Stop what `treadle up` started. Nothing up is no error."""
    folder = RunFolder(home())
    was_up, how = take_down(folder)
    if as_json:
        print_json({"was_up": was_up, "how": how})
    else:
        stdout().print(how, soft_wrap=True)


def take_down(folder: RunFolder) -> tuple[bool, str]:
    """(was it up, what was done). Drains; kills with a message what does not go; sweeps what a crash left."""
    state = folder.read_any()
    if state is None or not state.supervisor.alive():
        freed = _clean_up(folder, state.services if state else ())
        return False, "nothing is up" + (f"; freed {size_text(freed)} that a crashed run left" if freed else "")
    console, supervisor = stderr(), state.supervisor
    supervisor.send(signal.SIGTERM)
    with console.status(f"waiting for the drain (at most {DOWN_SECONDS:.0f} s)") if console.is_terminal else StepView(console):
        gone = supervisor.wait_gone(DOWN_SECONDS)
    if gone:
        return True, f"stopped (pid {supervisor.pid})"
    console.print(f"pid {supervisor.pid} did not drain within {DOWN_SECONDS:.0f} s: killing it and its services", soft_wrap=True)
    _kill(folder, supervisor)
    return True, f"killed (pid {supervisor.pid})"


def _kill(folder: RunFolder, supervisor: ProcessMark) -> None:
    """Kill a supervisor that does not drain, its services with all that they started, and free their segments."""
    supervisor.send(signal.SIGSTOP)  # so that it starts none anew, and reaps none: their numbers go on meaning them
    state = folder.read_any()
    services = state.services if state is not None else ()
    _kill_groups(services)
    supervisor.send(signal.SIGKILL)
    supervisor.wait_gone(KILL_SECONDS)
    _clean_up(folder, services)


def _clean_up(folder: RunFolder, services: tuple[ServiceRecord, ...]) -> int:
    """After a supervisor that did not drain: kill what is left of its services, free its segments; bytes freed."""
    with folder.lock():  # a fabric that starts right now is not ours to clean
        return _remove_remains(folder, services)


def _remove_remains(folder: RunFolder, services: tuple[ServiceRecord, ...]) -> int:
    for mark in _kill_groups(services):  # the kernel has killed them already, unless they were started without a tether
        if not mark.wait_gone(KILL_SECONDS):
            raise Unavailable(f"pid {mark.pid} does not die; it may wait for a disk")
    folder.forget()
    return sweep_abandoned(folder.home)


def _kill_groups(services: tuple[ServiceRecord, ...]) -> list[ProcessMark]:
    """SIGKILL to those that still run and to whatever they started; the marks of all."""
    marks: list[ProcessMark] = [record.process for record in services if record.process is not None]
    for mark in marks:
        if mark.alive():  # else its number may mean another's group by now
            kill_group(mark.pid)
    return marks

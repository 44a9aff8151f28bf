"""`treadle status`: what runs here, and how it is doing.

Owns asking each service of the run folder; the figures themselves are the services'.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from treadle.cli.fabric import GATEWAY, POOL, STORE, WORKER, kind_of
from treadle.cli.gateway import get
from treadle.cli.logs import failure_lines
from treadle.cli.run_folder import FabricState, Failure, RunFolder, ServiceRecord, home
from treadle.cli.terminal import print_json, size_text, stdout
from treadle.contract.errors import TreadleError

if TYPE_CHECKING:
    from rich.table import Table

_NOTES_OF_STAGE = {"ready": "no such process", "failing": "dies again and again; it goes on being started, its log says more"}
VERSION_DIGITS_SHOWN = 12
MEMORY_COLUMNS_MIN = 14  # for a name; the other columns, with counts up to a billion, leave as much of 80
ASK_SECONDS = 2.0  # for one service; a busy machine answers in milliseconds


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """One service now. `figures`: what it says of itself; `note`: the same in a few words, or why it says nothing."""

    service: str
    pid: int | None
    address: str
    stage: str
    ready: bool
    uptime_seconds: float | None
    restarts: int
    figures: dict[str, Any]
    note: str


def status(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False) -> None:
    """Show what is up. The exit code is 0 only if everything is ready."""
    folder = RunFolder(home())
    state = folder.read()
    failure = folder.read_failure() if state is None else None
    services = [service_status(record, state) for record in state.services] if state else []
    ready = state is not None and state.stage == "ready" and all(service.ready for service in services)
    if as_json:
        print_json(_document(state, services, ready) | ({"last_failure": asdict(failure)} if failure else {}))
    else:
        _print(state, services, failure)
    if not ready:
        raise typer.Exit(1)


def service_status(record: ServiceRecord, state: FabricState) -> ServiceStatus:
    """Ask one service how it is; whatever it answers, or that it does not, ends up in the status."""
    alive = record.process is not None and record.process.alive()
    uptime = time.time() - record.process.created_at_seconds if alive and record.process else None
    ready, figures, note = False, {}, _NOTES_OF_STAGE.get(record.stage, "")
    if alive and record.stage == "ready":
        try:
            kind = kind_of(record.service)
            figures = _ASK[kind](record, state)
            ready, note = not figures.get("draining", False), _NOTES[kind](figures)
        except TreadleError as error:
            note = str(error)
    pid = record.process.pid if record.process else None
    return ServiceStatus(record.service, pid, record.listen, record.stage, ready, uptime, record.restarts, figures, note)


def _ask_pool(record: ServiceRecord, state: FabricState) -> dict[str, Any]:
    from treadle.client import Fabric  # gRPC takes 100 ms to import

    with Fabric(engram=record.listen, timeout_seconds=ASK_SECONDS) as fabric:
        pool, models = fabric.engram.status(), fabric.engram.list_models()
    return {
        "table_bytes": pool.table_bytes, "page_bytes": pool.page_bytes, "draining": pool.draining,
        "models": [
            {"model": m.model.name, "version": m.version, "current": m.current, "bytes": m.segment_bytes, "readers": m.readers}
            for m in models
        ],
    }  # fmt: skip


def _ask_store(record: ServiceRecord, state: FabricState) -> dict[str, Any]:
    from treadle.client import Fabric

    with Fabric(asm=record.listen, timeout_seconds=ASK_SECONDS) as fabric:
        store, kept = fabric.asm.status(), fabric.asm.list()
    return {
        "file_bytes": store.file_bytes, "file_bytes_max": store.file_bytes_max, "draining": store.draining,
        "lookups": store.lookups, "evictions": store.evictions, "replica": store.replica, "replicas": list(store.replicas),
        "dictionaries": [
            {"name": one.name, "version": one.version, "current": one.current, "bytes": one.file_bytes, "readers": one.readers}
            for one in kept
        ],
    }  # fmt: skip


def _ask_worker(record: ServiceRecord, state: FabricState) -> dict[str, Any]:
    from treadle.client import Fabric

    with Fabric(worker=record.listen, key=state.worker_key(), timeout_seconds=ASK_SECONDS) as fabric:
        worker = fabric.worker.status()
    return {
        "engine": worker.engine, "engine_version": worker.engine_version, "dtype": worker.dtype,
        "model": worker.model, "requests_running": worker.requests_running, "requests_waiting": worker.requests_waiting,
        "steps": worker.steps, "prompt_tokens": worker.prompt_tokens, "completion_tokens": worker.completion_tokens,
        "cached_tokens": worker.cached_tokens, "engram_model": worker.engram_model, "engram_transport": worker.engram_transport,
        "engram_fused": worker.engram_fused, "draining": worker.draining,
        "tickets": sum(layer.tickets for layer in worker.engram_layers),
        "tickets_in_time": sum(layer.tickets_in_time for layer in worker.engram_layers),
        "memories": [
            {"model": m.model, "version": m.version, "default": m.default, "open": m.open, "requests": m.requests, "tokens": m.tokens,
             "transport": m.transport, "fused": m.fused, "refusal": m.refusal}
            for m in worker.engram_models
        ],
        "prefixes": [
            {"name": p.name, "version": p.version, "prefix_tokens": p.prefix_tokens, "open": p.open, "requests": p.requests,
             "mapped_bytes": p.mapped_bytes, "refusal": p.refusal, "fallbacks": p.fallbacks}
            for p in worker.prefixes
        ],
    }  # fmt: skip


def _ask_gateway(record: ServiceRecord, state: FabricState) -> dict[str, Any]:
    body = get(f"{state.gateway_url}/ready", seconds=ASK_SECONDS)
    try:
        answer = json.loads(body)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def pool_note(figures: dict[str, Any]) -> str:
    """What a pool holds, from its figures."""
    models = figures["models"]
    names = sorted({str(model["model"]) for model in models})
    what = ", ".join(names) or "no tables"
    if len(models) > len(names):  # a name alone would hide what its older versions take
        what += f" ({len(names)} {'name' if len(names) == 1 else 'names'}, {len(models)} versions)"
    return f"{what}: {size_text(sum(model['bytes'] for model in models))}, {figures['page_bytes'] >> 10} KiB pages"


def store_note(figures: dict[str, Any]) -> str:
    """What a store keeps, from its figures."""
    kept = figures["dictionaries"]
    names = sorted({str(one["name"]) for one in kept})
    what = ", ".join(names) or "no dictionaries"
    if len(kept) > len(names):
        what += f" ({len(names)} {'name' if len(names) == 1 else 'names'}, {len(kept)} versions)"
    return f"{what}: {size_text(figures['file_bytes'])} of {size_text(figures['file_bytes_max'])}"


def _worker_note(figures: dict[str, Any]) -> str:
    engine = " ".join(filter(None, (figures["engine"], figures["engine_version"], figures["dtype"])))
    load = f"{figures['model']} on {engine}: {figures['requests_running']} running, {figures['requests_waiting']} waiting"
    load += f", {figures['completion_tokens']} tokens made"
    if not figures["engram_model"]:
        return load
    return f"{load}; rows {figures['engram_transport']}, {figures['tickets_in_time']} of {figures['tickets']} tickets in time"


_ASK: dict[str, Callable[[ServiceRecord, FabricState], dict[str, Any]]] = {
    POOL: _ask_pool, STORE: _ask_store, WORKER: _ask_worker, GATEWAY: _ask_gateway,
}  # fmt: skip
_NOTES: dict[str, Callable[[dict[str, Any]], str]] = {
    POOL: pool_note, STORE: store_note, WORKER: _worker_note, GATEWAY: lambda figures: "ready",
}  # fmt: skip


def _document(state: FabricState | None, services: list[ServiceStatus], ready: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"up": state is not None, "ready": ready}
    if state is not None:
        document |= {"stage": state.stage, "step": state.step, "pid": state.supervisor.pid, "gateway_url": state.gateway_url}
    return document | {"services": [asdict(service) for service in services]}


def _print(state: FabricState | None, services: list[ServiceStatus], failure: Failure | None) -> None:
    console = stdout()
    if state is None:
        console.print("nothing is up; `treadle up` starts a fabric")
        if failure is not None:
            console.print("\n".join(failure_lines(failure)), soft_wrap=True, markup=False)
        return
    step = f", {state.step}" if state.step else ""
    console.print(
        f"treadle is {'up' if state.stage == 'ready' else state.stage}{step} (pid {state.supervisor.pid})", soft_wrap=True
    )
    if services:
        console.print(_table(services))
    # Of the first worker alone: the others read the same pool, and what they count stands in their own notes.
    worker: dict[str, Any] = next((service.figures for service in services if "memories" in service.figures), {})
    memories, prefixes = worker.get("memories", []), worker.get("prefixes", [])
    if named := [memory for memory in memories if memory["model"]]:
        console.print(memory_table(named))
    if prefixes:
        console.print(prefix_table(prefixes))
    for memory in memories:
        if memory["refusal"]:
            console.print(f"{memory['model'] or 'memories'}: {memory['refusal']}", markup=False)
    for prefix in prefixes:
        if prefix["refusal"]:
            console.print(f"{prefix['name'] or 'prefixes'}: {prefix['refusal']}", markup=False)
    for service in services:
        if service.note:
            console.print(f"{service.service}: {service.note}", markup=False)


def _table(services: list[ServiceStatus]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("service", "pid", "address", "state", "uptime", "restarts"):
        table.add_column(column, justify="right" if column in ("pid", "uptime", "restarts") else "left", no_wrap=True)
    for service in services:
        stage = "ready" if service.ready else f"not ready ({service.stage})" if service.stage == "ready" else service.stage
        style = "green" if service.ready else "yellow"
        uptime = "" if service.uptime_seconds is None else _duration(service.uptime_seconds)
        table.add_row(
            service.service, str(service.pid or ""), service.address, f"[{style}]{stage}[/]", uptime, str(service.restarts)
        )  # fmt: skip
    return table


def memory_table(memories: Sequence[dict[str, Any]]) -> Table:
    """What requests can choose, a line for each memory; one that is closed opens when it is first used."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("memory", min_width=MEMORY_COLUMNS_MIN, overflow="fold")  # a name is what requests choose by: never cut
    for column in ("version", "state", "requests", "tokens", "rows"):
        table.add_column(column, justify="right" if column in ("requests", "tokens") else "left", no_wrap=True)
    for memory in memories:
        state = "refused" if memory["refusal"] else "open" if memory["open"] else "closed"
        rows = " ".join(filter(None, (memory["transport"], "added" if memory["fused"] else "shadowed")))
        table.add_row(
            memory["model"] + (" (default)" if memory["default"] else ""), memory["version"][:VERSION_DIGITS_SHOWN], state,
            f"{memory['requests']:,}", f"{memory['tokens']:,}", rows,
        )  # fmt: skip
    return table


def prefix_table(prefixes: Sequence[dict[str, Any]]) -> Table:
    """The long prefixes that requests can choose, a line for each dictionary."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("prefix", min_width=MEMORY_COLUMNS_MIN, overflow="fold")
    numbers = ("requests", "tokens", "mapped", "fallbacks")
    for column in ("version", "state", *numbers):
        table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
    for prefix in prefixes:
        state = "refused" if prefix["refusal"] else "open" if prefix["open"] else "closed"
        table.add_row(
            prefix["name"], prefix["version"][:VERSION_DIGITS_SHOWN], state, f"{prefix['requests']:,}", f"{prefix['prefix_tokens']:,}",
            size_text(prefix["mapped_bytes"]), f"{prefix['fallbacks']:,}",
        )  # fmt: skip
    return table


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {rest:02}s" if minutes else f"{rest}s"

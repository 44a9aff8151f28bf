"""`treadle bench …`: every figure of docs/benchmarks.md, one command for each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.contract.errors import NotFound, Unavailable
from treadle_bench.asm.commands import app as asm
from treadle_bench.flags import Json, Quick, Strict, exit_unless_met

app = typer.Typer(
    no_args_is_help=True,
    help="Measure this machine: gather, attach, peers, ring, cache, hints, cuda, hash, ticket, remote, load, chat, serve, memories, asm; and what a memory gains: grow. Each figure has its baseline.",
)
app.add_typer(asm, name="asm")


@app.command()
def gather(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Rows of a 2.5 GB table, against Listing 1 of the CXL paper, the read-only pass, numpy, torch and engramdb (needs 5 GB of memory)."""
    try:
        from treadle_bench.gather import measure
    except ImportError as error:
        raise NotFound(
            f"the baselines were not built ({error}); install a C++20 compiler with OpenMP, then this package again"
        ) from error
    from treadle_bench.report import show

    rows, goals, notes = measure(quick=quick)
    show(rows, goals, as_json=json, title="gather", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def attach(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Clients that map the tables of a real pool: time to attach and to get warm, memory that each adds (needs 5 GB of memory)."""
    from treadle_bench.attach import measure
    from treadle_bench.report import show

    rows, goals, notes = measure(quick=quick)
    show(rows, goals, as_json=json, title="attach", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def peers(
    quick: Quick = False,
    json: Json = False,
    only: Annotated[list[str] | None, typer.Option(help="Only this peer, such as mapped, numpy or redis; may be repeated.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write latency against tokens to this file, .svg or .png.")] = None,
) -> None:
    """Rows of models' tables by numpy, torch, engramdb, service-ple, Redis, LMDB, Mooncake, and by treadle (8 minutes, 12 GB)."""
    from treadle_bench.peers.command import run_and_show

    exit_unless_met(strict=True, met=[run_and_show(only=only or (), quick=quick, as_json=json, plot_to=plot)])


@app.command()
def ring(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Rows by the shared-memory ring of a real pool, beside the mapping and gRPC (needs 3 GB of memory; root for 2 MiB pages)."""
    from treadle_bench.report import show
    from treadle_bench.ring import measure

    rows, goals = measure(quick=quick)
    show(rows, goals, as_json=json, title="ring", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def cache(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    texts: Annotated[Path | None, typer.Option(help="Folder with text files, for the trace of real text.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="SmolLM2's tokenizer.json; default: the fetched model's.")] = None,
) -> None:
    """Hot rows before a table on a disk: hit rates and time with and without, and what a probe takes (needs 2 GB of disk)."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.cache import fetched_tokenizer, measure
    from treadle_bench.report import show

    rows, goals = measure(quick=quick, texts=texts, tokenizer=tokenizer or fetched_tokenizer())
    show(rows, goals, as_json=json, title="cache", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def hints(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Lookups of cold prompts on a disk, with and without a hint by the gateway before (needs 300 MB of disk)."""
    from treadle_bench.hints import measure
    from treadle_bench.report import show

    rows, goals, notes = measure(quick=quick)
    show(rows, goals, as_json=json, title="hints", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def cuda(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Rows from the host's copy straight to a GPU, against a plain pinned copy. Exit code 2 where there is no GPU, or no `make cuda`."""
    try:
        from treadle_bench.cuda import measure

        rows, goals, notes = measure(quick=quick)
    except (ImportError, Unavailable) as error:
        typer.echo(f"treadle bench cuda: not run: {error}", err=True)
        raise typer.Exit(2) from error
    from treadle_bench.report import show

    show(rows, goals, as_json=json, title="cuda", quick=quick, notes=notes)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command("hash")
def hash_(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Tokens to row ids, native against numpy, for each family."""
    from treadle_bench.hashing import measure
    from treadle_bench.report import show

    rows, goals = measure(quick=quick)
    show(rows, goals, as_json=json, title="hash", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def ticket(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """How soon a prefetch starts beside a busy Python thread, by native and by Python threads."""
    from treadle_bench.report import show
    from treadle_bench.tickets import measure

    rows, goals = measure(quick=quick)
    show(rows, goals, as_json=json, title="ticket", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def remote(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Rows of another process: the native socket against a raw socket and the gather (needs 1.5 GB; as root another host too)."""
    from treadle_bench.remote import measure
    from treadle_bench.report import show

    rows, goals, skipped = measure(quick=quick)
    show(rows, goals, as_json=json, title="remote", quick=quick, notes=[f"not measured: {text}" for text in skipped])
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def load(quick: Quick = False, json: Json = False, strict: Strict = False) -> None:
    """Tables into shared memory through a real pool (needs 5 GB of memory)."""
    from treadle_bench.loading import measure
    from treadle_bench.report import show

    rows, goals = measure(quick=quick)
    show(rows, goals, as_json=json, title="load", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def chat(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    pool: Annotated[str, typer.Option(help="Address of a pool that holds the model; empty: a pool of our own.")] = "",
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
) -> None:
    """The embedded engine without Engram, and with its rows local, mapped and by rpc (Table 2 of the CXL paper on this machine)."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.chat import measure
    from treadle_bench.report import show

    rows, goals, extra = measure(quick=quick, pool_address=pool, model_dir=model_dir)
    show(rows, goals, as_json=json, title="chat", quick=quick, extra=extra)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def serve(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    engine: Annotated[str, typer.Option(help="embedded, vllm or both.")] = "embedded",
    worker_command: Annotated[str, typer.Option(help="What starts a vLLM worker; default: that of .venv-vllm.")] = "",
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
) -> None:
    """Workers without Engram and with its rows by each transport, on one and two hosts: Tables 2 and 3 of the CXL paper (10 minutes an engine)."""
    from treadle_bench.serve.command import run_and_show

    goals = run_and_show(quick=quick, as_json=json, engine=engine, worker_command=worker_command, model_dir=model_dir)
    exit_unless_met(strict and not quick, goals)


@app.command()
def grow(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    report: Annotated[bool, typer.Option("--report", help="Run nothing: the table of what the work folder holds.")] = False,
    shipped: Annotated[
        bool, typer.Option("--shipped", help="Measure the memory that comes with treadle, alone (ten minutes).")
    ] = False,
    work: Annotated[
        Path | None, typer.Option(help="Folder that keeps figures and half-grown memories; default: in the cache.")
    ] = None,
    texts: Annotated[Path | None, typer.Option(help="Folder with the Project Gutenberg books.")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only runs whose name begins so, such as kjv-memory; may be repeated.")
    ] = None,
    budget_minutes: Annotated[float, typer.Option(min=0.0, help="Start no run after so many minutes; 0: run everything.")] = 0.0,
    jobs: Annotated[int, typer.Option(help="Runs at once, one thread each.")] = 1,
    stop_at: Annotated[int, typer.Option(min=0, help="Leave marks beyond so many tokens for another day; 0: none.")] = 0,
) -> None:
    """What a memory grown from text gains on texts held out, beside controls, n-grams and LoRA (hours; goes on where it stopped)."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.grow.command import GrowOptions, evaluate_shipped, run_and_show

    options = GrowOptions(work, texts, model_dir, tuple(only or ()), budget_minutes, jobs, stop_at, quick=quick, as_json=json)
    goals = evaluate_shipped(options) if shipped else run_and_show(options, run=not report)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command()
def memories(
    quick: Quick = False,
    json: Json = False,
    strict: Strict = False,
    transport: Annotated[str, typer.Option(help="How rows come: mapped, local or rpc.")] = "mapped",
    model_dir: Annotated[Path | None, typer.Option(help="Folder of the language model; default: smollm2-135m, fetched.")] = None,
) -> None:
    """One batch whose 16 requests use 16 memories, against one in which all use the same; and what adding a memory costs."""
    from treadle.chassis.threads import set_compute_threads

    set_compute_threads(1)
    from treadle_bench.memories import measure
    from treadle_bench.report import show

    rows, goals = measure(quick=quick, transport=transport, model_dir=model_dir)
    show(rows, goals, as_json=json, title="memories", quick=quick)
    exit_unless_met(strict and not quick, [goal.met for goal in goals])


@app.command("all")
def all_(quick: Quick = False, strict: Strict = False) -> None:
    """Every figure of this machine, one after the other (about 20 minutes); not `grow` and `serve`, which take long, `peers`, which installs what others made, nor `cuda`."""
    missed = False
    for command in (hash_, ticket, gather, attach, ring, remote, hints, cache, load, chat, memories):
        try:
            command(quick=quick, strict=strict)
        except typer.Exit:
            missed = True
    exit_unless_met(strict, [not missed])

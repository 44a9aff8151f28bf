"""`treadle plan`: bytes, bandwidth, latency, room and cost of a model's tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from treadle.cli.terminal import print_json
from treadle.contract.errors import InvalidArgument

MODELS = "27b, 40b, 100b, 400b, v4.1, qwen-ple, qwen-ple-bf16, qwen-ple-nf4"


def plan(
    model: Annotated[str, typer.Argument(help=f"Model: {MODELS}; none with --manifest.")] = "",
    manifest: Annotated[Path | None, typer.Option(help="Plan for an EngramModel manifest instead.")] = None,
    hosts: Annotated[int, typer.Option(help="Inference hosts.")] = 1,
    throughput: Annotated[
        float | None, typer.Option(help="Tokens a second, all hosts together; none: what --batch and --step-ms give.")
    ] = None,
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a step.")] = 3.6,
    batch: Annotated[int, typer.Option(help="Tokens of a step on one host.")] = 256,
    decoder_layers: Annotated[int | None, typer.Option(help="Layers of the language model; none: the known model's.")] = None,
    bench: Annotated[
        list[Path] | None, typer.Option(help="What `treadle bench … --json` wrote: what this fabric gives; may be given again.")
    ] = None,
    host_memory_gb: Annotated[float, typer.Option(help="GB for tables in a host; the paper's hosts have 1 TiB.")] = 1099.511627776,
    pool_gb: Annotated[float, typer.Option(help="GB of a CXL pool; the paper's switch reaches 4 TB.")] = 4000.0,
    replicas: Annotated[int, typer.Option(help="Copies of every row, where rows are spread over hosts.")] = 1,
    dram_price: Annotated[float, typer.Option(help="Dollars for a GB of DRAM (Table 4 of the CXL paper).")] = 15.0,
    switch_price: Annotated[float, typer.Option(help="Dollars for a CXL switch of 32 ports.")] = 5_800.0,
    adapter_price: Annotated[float, typer.Option(help="Dollars for a host's CXL adapter.")] = 210.0,
    controller_price: Annotated[float, typer.Option(help="Dollars for a CXL memory controller, one a host.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Plan the memory of an Engram model: bytes, bandwidth and latency, what fits where, local DRAM against a CXL pool."""
    from treadle.cli.plan.cost import Prices  # with numpy behind it, which `treadle --help` need not wait for
    from treadle.cli.plan.demand import Workload
    from treadle.cli.plan.models import GB, known_model, manifest_model
    from treadle.cli.plan.placement import Room
    from treadle.cli.plan.planning import make_plan
    from treadle.cli.plan.report import document, show

    if bool(model) == (manifest is not None):
        raise InvalidArgument(f"give a model ({MODELS}) or --manifest FILE")
    planned = known_model(model, decoder_layers) if manifest is None else manifest_model(manifest, decoder_layers)
    made = make_plan(
        planned, Workload(hosts, batch, step_ms / 1e3, throughput), Prices(dram_price, switch_price, adapter_price, controller_price),
        Room(host_memory_gb * GB, pool_gb * GB, replicas), bench or (),
    )  # fmt: skip
    if as_json:
        print_json(document(made))
    else:
        show(made)

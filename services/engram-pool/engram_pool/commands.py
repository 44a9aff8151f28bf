"""`treadle pool`: load, list, promote, verify, remove, push and pull tables of a running pool.

Owns words, tables and progress bars; the work is the pool's, reached through the SDK. Errors are TreadleError: the `treadle`
command prints them and exits with 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram_pool.load_options import PROFILES, read_limited, roles, share, template, tokenizer_beside
from engram_pool.load_turn import in_turn
from engram_pool.terminal import (
    VERSION_DIGITS,
    bytes_of,
    model_document,
    model_line,
    owner_document,
    owner_line,
    print_json,
    print_line,
    print_loaded,
    print_promoted,
    print_pushed,
    print_table,
    progress_bar,
    size_text,
    tenant_line,
)
from treadle.contract import InvalidArgument, NotFound

if TYPE_CHECKING:
    from treadle.client import Fabric
    from treadle.client.engram.pool_types import ResidentModel

app = typer.Typer(no_args_is_help=True, help="Load, list, promote, verify, remove, push and pull tables of a running pool.")

Pool = Annotated[str, typer.Option("--pool", envvar="TREADLE_POOL", help="Address of the pool, host:port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="TREADLE_API_KEY_FILE", help="File whose first line is a key of the pool.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[str, typer.Argument(help="Version, or its first digits; none: the current one.")]
StoredName = Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="Name of the model, and version.")]
Store = Annotated[str, typer.Option("--store", envvar="TREADLE_STORE", help="Master of the Mooncake Store, host:port.")]
StoreProtocol = Annotated[str, typer.Option("--protocol", help="What the bytes move by: tcp or rdma.")]
DEFAULT_POOL = "127.0.0.1:7401"


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name to load as; none: the manifest's, or the checkpoint folder's.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Safetensors file or folder, on the pool's host.")] = None,
    grown: Annotated[
        Path | None, typer.Option(help="Folder that `treadle engram grow` wrote, on the pool's host; brings its own manifest.")
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Make rows up from a seed.")] = False,
    manifest: Annotated[Path | None, typer.Option(help="EngramModel manifest, JSON without tables.")] = None,
    profile: Annotated[str, typer.Option(help=f"A manifest known by name: {', '.join(PROFILES)}.")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, from which the token map is made.")] = None,
    token_map: Annotated[Path | None, typer.Option(help="The token map itself: int32, little-endian.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="ROLE=TENSOR",
            help="Tensor of a role: 2.rows=NAME, 2.scale=NAME, 2.rows.0=NAME; one * stands for shards.",
        ),
    ] = None,
    row_dtype: Annotated[
        str, typer.Option(help="What U8 rows of a checkpoint without a manifest hold: nf4 or int4; none: as its config.json says.")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="Seed of random rows.")] = 0,
    peers: Annotated[
        list[str] | None, typer.Option("--peer", metavar="HOST:PORT", help="A pool that holds the version NAME, whole or in parts.")
    ] = None,
    version: Annotated[str, typer.Option(help="Version at the peers, all digits; none: the current one.")] = "",
    owners: Annotated[str, typer.Option(help="Names of all owners, by commas: keep only what --owner owns of the tables.")] = "",
    owner: Annotated[str, typer.Option(help="Which of --owners this pool is.")] = "",
    replicas: Annotated[int, typer.Option(min=1, help="Owners of each stretch of rows.")] = 1,
    stretch_rows: Annotated[int, typer.Option(min=0, help="Rows of a stretch, at most; 0: as many as suit the table.")] = 0,
    keep_previous: Annotated[
        bool | None, typer.Option(help="Keep the version that is current now; without either: kept where --grown is given.")
    ] = None,
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Load tables: a grown memory, a DeepSeek-V4.1 or Qwen PLE checkpoint, [rows, dim] tensors with a manifest, other pools' or random rows."""
    if [grown is not None, checkpoint is not None, random, bool(peers)].count(True) != 1:
        raise InvalidArgument("give one of --grown FOLDER, --checkpoint PATH, --peer HOST:PORT and --random")
    if peers and (not name or manifest or profile or tokenizer or token_map):
        raise InvalidArgument("peers bring manifest and token map: give the model's name, and leave those options out")
    if version and not peers:
        raise InvalidArgument("--version names a version at peers; other sources make theirs")
    placement = share(owners, owner, replicas, stretch_rows)
    if placement is not None and grown is not None:
        raise InvalidArgument("a grown memory is kept whole: leave --owners out")
    if (names or row_dtype) and checkpoint is None:
        raise InvalidArgument("--map and --row-dtype are about tensors of a checkpoint; grown and random rows have none")
    if grown is not None and (manifest or profile or tokenizer or token_map):
        raise InvalidArgument("a grown folder brings its own manifest and token map: leave those options out")
    if checkpoint is not None and tokenizer is None and token_map is None and not profile:
        tokenizer = tokenizer_beside(checkpoint, manifest)
    model, ids = template(name, manifest, profile, tokenizer, token_map) if grown is None and not peers else (None, None)
    if model is None and random:
        raise InvalidArgument(f"random rows need --manifest FILE or --profile {PROFILES[0]}")
    keep = grown is not None if keep_previous is None else keep_previous
    ask: Callable[..., ResidentModel]
    with _fabric(pool, api_key_file) as fabric, progress_bar("loading") as report:
        if grown is not None:
            ask = partial(fabric.engram.load_grown, grown.absolute(), name or None)
        elif peers:
            ask = partial(fabric.engram.load_peers, peers, name, version or None, placement=placement)
        elif checkpoint is not None:
            ask = partial(
                fabric.engram.load_checkpoint, checkpoint.absolute(), model, ids, tensors=roles(names or []),
                name=name if model is None else "", row_dtype=row_dtype, placement=placement,
            )  # fmt: skip
        else:
            assert model is not None
            ask = partial(fabric.engram.load_random, model, ids, seed=seed, placement=placement)
        loaded, seconds = in_turn(partial(ask, keep_previous=keep, progress=report))
    print_loaded(loaded, seconds, as_json)


@app.command()
def promote(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version, or its first digits.")],
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Make a resident version current: new requests get it, those in progress keep theirs."""
    with _fabric(pool, api_key_file) as fabric:
        if not version:
            raise InvalidArgument(
                f"give the version to make current, or its first digits; `treadle pool rollback {name}` goes back"
            )
        promoted = fabric.engram.promote(name, _full_version(fabric, name, version))
    print_promoted(promoted, as_json)


@app.command()
def rollback(name: Name, pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False) -> None:
    """Go back to the version that was current before; once more goes forward again."""
    with _fabric(pool, api_key_file) as fabric:
        promoted = fabric.engram.promote(name)
    print_promoted(promoted, as_json)


@app.command("ls")
def list_models(pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False) -> None:
    """List what is resident, the current version of each model first."""
    with _fabric(pool, api_key_file) as fabric:
        models = fabric.engram.list_models()
    if as_json:
        print_json([model_document(model) for model in models])
        return
    columns = ("model", "version", "current", "layers", "size", "readers", "loaded")
    print_table(columns, [model_line(model) for model in models], empty="the pool holds no tables; `treadle pool load` brings some")


@app.command()
def verify(
    name: Name, version: Version = "", pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False
) -> None:
    """Read a version again and compare every checksum. A version that does not fit leaves service, and the exit code is 1."""
    begun = time.monotonic()
    with _fabric(pool, api_key_file) as fabric, progress_bar("verifying") as report:
        full = _full_version(fabric, name, version)
        checked = fabric.engram.verify(name, full, report)
    seconds = time.monotonic() - begun
    if as_json:
        print_json({"model": name, "version": full, "bytes": checked, "seconds": round(seconds, 3), "intact": True})
    else:
        print_line(f"{name} {full[:VERSION_DIGITS]}: {size_text(checked)} intact, {seconds:.1f} s")


@app.command("rm")
def remove(
    name: Name,
    version: Annotated[str, typer.Argument(help="Version, or its first digits; none: all of them.")] = "",
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Take a version, or all of a model, off the list. Its memory goes when no reader holds it."""
    with _fabric(pool, api_key_file) as fabric:
        full = _full_version(fabric, name, version) if version else None
        removed, awaiting = fabric.engram.remove(name, full)
    if as_json:
        print_json({"model": name, "removed": removed, "awaiting_readers": awaiting})
        return
    held = f"; {awaiting} still in memory until readers let go" if awaiting else ""
    print_line(f"{name}: removed {', '.join(version[:VERSION_DIGITS] for version in removed)}{held}")


@app.command("owners")
def list_owners(
    name: Annotated[str, typer.Argument(help="Tell only what they hold of this model; none: of all.")] = "",
    version: Version = "",
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """List the owners of the fabric with their health, as this pool knows them. The exit code is 1 where one cannot be reached."""
    with _fabric(pool, api_key_file) as fabric:
        full = _full_version(fabric, name, version) if name else ""
        listed = fabric.engram.owners(name, full)
    if as_json:
        print_json({"stale": listed.stale, "owners": [owner_document(owner) for owner in listed.owners]})
    else:
        columns = ("owner", "address", "doors", "state", "versions", "rows held")
        print_table(columns, [owner_line(owner) for owner in listed.owners], empty="this pool has told nothing of itself yet")
        if listed.stale:
            print_line("the directory does not answer: this is the last list known")
    if listed.stale or not all(owner.reachable for owner in listed.owners):
        raise typer.Exit(1)


@app.command()
def push(
    name: StoredName, store: Store, replicas: Annotated[int, typer.Option(min=1, help="Store nodes that keep each object.")] = 2,
    part_mib: Annotated[int, typer.Option(min=64, max=1024, help="Size of an object, MiB; a multiple of 4.")] = 64,
    replace: Annotated[bool, typer.Option("--replace", help="Remove objects that are there already.")] = False,
    protocol: StoreProtocol = "tcp", pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Push a version of this host's pool into a Mooncake Store, pinned, and read all of it back. Needs Mooncake here."""
    from treadle.client.engram.mooncake_push import PushOptions

    begun, (model, digits) = time.monotonic(), _name_and_digits(name)
    options = PushOptions(replicas, part_mib << 20, replace)
    with _fabric(pool, api_key_file) as fabric, progress_bar("pushing") as report:
        full = _full_version(fabric, model, digits)
        pushed = fabric.engram.push_store(store, model, full, options=options, protocol=protocol, progress=report)
    print_pushed(pushed, store, time.monotonic() - begun, as_json)


@app.command()
def pull(
    name: StoredName, store: Store, protocol: StoreProtocol = "tcp",
    keep_previous: Annotated[bool, typer.Option(help="Keep the version that is current now.")] = True,
    pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False,
) -> None:  # fmt: skip
    """Have the pool load a version from a Mooncake Store, checksums and version compared; without a version, what was pushed last."""
    model, version = _name_and_digits(name)
    with _fabric(pool, api_key_file) as fabric, progress_bar("pulling") as report:
        ask = partial(fabric.engram.load_store, store, model, version or None, protocol=protocol)
        loaded, seconds = in_turn(partial(ask, keep_previous=keep_previous, progress=report))
    print_loaded(loaded, seconds, as_json)


@app.command()
def reserve(
    name: Annotated[str, typer.Argument(help="Who asks; the same name again replaces the reserve.")],
    rate: Annotated[str, typer.Argument(help="Bandwidth to keep free: bytes a second, or with K, M, G; 0 gives it back.")],
    seconds: Annotated[float, typer.Option(help="How long; renew before it ends.")] = 60.0,
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Keep bandwidth of the pool's memory free for other traffic, such as KV blocks; rows yield to it."""
    with _fabric(pool, api_key_file) as fabric:
        now = fabric.engram.reserve_bandwidth(name, bytes_of(rate), seconds)
    if as_json:
        print_json({"reserved_bytes_per_second": now.reserved_bytes_per_second, "left_bytes_per_second": now.left_bytes_per_second})
        return
    print_line(
        f"reserved {size_text(now.reserved_bytes_per_second)}/s for {seconds:g} s, "
        f"{size_text(now.left_bytes_per_second)}/s are left to rows"
    )


@app.command()
def status(pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False) -> None:
    """Show build, memory and page size of the pool."""
    with _fabric(pool, api_key_file) as fabric:
        now = fabric.engram.status()
    figures = {
        "address": pool, "pid": now.pid, "build_version": now.build_version, "proto_version": now.proto_version,
        "segment_dir": str(now.segment_dir), "table_bytes": now.table_bytes, "table_bytes_max": now.table_bytes_max,
        "page_bytes": now.page_bytes, "draining": now.draining, "scrub_chunks_checked": now.scrub.chunks_checked,
        "scrub_chunks_bad": now.scrub.chunks_bad, "scrub_chunks_repaired": now.scrub.chunks_repaired,
        "scrub_pass_ended_at_seconds": now.scrub.pass_ended_at_seconds,
    }  # fmt: skip
    if as_json:
        print_json(figures | {"tenants": [asdict(tenant) for tenant in now.tenants]})
    else:
        print_table(("", ""), [(name.replace("_", " "), str(value)) for name, value in figures.items()], empty="")
        columns = ("tenant", "rows", "refused", "late", "rows/s at most")
        print_table(columns, [tenant_line(tenant) for tenant in now.tenants], empty="")
    if now.draining:
        raise typer.Exit(1)


def _name_and_digits(text: str) -> tuple[str, str]:
    """NAME or NAME@VERSION as its parts. Raises InvalidArgument."""
    name, at, digits = text.partition("@")
    if not name or (at and not digits):
        raise InvalidArgument(f"NAME or NAME@VERSION, got {text!r}")
    return name, digits


def _full_version(fabric: Fabric, name: str, digits: str) -> str:
    """The one version of `name` that begins with `digits`; the current one for none. Raises NotFound, InvalidArgument."""
    models = [model for model in fabric.engram.list_models() if model.model.name == name]
    found = [m.version for m in models if m.version.startswith(digits) and (digits or m.current)]
    if len(found) > 1:
        raise InvalidArgument(f"{name}: {len(found)} versions begin with {digits!r}; give more digits")
    if not found:
        here = ", ".join(model.version[:VERSION_DIGITS] for model in models)
        raise NotFound(f"{name}: no version {digits!r}; there is {here}" if models else f"no model {name!r} in this pool")
    return found[0]


def _fabric(pool: str, api_key_file: Path | None) -> Fabric:
    from treadle.client import Fabric  # gRPC takes 100 ms that `--help` need not pay

    if api_key_file is None:
        return Fabric(engram=pool)
    keys = [line for line in read_limited(api_key_file, 1 << 16).decode().splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidArgument(f"{api_key_file} holds no key")
    return Fabric(engram=pool, key=keys[0].strip())

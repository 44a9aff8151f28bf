"""`treadle pool load`: a grown memory, a checkpoint, rows of other pools, or random ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram_pool.commands.calling import DEFAULT_POOL, Json, KeyFile, Pool, TlsClient, TlsRoots, fabric_of
from engram_pool.commands.load_options import PROFILES, roles, share, template, tokenizer_beside
from engram_pool.commands.load_turn import in_turn
from engram_pool.terminal import print_loaded, progress_bar
from treadle.contract import InvalidArgument

if TYPE_CHECKING:
    from treadle.client.engram.pool_types import ResidentModel


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
    tls_root_file: TlsRoots = None,
    tls_client_file: TlsClient = None,
    as_json: Json = False,
) -> None:
    """Load tables: a grown memory, a DeepSeek-V4.1 or Qwen PLE checkpoint, [rows, dim] tensors with a manifest, other pools' or random rows."""
    _refuse_mixtures(
        name, grown=grown, checkpoint=checkpoint, random=random, peers=peers, version=version, mapped=bool(names or row_dtype),
        described=bool(manifest or profile or tokenizer or token_map),
    )  # fmt: skip
    placement = share(owners, owner, replicas, stretch_rows)
    if placement is not None and grown is not None:
        raise InvalidArgument("a grown memory is kept whole: leave --owners out")
    tensors = roles(names or [])
    if checkpoint is not None and tokenizer is None and token_map is None and not profile:
        tokenizer = tokenizer_beside(checkpoint, manifest)
    model, ids = template(name, manifest, profile, tokenizer, token_map) if grown is None and not peers else (None, None)
    if model is None and random:
        raise InvalidArgument(f"random rows need --manifest FILE or --profile {PROFILES[0]}")
    keep = grown is not None if keep_previous is None else keep_previous
    ask: Callable[..., ResidentModel]
    with fabric_of(pool, api_key_file, tls_root_file, tls_client_file) as fabric, progress_bar("loading") as report:
        if grown is not None:
            ask = partial(fabric.engram.load_grown, grown.absolute(), name or None)
        elif peers:
            ask = partial(fabric.engram.load_peers, peers, name, version or None, placement=placement)
        elif checkpoint is not None:
            ask = partial(
                fabric.engram.load_checkpoint, checkpoint.absolute(), model, ids, tensors=tensors,
                name=name if model is None else "", row_dtype=row_dtype, placement=placement,
            )  # fmt: skip
        else:
            assert model is not None
            ask = partial(fabric.engram.load_random, model, ids, seed=seed, placement=placement)
        loaded, seconds = in_turn(partial(ask, keep_previous=keep, progress=report))
    print_loaded(loaded, seconds, as_json)


def _refuse_mixtures(
    name: str, *, grown: Path | None, checkpoint: Path | None, random: bool, peers: list[str] | None, version: str, mapped: bool,
    described: bool,
) -> None:  # fmt: skip
    """mapped: tensors of a checkpoint are named; described: a manifest or token map is given. Raises InvalidArgument."""
    if [grown is not None, checkpoint is not None, random, bool(peers)].count(True) != 1:
        raise InvalidArgument("give one of --grown FOLDER, --checkpoint PATH, --peer HOST:PORT and --random")
    if peers and (not name or described):
        raise InvalidArgument("peers bring manifest and token map: give the model's name, and leave those options out")
    if version and not peers:
        raise InvalidArgument("--version names a version at peers; other sources make theirs")
    if mapped and checkpoint is None:
        raise InvalidArgument("--map and --row-dtype are about tensors of a checkpoint; grown and random rows have none")
    if grown is not None and described:
        raise InvalidArgument("a grown folder brings its own manifest and token map: leave those options out")

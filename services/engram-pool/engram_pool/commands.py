"""`treadle pool`: load, list, verify and remove tables of a running pool.

Owns words, tables and progress bars; the work is the pool's, reached through the SDK. Errors are TreadleError: the `treadle`
command prints them and exits with 1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from engram_pool.terminal import (
    VERSION_DIGITS,
    model_document,
    model_line,
    print_json,
    print_line,
    print_loaded,
    print_table,
    progress_bar,
    size_text,
)
from treadle.contract import EngramModel, InvalidArgument, NotFound
from treadle.contract.engram_model import MANIFEST_BYTES_MAX
from treadle.contract.version import check_name

if TYPE_CHECKING:
    from engram_pool.domain.ports import TokenMap
    from treadle.client import Fabric

app = typer.Typer(no_args_is_help=True, help="Load, list, verify and remove Engram tables of a running pool.")

PROFILES = ("smollm2-demo",)  # manifests that treadle.nn knows
CONFIG_BYTES_MAX = 4 << 20

Pool = Annotated[str, typer.Option("--pool", envvar="TREADLE_POOL", help="Address of the pool, host:port.")]
KeyFile = Annotated[
    Path | None, typer.Option("--api-key-file", envvar="TREADLE_API_KEY_FILE", help="File whose first line is a key of the pool.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Name = Annotated[str, typer.Argument(help="Name of the model.")]
Version = Annotated[str, typer.Argument(help="Version, or its first digits; none: the current one.")]
DEFAULT_POOL = "127.0.0.1:7401"


@app.command()
def load(
    name: Annotated[str, typer.Argument(help="Name to load as; none: the manifest's, or the checkpoint folder's.")] = "",
    checkpoint: Annotated[Path | None, typer.Option(help="Safetensors file or folder, on the pool's host.")] = None,
    random: Annotated[bool, typer.Option("--random", help="Make rows up from a seed.")] = False,
    manifest: Annotated[Path | None, typer.Option(help="EngramModel manifest, JSON without tables.")] = None,
    profile: Annotated[str, typer.Option(help=f"A manifest known by name: {', '.join(PROFILES)}.")] = "",
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, from which the token map is made.")] = None,
    token_map: Annotated[Path | None, typer.Option(help="The token map itself: int32, little-endian.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--map", metavar="ROLE=TENSOR", help="Tensor of a role: 2.rows=NAME, 2.scale=NAME; one * stands for numbers."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of random rows.")] = 0,
    keep_previous: Annotated[bool, typer.Option(help="Keep the version that is current now.")] = False,
    pool: Pool = DEFAULT_POOL,
    api_key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Load tables: a DeepSeek-V4.1 checkpoint, plain [rows, dim] tensors with a manifest, or random rows."""
    if random == (checkpoint is not None):
        raise InvalidArgument("give either --checkpoint PATH or --random")
    if random and names:
        raise InvalidArgument("--map names tensors of a checkpoint; random rows have none")
    if checkpoint is not None and tokenizer is None and token_map is None and not profile:
        tokenizer = _tokenizer_beside(checkpoint, manifest)
    model, ids = _template(name, manifest, profile, tokenizer, token_map, checkpoint)
    if model is None and random:
        raise InvalidArgument(f"random rows need --manifest FILE or --profile {PROFILES[0]}")
    begun = time.monotonic()
    with _fabric(pool, api_key_file) as fabric, progress_bar("loading") as report:
        if checkpoint is None:
            assert model is not None
            loaded = fabric.engram.load_random(model, ids, seed=seed, keep_previous=keep_previous, progress=report)
        else:
            loaded = fabric.engram.load_checkpoint(
                checkpoint.absolute(), model, ids, tensors=_roles(names or []), keep_previous=keep_previous, progress=report
            )
    print_loaded(loaded, time.monotonic() - begun, as_json)


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


@app.command()
def status(pool: Pool = DEFAULT_POOL, api_key_file: KeyFile = None, as_json: Json = False) -> None:
    """Show build, memory and page size of the pool."""
    with _fabric(pool, api_key_file) as fabric:
        now = fabric.engram.status()
    figures = {
        "address": pool, "pid": now.pid, "build_version": now.build_version, "proto_version": now.proto_version,
        "segment_dir": str(now.segment_dir), "table_bytes": now.table_bytes, "table_bytes_max": now.table_bytes_max,
        "page_bytes": now.page_bytes, "draining": now.draining,
    }  # fmt: skip
    if as_json:
        print_json(figures)
    else:
        print_table(("", ""), [(name.replace("_", " "), str(value)) for name, value in figures.items()], empty="")
    if now.draining:
        raise typer.Exit(1)


# -- what is asked for ----------------------------------------------------------------------------------------------------


def _template(
    name: str, manifest: Path | None, profile: str, tokenizer: Path | None, token_map: Path | None, checkpoint: Path | None
) -> tuple[EngramModel | None, TokenMap | None]:
    """The manifest and token map to send. No manifest: the pool derives it from the checkpoint's config.json."""
    if manifest is not None and profile:
        raise InvalidArgument("give --manifest or --profile, not both")
    if profile:
        known, made = _profile(profile, tokenizer)
        return replace(known, name=name or known.name), made
    ids = _token_map(tokenizer, token_map)
    if manifest is not None:
        model = EngramModel.from_json(_read(manifest, MANIFEST_BYTES_MAX)).template
        if model.token_map is not None and ids is None:
            raise InvalidArgument(
                f"{manifest}: the family {model.family} needs a token map: give --tokenizer FILE or --token-map FILE"
            )
        return replace(model, name=name or model.name), ids
    if name and checkpoint is not None:
        return replace(_derived(checkpoint, ids), name=check_name(name)), ids
    return None, ids


def _tokenizer_beside(checkpoint: Path, manifest: Path | None) -> Path | None:
    """The tokenizer.json of the checkpoint, if the model needs a token map. Raises InvalidArgument if it needs one and has none.

    None also for a checkpoint that only the pool's host sees: the pool says what is missing.
    """
    if manifest is not None and EngramModel.from_json(_read(manifest, MANIFEST_BYTES_MAX)).token_map is None:
        return None
    found = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "tokenizer.json"
    if found.is_file():
        typer.echo(f"token map: made from {found}", err=True)
        return found
    if manifest is not None or checkpoint.exists():
        raise InvalidArgument(f"the model needs a token map, and there is no {found}: give --tokenizer FILE or --token-map FILE")
    return None


def _derived(checkpoint: Path, ids: TokenMap | None) -> EngramModel:
    """What the pool would derive, made here because it is to have another name."""
    from engram_pool.domain.v41_config import v41_template

    path = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "config.json"
    try:
        config = json.loads(_read(path, CONFIG_BYTES_MAX))
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON") from error
    return v41_template(config if isinstance(config, dict) else {}, path.parent.absolute().name, ids)


def _profile(profile: str, tokenizer: Path | None) -> tuple[EngramModel, TokenMap]:
    if profile not in PROFILES:
        raise NotFound(f"no profile {profile!r}; there is {', '.join(PROFILES)}")
    if tokenizer is None:
        raise InvalidArgument(f"--profile {profile} needs --tokenizer tokenizer.json: its token map is made from it")
    with _treadle_nn():
        from treadle.nn.demo_profile import smollm2_demo_template
    return smollm2_demo_template(tokenizer)


def _token_map(tokenizer: Path | None, token_map: Path | None) -> TokenMap | None:
    from engram_pool.domain.token_maps import TOKEN_MAP_IDS_MAX, read_token_map

    if tokenizer is not None and token_map is not None:
        raise InvalidArgument("give --tokenizer or --token-map, not both")
    if token_map is not None:
        return read_token_map(_read(token_map, 4 * TOKEN_MAP_IDS_MAX))
    if tokenizer is None:
        return None
    with _treadle_nn():
        from treadle.nn.token_map import compressed_token_map
    return compressed_token_map(tokenizer)[0]


@contextmanager
def _treadle_nn() -> Iterator[None]:
    """Token maps need the `tokenizers` library, which the pool itself does without."""
    try:
        yield
    except ImportError as error:
        raise NotFound(
            f"token maps are made by treadle-nn, which is not installed ({error.name}): pip install treadle-nn"
        ) from error


def _roles(names: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in names]
    for role, equals, tensor in pairs:
        if not (role and equals and tensor):
            raise InvalidArgument(f"--map takes ROLE=TENSOR, got {role + equals + tensor!r}")
    return {role: tensor for role, _, tensor in pairs}


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


def _read(path: Path, bytes_max: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidArgument(f"{path} is larger than {bytes_max} bytes")
    return data


def _fabric(pool: str, api_key_file: Path | None) -> Fabric:
    from treadle.client import Fabric  # gRPC takes 100 ms that `--help` need not pay

    if api_key_file is None:
        return Fabric(engram=pool)
    keys = [line for line in _read(api_key_file, 1 << 16).decode().splitlines() if line.strip() and not line.startswith("#")]
    if not keys:
        raise InvalidArgument(f"{api_key_file} holds no key")
    return Fabric(engram=pool, key=keys[0].strip())

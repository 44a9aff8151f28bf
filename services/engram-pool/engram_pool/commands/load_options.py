"""The manifest and token map that `treadle pool load` sends, from its options: files, a profile, a tokenizer.

Owns what is made on the caller's side. Does not talk to a pool (`commands`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from treadle.contract import EngramModel, Family, InvalidArgument, NotFound
from treadle.contract.engram_model import MANIFEST_BYTES_MAX
from treadle.contract.placement import Spread

if TYPE_CHECKING:
    from engram_pool.domain.storing import TokenMap
    from treadle.client.engram.pool_types import OwnerShare

PROFILES = ("smollm2-demo",)  # manifests that treadle.nn knows
CONFIG_BYTES_MAX = 4 << 20


def template(
    name: str, manifest: Path | None, profile: str, tokenizer: Path | None, token_map: Path | None
) -> tuple[EngramModel | None, TokenMap | None]:
    """The manifest and token map to send. No manifest: the pool derives it from the checkpoint."""
    if manifest is not None and profile:
        raise InvalidArgument("give --manifest or --profile, not both")
    if profile:
        known, made = _profile(profile, tokenizer)
        return replace(known, name=name or known.name), made
    ids = _token_map(tokenizer, token_map)
    if manifest is not None:
        model = EngramModel.from_json(read_limited(manifest, MANIFEST_BYTES_MAX)).template
        if model.token_map is not None and ids is None:
            raise InvalidArgument(
                f"{manifest}: the family {model.family} needs a token map: give --tokenizer FILE or --token-map FILE"
            )
        return replace(model, name=name or model.name), ids
    return None, ids


def tokenizer_beside(checkpoint: Path, manifest: Path | None) -> Path | None:
    """The tokenizer.json of the checkpoint, if the model needs a token map. Raises InvalidArgument if a model known to need one has none.

    None also for a checkpoint that only the pool's host sees, or of no family that we know: the pool says what is wrong with it.
    """
    if manifest is not None:
        if EngramModel.from_json(read_limited(manifest, MANIFEST_BYTES_MAX)).token_map is None:
            return None
    elif (family := _family(checkpoint)) is Family.QWEN_PLE:
        return None
    found = (checkpoint if checkpoint.is_dir() else checkpoint.parent) / "tokenizer.json"
    if found.is_file():
        typer.echo(f"token map: made from {found}", err=True)
        return found
    if manifest is not None or family is Family.DEEPSEEK_V41:
        raise InvalidArgument(f"the model needs a token map, and there is no {found}: give --tokenizer FILE or --token-map FILE")
    return None


def _family(checkpoint: Path) -> Family | None:
    """As the config.json that stands here says; None also where only the pool's host sees it, or it is no JSON."""
    from engram_pool.domain.derivation import family_of

    try:
        config = json.loads(
            read_limited((checkpoint if checkpoint.is_dir() else checkpoint.parent) / "config.json", CONFIG_BYTES_MAX)
        )
    except (NotFound, ValueError):
        return None
    return family_of(config) if isinstance(config, dict) else None


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
        return read_token_map(read_limited(token_map, 4 * TOKEN_MAP_IDS_MAX))
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


def share(owners: str, owner: str, replicas: int, stretch_rows: int) -> OwnerShare | None:
    """The part of the tables to keep; None: all. Raises InvalidArgument."""
    if not owners and not owner:
        return None
    if not owners or not owner:
        raise InvalidArgument("--owners and --owner go together: all names, and the one of this pool")
    from treadle.client.engram.pool_types import OwnerShare

    names = tuple(part.strip() for part in owners.split(",") if part.strip())
    if owner not in names:
        raise InvalidArgument(f"--owner: one of {', '.join(names)}, got {owner!r}")
    return OwnerShare(owner, Spread(names, replicas, stretch_rows))


def roles(names: list[str]) -> dict[str, str]:
    """Tensor by role, from ROLE=TENSOR. Raises InvalidArgument."""
    pairs = [text.partition("=") for text in names]
    for role, equals, tensor in pairs:
        if not (role and equals and tensor):
            raise InvalidArgument(f"--map takes ROLE=TENSOR, got {role + equals + tensor!r}")
    return {role: tensor for role, _, tensor in pairs}


def read_limited(path: Path, bytes_max: int) -> bytes:
    """A file of at most `bytes_max`. Raises NotFound, InvalidArgument."""
    try:
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > bytes_max:
        raise InvalidArgument(f"{path} is larger than {bytes_max} bytes")
    return data

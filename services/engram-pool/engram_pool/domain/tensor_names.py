"""Which tensors of a checkpoint play which role: by suffix for the families we know, by the caller's map for others.

A role is `<layer>.rows` or `<layer>.scale`. Its tensor may come in shards: one `*` in a name stands for their numbers, or the map
names them one by one, as `<layer>.rows.<k>`. Shards are joined in the order of their numbers, and none may be missing.
Does not look at dtypes and shapes (`tensor_match`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from engram_pool.domain.sources import Checkpoint, Tensor
from treadle.contract import InvalidArgument

TENSORS_LISTED_MAX = 20  # a refusal shows the largest ones
ROLES_MAX = 4096  # as many as a checkpoint has files
NUMBERS_LISTED_MAX = 8
Shards = tuple[Tensor, ...]  # of one table, along its rows, in order

_PLE = "ple_embedding.ngram_embedding."
SUFFIXES = {
    "rows": ("engram.embed.weight", f"{_PLE}weight", f"{_PLE}shard_*.weight", f"{_PLE}shard_*.weight_packed"),
    "scale": (
        "engram.embed.weight_scale_inv", "engram.embed.weight_scale", "engram.embed.scale_inv", "engram.embed.scale",
        f"{_PLE}weight_scale", f"{_PLE}shard_*.weight_scale", f"{_PLE}shard_*.weight.absmax",
    ),
}  # fmt: skip
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ROLE = re.compile(r"(\d+)\.(rows|scale)(?:\.(\d+))?")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._])|(?<=[._])\d+$")


@dataclass(frozen=True, slots=True)
class Found:
    """Tensors of one layer; `scale` is empty where there is none."""

    rows: Shards
    scale: Shards


def find_tensors(checkpoint: Checkpoint, layers: Iterable[int], names: Mapping[str, str]) -> dict[int, Found]:
    """Tensors for each of `layers`.

    names: role -> tensor name
    Raises InvalidArgument, saying which roles stay open and listing what the checkpoint holds, if rows are missing; also for
    names that do not fit, shards that do, and two tensors for one role.
    """
    layers = tuple(layers)
    _check_roles(layers, names)
    found = {layer: Found(_find(checkpoint, layer, "rows", names), _find(checkpoint, layer, "scale", names)) for layer in layers}
    refuse_open(checkpoint, [f"{layer}.rows" for layer, tensors in found.items() if not tensors.rows])
    return found


def refuse_open(checkpoint: Checkpoint, roles: list[str]) -> None:
    """Raise InvalidArgument if there are open `roles`, listing what the checkpoint holds."""
    if roles:
        suffixes = " or ".join(
            f"`layers.{roles[0].partition('.')[0]}.….{suffix}`" for suffix in SUFFIXES[roles[0].partition(".")[2]]
        )
        which = f"the role {roles[0]}" if len(roles) == 1 else f"each of the roles {', '.join(roles[:NUMBERS_LISTED_MAX])}"
        raise InvalidArgument(f"no tensor is called {suffixes}; name one for {which}. {listed(checkpoint)}")


def listed(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds, the largest first, tensors that differ in a number only as one, for a refusal."""
    alike: dict[tuple[str, str, tuple[int, ...]], list[Tensor]] = {}
    for tensor in checkpoint.tensors.values():
        alike.setdefault((_NUMBER.sub("*", tensor.name), tensor.dtype, tensor.shape), []).append(tensor)
    groups = sorted(alike.items(), key=lambda item: -_bytes(item[1]))
    lines = [
        str(tensors[0]) if len(tensors) == 1 else f"{len(tensors)} x {pattern} {dtype}{list(shape)}"
        for (pattern, dtype, shape), tensors in groups[:TENSORS_LISTED_MAX]
    ]
    more = f", and {len(groups) - len(lines)} smaller ones" if len(groups) > len(lines) else ""
    return f"The checkpoint {checkpoint.name} holds: {', '.join(lines)}{more}"


def height(shards: Shards) -> int:
    """Rows of all shards together."""
    return sum(shard.shape[0] if shard.shape else 1 for shard in shards)


def _check_roles(layers: tuple[int, ...], names: Mapping[str, str]) -> None:
    if len(names) > ROLES_MAX:
        raise InvalidArgument(f"tensors: {len(names)} roles, the limit is {ROLES_MAX}")
    unknown = sorted(role for role in names if not (match := _ROLE.fullmatch(role)) or int(match[1]) not in layers)
    if unknown:
        known = [f"{layer}.{role}" for layer in layers for role in SUFFIXES][:NUMBERS_LISTED_MAX]
        raise InvalidArgument(
            f"tensors: unknown roles {unknown[:NUMBERS_LISTED_MAX]}; there are {known}, and their shards as ROLE.0"
        )


def _find(checkpoint: Checkpoint, layer: int, role: str, names: Mapping[str, str]) -> Shards:
    whole = names.get(f"{layer}.{role}")
    by_number = {
        int(match[3]): name for key, name in names.items() if (match := _ROLE.fullmatch(key)) and match[3] is not None
        and (int(match[1]), match[2]) == (layer, role)
    }  # fmt: skip
    if by_number:
        if whole is not None:
            raise InvalidArgument(f"tensors: {layer}.{role} is named as a whole and by shards; leave one out")
        return _one_by_one(checkpoint, f"{layer}.{role}", by_number)
    if whole is None:
        return _by_suffix(checkpoint, layer, role)
    found = _named(checkpoint, f"{layer}.{role}", whole)
    if not found:
        raise InvalidArgument(f"tensor {whole!r}, named for the role {layer}.{role}, is not there. {listed(checkpoint)}")
    return found


def _one_by_one(checkpoint: Checkpoint, role: str, by_number: Mapping[int, str]) -> Shards:
    _check_sequence(f"the role {role}.*", sorted(by_number))
    ordered = [by_number[number] for number in sorted(by_number)]
    if len(set(ordered)) < len(ordered):
        twice = next(name for place, name in enumerate(ordered) if name in ordered[:place])
        raise InvalidArgument(f"tensors: {twice!r} is named for two shards of {role}")
    missing = [name for name in ordered if name not in checkpoint.tensors]
    if missing:
        raise InvalidArgument(f"tensor {missing[0]!r}, named for a shard of the role {role}, is not there. {listed(checkpoint)}")
    return tuple(checkpoint.tensors[name] for name in ordered)


def _by_suffix(checkpoint: Checkpoint, layer: int, role: str) -> Shards:
    """The one tensor, or one set of shards, that ends as it does in the families we know."""
    names: dict[str, None] = {}  # in order; shards as one, with a `*`
    for name in checkpoint.tensors:
        numbers = _LAYER.findall(name)
        if numbers and int(numbers[-1]) == layer:
            names.update(dict.fromkeys(_starred(name, suffix) for suffix in SUFFIXES[role] if _ending(suffix).search(name)))
    if len(names) > 1:
        some = ", ".join(list(names)[:NUMBERS_LISTED_MAX])
        raise InvalidArgument(f"{layer}.{role}: {some} all fit; name one for the role")
    return _named(checkpoint, f"{layer}.{role}", next(iter(names))) if names else ()


def _ending(suffix: str) -> re.Pattern[str]:
    return re.compile(r"(?:^|\.)" + r"(\d+)".join(map(re.escape, suffix.split("*"))) + "$")


def _starred(name: str, suffix: str) -> str:
    """`name` with a `*` for the number of its shard."""
    match = _ending(suffix).search(name)
    assert match is not None
    return name if "*" not in suffix else f"{name[: match.start(1)]}*{name[match.end(1) :]}"


def _named(checkpoint: Checkpoint, role: str, wanted: str) -> Shards:
    if "*" not in wanted:
        tensor = checkpoint.tensors.get(wanted)
        return (tensor,) if tensor else ()
    before, _, after = wanted.partition("*")
    if "*" in after:
        raise InvalidArgument(f"{role}: one * stands for the numbers of shards, got {wanted!r}")
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after))
    shards = [(int(match[1]), tensor) for name, tensor in checkpoint.tensors.items() if (match := pattern.fullmatch(name))]
    shards.sort(key=lambda shard: shard[0])
    _check_sequence(f"{role}: {wanted}", [number for number, _ in shards])
    return tuple(tensor for _, tensor in shards)


def _check_sequence(what: str, numbers: list[int]) -> None:
    """Raise InvalidArgument unless `numbers`, sorted, are 0 or 1 and up, each once: rows joined with a gap are all other rows."""
    if not numbers:
        return
    there = f"there are {len(numbers)}, from {numbers[0]} to {numbers[-1]}"
    if numbers[-1] >= ROLES_MAX:
        raise InvalidArgument(f"{what}: shards are numbered from 0 or 1 to at most {ROLES_MAX - 1}: {there}")
    if len(set(numbers)) < len(numbers):
        raise InvalidArgument(f"{what}: a shard's number stands twice: {there}")
    missing = sorted(set(range(min(numbers[0], 1), numbers[-1])) - set(numbers))
    if missing:
        raise InvalidArgument(f"{what}: shard {', '.join(map(str, missing[:NUMBERS_LISTED_MAX]))} is missing: {there}")


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.row_bytes * (tensor.shape[0] if tensor.shape else 1) for tensor in tensors)

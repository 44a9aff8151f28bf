"""A version and the dictionary of a further chunk of its prefix become a new version, entry by entry.

Both were made for the same keys, so that nothing is searched or clustered. Layer by layer, in blocks of rows: memory does not grow
with the dictionaries. The new version is shown as any other; the two that it came from stay as they are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.domain.bringing import Bringing
from asm_store.domain.catalogue import Catalogue
from asm_store.domain.checking import row_blocks
from asm_store.domain.compute import Check
from asm_store.domain.extended_card import extended_card
from asm_store.domain.merging import at_rest, merge_entries
from asm_store.domain.pointers import Pointers
from asm_store.domain.ports import Announced, Meters
from asm_store.domain.publishing import Published, Publishing
from asm_store.domain.tenancy import Caller, ask_may_change
from asm_store.domain.tensor_file import TensorFile
from asm_store.domain.versions import FileInfo, Kept, Stored
from treadle.contract.checks import expect
from treadle.contract.dictionary import Calibration, Dictionary, Prefix, tensor_name
from treadle.contract.dictionary_file import TENSORS_FILE, map_tensors
from treadle.contract.errors import FingerprintMismatch, NotFound, Overtaken
from treadle.kernels import as_numbers

COPIED = ("keys", "key_scales", "list_keys", "list_starts", "whitening")  # of the keys: the same in both
COUNT_MOST = np.iinfo(np.int32).max
COPY_NUMBERS = 1 << 20
Tensors = Mapping[str, NDArray[Any]]


class Extending:
    """Answers Extend calls."""

    def __init__(
        self, bringing: Bringing, publishing: Publishing, pointers: Pointers, catalogue: Catalogue, meters: Meters
    ) -> None:
        self._bringing, self._publishing, self._pointers = bringing, publishing, pointers
        self._catalogue, self._meters = catalogue, meters

    async def extend(self, base: tuple[str, str], chunk: tuple[str, str], caller: Caller, *, promote: bool) -> Kept:
        """The new version. base, chunk: name and version, as `Bringing.bring` takes them.

        Raises FingerprintMismatch naming the field in which the two differ, Overtaken where the name means another version than
        `base` and `promote` is asked for, InvalidArgument for a chunk that `base` stands for already or a `base` that is a chunk itself,
        NotFound for what is deleted before it begins to read, and what Publish raises of room and quotas.
        """
        with self._meters.measured("extends"), self._publishing.turns.turn():
            await ask_may_change(self._catalogue, caller, base[0])
            one = await self._bringing.bring(*base)
            with one.in_use():  # bringing the other evicts what nobody needs
                other = await self._bringing.bring(*chunk)
                with other.in_use():
                    published = await self._extend(one, other, caller, promote=promote)
            if promote:
                await self._publishing.promote(published.kept, caller, one.key[1])
            return published.kept

    async def _extend(self, one: Kept, other: Kept, caller: Caller, *, promote: bool) -> Published:
        check_fit(one.stored.dictionary, other.stored.dictionary)
        if promote and not self._pointers.names(*one.key):
            raise Overtaken(
                f"{one.key[0]} means {self._pointers.of(one.key[0]).version or 'nothing'}, {one.key[1]} is to be extended"
            )
        check_new(one.stored.dictionary, other.stored.dictionary)
        check_place(one.stored.dictionary, other.stored.dictionary)
        return await self._publishing.make(
            lambda check, folder: _announce(check, folder, one.stored, other.stored, caller.tenant), caller, one.stored.file_bytes
        )


def check_fit(base: Dictionary, chunk: Dictionary) -> None:
    """Whether both were made for the same keys. Raises FingerprintMismatch naming the first field that differs, InvalidArgument for matched keys."""
    chunk.model.fingerprint.require(base.model.fingerprint.as_dict())
    expect(
        not base.settings.matched_keys,
        f"{base.name}: made with matched keys, whose entries do not add up with another chunk's; build the whole prefix anew",
    )
    for name, value in asdict(base.settings).items():
        found = getattr(chunk.settings, name)
        if found != value:
            raise FingerprintMismatch(f"settings.{name}", value, found)
    if chunk.layers != base.layers:
        raise FingerprintMismatch("layers", base.layers, chunk.layers)
    theirs = dict(chunk.tensors)
    for name, info in base.tensors:
        if name.rpartition(".")[2] in COPIED and theirs[name].sha256 != info.sha256:
            raise FingerprintMismatch(f"tensors.{name}", info.sha256, theirs[name].sha256)


def check_new(base: Dictionary, chunk: Dictionary) -> None:
    """Whether `base` does not stand for the chunk, or a part of it, already: nothing counts twice. Raises InvalidArgument."""
    twice = set(_parts(base)) & set(_parts(chunk))
    expect(
        not twice,
        f"chunk: {chunk.name} {chunk.version} is in {base.name} {base.version} already (prefix {', '.join(sorted(twice)[:3])}); "
        "extend the version from before, or by another chunk",
    )


def check_place(base: Dictionary, chunk: Dictionary) -> None:
    """Whether the chunk was read right behind `base`: its keys were turned for where they stood. Raises FingerprintMismatch, InvalidArgument."""
    base.require_whole()
    if chunk.prefix.first != base.prefix.tokens:
        expected = (
            f"{base.prefix.tokens}, the tokens of {base.name}: a chunk is built with --extend-from the version that it extends"
        )
        raise FingerprintMismatch("prefix.first", expected, chunk.prefix.first)


def extended(base: Dictionary, chunk: Dictionary) -> Dictionary:
    """The manifest of both together, the tensors still those of `base`. The exact prefix KV of two parts is not that of both: none is kept.

    prefix.digest of parts: sha256 of their digests, one behind the other, for the tokens are not here to be hashed; prefix.parts: theirs
    """
    prefix = Prefix(
        _joined(base.prefix.digest, chunk.prefix.digest),
        base.prefix.tokens + chunk.prefix.tokens,
        base.prefix.chunks + chunk.prefix.chunks,
        _parts(base) + _parts(chunk),
    )
    first, second = base.calibration, chunk.calibration
    calibration = first
    if second.digest != first.digest:
        digest = _joined(first.digest, second.digest)
        calibration = Calibration(digest, first.traces + second.traces, first.tokens + second.tokens)
    return replace(base, prefix=prefix, calibration=calibration, prefix_kv=None)


def write_extended(
    path: Path, base: tuple[Dictionary, Tensors], chunk: tuple[Dictionary, Tensors], check: Check = lambda: None
) -> tuple[Dictionary, FileInfo]:
    """Write the tensors of both together to `path`: the manifest, and what the file is. check: called before each block, raises to end it."""
    dictionary = extended(base[0], chunk[0])
    with TensorFile(path, dict(dictionary.tensor_shapes()), check) as file:
        for layer in dictionary.layers:
            for part in COPIED:
                if (name := tensor_name(layer, part)) in base[1]:
                    _copy(file, name, base[1][name])
            _merge_layer(file, layer, base, chunk)
        return replace(dictionary, tensors=file.infos()), file.file_info()


def _announce(check: Check, folder: Path, base: Stored, chunk: Stored, tenant: str) -> tuple[Announced, Dictionary]:
    path = folder / TENSORS_FILE
    dictionary, info = write_extended(path, _mapped(base), _mapped(chunk), check)
    card = extended_card(dictionary, map_tensors(path, dictionary), base, chunk)
    return Announced(dictionary.to_json(), (info,), card, tenant), dictionary


def _mapped(stored: Stored) -> tuple[Dictionary, Tensors]:
    try:
        return stored.dictionary, map_tensors(stored.tensors_path, stored.dictionary, stored.offsets)
    except FileNotFoundError as error:
        raise NotFound(f"{stored.key[0]} {stored.key[1]} was deleted") from error


def _merge_layer(file: TensorFile, layer: int, base: tuple[Dictionary, Tensors], chunk: tuple[Dictionary, Tensors]) -> None:
    (dictionary, mine), (other, theirs) = base, chunk
    same_samples = dictionary.calibration.digest == other.calibration.digest
    settings, parts = dictionary.settings, (len(dictionary.prefix.chunks), len(other.prefix.chunks))
    states, scales, log_z, counts = (tensor_name(layer, part) for part in ("states", "state_scales", "log_z", "counts"))
    for book in range(dictionary.codebooks):
        for rows in row_blocks(settings.entries, dictionary.entry_heads * dictionary.model.head_dim):
            at = book, rows
            a1, a2 = (as_numbers(part[states][at], part[scales][at] if scales in part else None) for part in (mine, theirs))
            merged, logs = merge_entries(a1, mine[log_z][at], a2, theirs[log_z][at], how=settings.chunk_merge, chunks=parts)
            resting, resting_scales = at_rest(merged, settings.dtype)
            file.append(states, resting)
            if resting_scales is not None:
                file.append(scales, resting_scales)
            file.append(log_z, logs)
            file.append(counts, _counts(mine[counts][at], theirs[counts][at], same_samples=same_samples))
    name = tensor_name(layer, "cosine_quantiles")
    weights = np.array([dictionary.calibration.tokens, 0 if same_samples else other.calibration.tokens], np.float64)
    mean = (weights[0] * mine[name] + weights[1] * theirs[name]) / weights.sum()
    file.append(name, mean.astype(np.float32))


def _counts(mine: NDArray[np.int32], theirs: NDArray[np.int32], *, same_samples: bool) -> NDArray[np.int32]:
    """Samples behind the merged entries: the same ones looked at two chunks, or others are added."""
    both = np.maximum(mine, theirs) if same_samples else mine.astype(np.int64) + theirs
    fitting: NDArray[np.int32] = np.minimum(both, COUNT_MOST).astype(np.int32)
    return fitting


def _copy(file: TensorFile, name: str, tensor: NDArray[Any]) -> None:
    flat = tensor.reshape(-1)
    for first in range(0, flat.size, COPY_NUMBERS):
        file.append(name, flat[first : first + COPY_NUMBERS])


def _parts(dictionary: Dictionary) -> tuple[str, ...]:
    return dictionary.prefix.parts or (dictionary.prefix.digest,)


def _joined(first: str, second: str) -> str:
    return hashlib.sha256((first + second).encode()).hexdigest()

"""States of queries, for those who cannot map: whitening, joining, the nearest entry, its state, by the leaf kernels.

Owns the mapped tensors of versions that were asked lately. The same as `treadle.nn.prefix_memory` finds that scans and probes as
many lists, without torch.
Source: arXiv 2605.18226, equations 6 to 8.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asm_store.domain.bringing import Bringing
from asm_store.domain.catalogue import Catalogue
from asm_store.domain.compute import Compute, Turnstile
from asm_store.domain.ports import Meters
from asm_store.domain.versions import Kept, Key
from treadle.contract.checks import expect
from treadle.contract.dictionary import Dictionary, KeyMode, tensor_name
from treadle.contract.dictionary_file import map_tensors
from treadle.contract.errors import NotFound
from treadle.contract.lookup_settings import GUARD_PERCENT
from treadle.kernels import EntryArrays, EntryStates, as_numbers, attend_keys

MAPPED_MAX = 16  # versions whose tensors stay mapped
QUERY_BYTES_MAX = 1 << 20
ANSWER_BYTES_MAX = (1 << 20) + (56 << 10)  # what a message takes beside its framing
QUERY_MAX = 1e4  # models ask with hundreds; behind the largest whitening that is taken in, the length of a key is finite in fp32
RETRY_SECONDS = 0.05
Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Found:
    """What T tokens found: states fp32 [T, H, head_dim], log_z fp32 [T, H] (natural), cosines fp32 [T, B, G / c]."""

    states: Array
    log_z: Array
    cosines: Array


def look_up(
    dictionary: Dictionary, tensors: Mapping[str, NDArray[Any]], layer: int, queries: Array, rotated: Array | None = None, *, lists_probed: int
) -> Found:  # fmt: skip
    """States of queries fp32 [T, H, head_dim], in the form that settings.key says, neither whitened nor joined.

    rotated: the same after RoPE, read where there are matched keys; None: the queries are. Of a query of zeros the cosine is 0.
    Raises NotFound for a layer without a dictionary, InvalidArgument for NaN, infinity or numbers beyond QUERY_MAX, DataLoss where the file of entries was truncated.
    """
    if layer not in dictionary.layers:
        raise NotFound(f"layer {layer}: {dictionary.name} has dictionaries in layers {list(dictionary.layers)}")
    _check_numbers("queries", queries)
    entries = EntryArrays.of_layer(dictionary, tensors, layer, guard_percent=GUARD_PERCENT, lists_probed=lists_probed)
    found = EntryStates(entries).find(queries)
    if not dictionary.settings.matched_keys:
        return Found(found.states, found.log_z, found.cosines)
    asked = queries if rotated is None else rotated
    _check_numbers("rotated", asked)
    keys, values = (as_numbers(tensors[tensor_name(layer, name)], None) for name in ("matched_keys", "matched_values"))
    seen, seen_log_z = attend_keys(asked, None, keys, values, tensors[tensor_name(layer, "matched_biases")])
    return Found(found.states + seen, found.log_z + seen_log_z, found.cosines)  # entries say what is missing in what these see


class Lookups:
    """Answers Lookup calls, at most `lookups_max` at once."""

    def __init__(
        self, catalogue: Catalogue, bringing: Bringing, compute: Compute, meters: Meters, *, lookups_max: int, lists_probed: int
    ) -> None:
        self._bringing, self._compute, self._meters, self._lists_probed = bringing, compute, meters, lists_probed
        self._turn = Turnstile("lookups", "lookups_max", lookups_max, RETRY_SECONDS)
        self._mapped: OrderedDict[Key, tuple[Kept, Mapping[str, NDArray[Any]]]] = OrderedDict()
        self._lock = threading.Lock()  # of _mapped: threads look up, the loop forgets
        self.answered = 0
        catalogue.on_gone(self._forget)

    async def look_up(self, name: str, version: str, layer: int, queries: bytes, rotated: bytes = b"") -> Found:
        """States of queries, [T, H, head_dim] float32 little-endian; rotated: the same after RoPE. Raises what `Bringing.bring` and `look_up` raise, ResourceExhausted."""
        with self._meters.measured("lookups"):
            kept = await self._bringing.bring(name, version)  # which may take minutes, and no turn of the others
            with self._turn.turn(), kept.in_use():
                found = await self._compute.run(self._look_up, kept, layer, queries, rotated)
        self.answered += 1
        return found

    def _forget(self, kept: Kept) -> None:
        """Unmap what goes: its bytes are free only then."""
        with self._lock:
            self._mapped.pop(kept.key, None)

    def _look_up(self, kept: Kept, layer: int, queries: bytes, rotated: bytes) -> Found:
        dictionary = kept.stored.dictionary
        heads, turned = _read_queries("queries", queries, dictionary), None
        if dictionary.settings.matched_keys and dictionary.settings.key is not KeyMode.OWN_POSITION:
            turned = _read_queries("rotated", rotated, dictionary)
            expect(len(turned) == len(heads), f"rotated: {len(heads)} tokens as in queries expected, got {len(turned)}")
        try:
            tensors = self._tensors(kept)
        except FileNotFoundError as error:
            raise NotFound(f"{kept.key[0]} {kept.key[1]} was deleted") from error
        return look_up(dictionary, tensors, layer, heads, turned, lists_probed=self._lists_probed)

    def _tensors(self, kept: Kept) -> Mapping[str, NDArray[Any]]:
        with self._lock:
            found = self._mapped.get(kept.key)
            if found is not None:
                self._mapped.move_to_end(kept.key)
        if found is None or found[0] is not kept:
            found = kept, map_tensors(kept.stored.tensors_path, kept.stored.dictionary, kept.stored.offsets)
            with self._lock:
                if not kept.gone:  # else nobody would forget it
                    self._mapped[kept.key] = found
                while len(self._mapped) > MAPPED_MAX:
                    self._mapped.popitem(last=False)
        return found[1]


def _check_numbers(field: str, queries: Array) -> None:
    """Raise InvalidArgument for what cannot be computed with: the answer would be NaN, or that there is no prefix."""
    expect(bool(np.isfinite(queries).all()), f"{field}: NaN or infinity")
    largest = float(np.abs(queries).max(initial=0.0))
    expect(largest <= QUERY_MAX, f"{field}: a number of size {largest:g}, at most {QUERY_MAX:g} can be computed with")


def _read_queries(field: str, queries: bytes, dictionary: Dictionary) -> Array:
    heads, width = dictionary.model.heads, dictionary.model.head_dim
    row_bytes = 4 * heads * width
    expect(
        0 < len(queries) <= QUERY_BYTES_MAX and len(queries) % row_bytes == 0,
        f"{field}: [T, {heads}, {width}] float32, T at least 1 and at most {QUERY_BYTES_MAX} bytes in all; got {len(queries)} bytes",
    )
    tokens = len(queries) // row_bytes
    answer_bytes = len(queries) + 4 * tokens * (heads + dictionary.codebooks * dictionary.lookups)
    expect(
        answer_bytes <= ANSWER_BYTES_MAX,
        f"{field}: the answer for {tokens} tokens takes {answer_bytes} bytes; ask for fewer at once",
    )
    return np.frombuffer(queries, "<f4").reshape(tokens, heads, width)

"""The manifest of a dictionary: a long prefix of one model as attention states, layer by layer, found again by lookup keys.

One definition for builder, store, SDK and engines: what it was made for, how its keys are made, and the dtype, shape and digest of
every tensor. Owns names and shapes. Does not read files (`treadle.client.asm`), look up or merge (`treadle.nn`), or build.

Tensors of layer L, B codebooks of K entries; an entry stands for h heads, so that its lookup key has D = h * head_dim numbers:

    layers.L.keys              [B, K, D]           of length 1 (before rounding), in the order of the lists
    layers.L.key_scales        [B, K] F16          int8 only: key = number * scale
    layers.L.states            [B, K, h, head_dim] the outputs `a` of attention over the prefix; with matched keys what they lack
    layers.L.state_scales      [B, K, h] F16       int8 only
    layers.L.log_z             [B, K, h] F32       natural logarithm of Z, always fp32: Z reaches 5.7e9
    layers.L.counts            [B, K] I32          calibration samples behind an entry, 0: none, and log_z is -inf
    layers.L.cosine_quantiles  [B, 101] F32        of the calibration samples' cosine to their entry, at 0, 1 ... 100 %
    layers.L.list_keys         [B, lists, D] F32   first level of a two-level lookup; only where `lists` > 0
    layers.L.list_starts       [B, lists + 1] I32  entries list_starts[b, i] to list_starts[b, i + 1] belong to list i
    layers.L.whitening         [heads, head_dim, head_dim] F32  applied to a query head before joining; only where asked for

Only where `matched_keys` = n > 0; the state over these keys is what every query sees of the prefix at least, and `states` and `log_z`
then hold what an entry's queries have beyond it (differences of outputs and of log Z):

    layers.L.matched_keys      [kv_heads, n, head_dim]  of the prefix, rotated where they stand; F32 in a dictionary of F32 rows, else BF16
    layers.L.matched_values    [kv_heads, n, head_dim]  of the same dtype
    layers.L.matched_biases    [kv_heads, n] F32        added to q k / sqrt(head_dim); finite: every key counts

Source: arXiv 2605.18226, equations 4 to 8; what it leaves open is settled in docs/decisions/0033. Matched keys: docs/decisions/0039.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from treadle.contract.checks import expect, is_int, object_fields, rising
from treadle.contract.errors import InvalidArgument
from treadle.contract.fingerprint import Fingerprint
from treadle.contract.version import canonical_json, check_name, check_version, version_of

SCHEMA = "treadle.dictionary/1"
MANIFEST_BYTES_MAX = 1 << 20  # a manifest fits one gRPC message
DICTIONARY_BYTES_MAX = 1 << 40
LAYERS_MAX, HEADS_MAX, HEAD_DIM_MAX = 512, 1024, 1024
ENTRIES_MAX, LISTS_MAX, CHUNKS_MAX = 1 << 20, 1 << 16, 4096
MATCHED_KEYS_MAX = 4096
QUANTILES = 101
TOKENS_MAX = 1 << 40
LOG_BASE = "e"  # of every log Z that crosses a border: natural


class KeyMode(StrEnum):
    """What of a query a lookup key is made of (paper, section 3.5)."""

    PRE_ROPE = "pre-rope"  # before rotation: what is asked, wherever it stands
    ROPE_UNIFIED = "rope-unified"  # rotated at one position for all queries, `key_position`
    OWN_POSITION = "own-position"  # rotated where it stands: replays exactly, generalises worst


class Grouping(StrEnum):
    """Whether each key/value head has a codebook of its own, or all heads of a layer share one (paper, section 3.6)."""

    INDIVIDUAL = "individual"
    SHARED = "shared"


class Aggregation(StrEnum):
    """How the states of a cluster become one entry."""

    EQ5 = "eq5"  # the paper's equation 5: log of the mean Z, outputs weighted by Z
    GEO = "geo"  # mean of log Z, plain mean of outputs


class ChunkMerge(StrEnum):
    """How states over chunks of a prefix become one state of the prefix."""

    SUM = "sum"  # Z adds up: what equation 3 calls exact
    MEAN = "mean"  # the mean of Z: what equation 5 does to chunk states that fall into one cluster


class Positions(StrEnum):
    """Where the tokens of a request stand."""

    AFTER_PREFIX = "after-prefix"  # as if the prefix stood before them
    FROM_ZERO = "from-zero"


class RowDtype(StrEnum):
    """How keys and states lie at rest."""

    F32 = "F32"
    BF16 = "BF16"
    I8 = "I8"


@dataclass(frozen=True, slots=True)
class DictionaryModel:
    """The language model that a dictionary was made with; another one is refused by the first field that differs.

    digest:    sha256 over config and weights; tokenizer: sha256 of tokenizer.json
    rope:      sha256 of the canonical numbers that decide the angles
    """

    digest: str
    tokenizer: str
    rope: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for digest in (self.digest, self.tokenizer, self.rope):
            check_version(digest)
        expect(is_int(self.layers, 1, LAYERS_MAX), f"model.layers: 1 to {LAYERS_MAX}, got {self.layers!r}")
        expect(is_int(self.heads, 1, HEADS_MAX), f"model.heads: 1 to {HEADS_MAX}, got {self.heads!r}")
        expect(
            is_int(self.kv_heads, 1, HEADS_MAX) and self.heads % self.kv_heads == 0,
            f"model.kv_heads: divides {self.heads} heads, got {self.kv_heads!r}",
        )
        expect(is_int(self.head_dim, 1, HEAD_DIM_MAX), f"model.head_dim: 1 to {HEAD_DIM_MAX}, got {self.head_dim!r}")

    @property
    def group(self) -> int:
        """G, query heads that share a key/value head."""
        return self.heads // self.kv_heads

    @property
    def fingerprint(self) -> Fingerprint:
        """Field by field, as refusals name them."""
        return Fingerprint.of({f"model.{name}": value for name, value in asdict(self).items()})


@dataclass(frozen=True, slots=True)
class Prefix:
    """The text that the dictionary stands for.

    digest: sha256 of its token ids, int32 little-endian; of one that was extended, of the digests that were joined
    chunks: tokens of each part that was encoded by itself, in order; one: the whole prefix at once
    parts:  of one that was extended: the digests of what it was put together from, in order; empty: it was built so
    first:  position of its first token; above 0: a further chunk, read behind so many tokens, which is no prefix by itself
    """

    digest: str
    tokens: int
    chunks: tuple[int, ...]
    parts: tuple[str, ...] = ()
    first: int = 0

    def __post_init__(self) -> None:
        check_version(self.digest)
        expect(is_int(self.tokens, 1, TOKENS_MAX), f"prefix.tokens: at least 1, got {self.tokens!r}")
        expect(1 <= len(self.chunks) <= CHUNKS_MAX, f"prefix.chunks: 1 to {CHUNKS_MAX}")
        expect(all(is_int(chunk, 1, TOKENS_MAX) for chunk in self.chunks), "prefix.chunks: tokens, at least 1 each")
        expect(
            sum(self.chunks) == self.tokens, f"prefix.chunks: {sum(self.chunks)} tokens in all, prefix.tokens says {self.tokens}"
        )
        expect(len(self.parts) <= len(self.chunks), f"prefix.parts: at most the {len(self.chunks)} chunks, got {len(self.parts)}")
        for part in self.parts:
            check_version(part)
        expect(is_int(self.first, 0, TOKENS_MAX), f"prefix.first: 0 or more, got {self.first!r}")
        expect(not (self.first and self.parts), f"prefix.first: 0 of what was extended, got {self.first!r}")


@dataclass(frozen=True, slots=True)
class Calibration:
    """The traces whose queries it was made from. digest: sha256 of all their token ids, int32 little-endian; tokens: queries."""

    digest: str
    traces: int
    tokens: int

    def __post_init__(self) -> None:
        check_version(self.digest)
        for name in ("traces", "tokens"):
            value = getattr(self, name)
            expect(is_int(value, 1, TOKENS_MAX), f"calibration.{name}: at least 1, got {value!r}")


@dataclass(frozen=True, slots=True)
class DictionarySettings:
    """How keys and entries were made.

    key_position:  for rope-unified keys: the position of all; else 0
    ridge_ppm:     added to the covariance before whitening, in millionths of its mean diagonal; 0: no whitening
    heads_joined:  c, query heads of one group in a key: 1 to G, a divisor of it
    entries:       K, of each codebook; lists: of the two-level lookup, 0: all entries are scanned
    iterations, seed: of the clustering
    matched_keys:  n, of each key/value head; 0: none, and entries hold whole states
    """

    key: KeyMode = KeyMode.PRE_ROPE
    key_position: int = 0
    ridge_ppm: int = 0
    heads_joined: int = 1
    grouping: Grouping = Grouping.SHARED
    aggregation: Aggregation = Aggregation.GEO
    chunk_merge: ChunkMerge = ChunkMerge.SUM
    positions: Positions = Positions.AFTER_PREFIX
    dtype: RowDtype = RowDtype.I8
    entries: int = 1024
    lists: int = 0
    iterations: int = 4
    seed: int = 0
    matched_keys: int = 0
    log_base: str = LOG_BASE

    def __post_init__(self) -> None:
        expect(is_int(self.key_position, 0, TOKENS_MAX), f"settings.key_position: 0 or more, got {self.key_position!r}")
        expect(is_int(self.ridge_ppm, 0, 10**9), f"settings.ridge_ppm: 0 to 10^9, got {self.ridge_ppm!r}")
        expect(is_int(self.heads_joined, 1, HEADS_MAX), f"settings.heads_joined: at least 1, got {self.heads_joined!r}")
        expect(is_int(self.entries, 1, ENTRIES_MAX), f"settings.entries: 1 to {ENTRIES_MAX}, got {self.entries!r}")
        expect(
            is_int(self.lists, 0, min(LISTS_MAX, self.entries)),
            f"settings.lists: 0 to {min(LISTS_MAX, self.entries)}, got {self.lists!r}",
        )
        expect(is_int(self.iterations, 0, 1 << 20), f"settings.iterations: 0 or more, got {self.iterations!r}")
        expect(is_int(self.seed, 0, (1 << 63) - 1), f"settings.seed: 0 to 2^63-1, got {self.seed!r}")
        expect(
            is_int(self.matched_keys, 0, MATCHED_KEYS_MAX),
            f"settings.matched_keys: 0 to {MATCHED_KEYS_MAX}, got {self.matched_keys!r}",
        )
        expect(
            not self.matched_keys or self.positions is Positions.AFTER_PREFIX,
            "settings.positions: after-prefix with matched keys, which stand where the prefix stood",
        )
        expect(self.log_base == LOG_BASE, f"settings.log_base: {LOG_BASE!r} (natural), got {self.log_base!r}")

    @property
    def whitened(self) -> bool:
        """Whether query heads are whitened before they are joined."""
        return self.ridge_ppm > 0


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a tensor of the file is. dtype: F32, F16, BF16, I8 or I32 (safetensors' words); sha256 of its bytes."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str

    def __post_init__(self) -> None:
        expect(self.dtype in ITEM_BYTES, f"dtype: one of {sorted(ITEM_BYTES)}, got {self.dtype!r}")
        expect(all(is_int(side, 0, TOKENS_MAX) for side in self.shape), f"shape: whole numbers, got {self.shape!r}")
        check_version(self.sha256)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        count = ITEM_BYTES[self.dtype]
        for side in self.shape:
            count *= side
        return count


ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "I8": 1, "I32": 4}


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Dictionary:
    """The manifest of one dictionary.

    layers:    0-based decoder layers that have a dictionary, rising; in others a request attends to its own tokens alone
    tensors:   name -> what it is, exactly those that `tensor_shapes` says
    prefix_kv: sha256 of the file with the exact prefix KV kept beside it, for requests that the guard sends back; None: not kept
    """

    name: str
    model: DictionaryModel
    layers: tuple[int, ...]
    prefix: Prefix
    calibration: Calibration
    settings: DictionarySettings
    tensors: tuple[tuple[str, TensorInfo], ...]
    prefix_kv: str | None = None

    def __post_init__(self) -> None:
        check_name(self.name)
        expect(bool(self.layers) and rising(self.layers, 0, self.model.layers - 1), f"layers: rising, 0 to {self.model.layers - 1}")
        joined, group = self.settings.heads_joined, self.model.group
        expect(group % joined == 0, f"settings.heads_joined: divides the {group} query heads of a group, got {joined}")
        if self.prefix_kv is not None:
            check_version(self.prefix_kv)
        expected, given = dict(self.tensor_shapes()), dict(self.tensors)
        expect(len(given) == len(self.tensors), "tensors: a name stands twice")
        missing, unknown = expected.keys() - given.keys(), given.keys() - expected.keys()
        expect(not missing, f"tensors: missing {sorted(missing)[:3]}")
        expect(not unknown, f"tensors: unknown {sorted(unknown)[:3]}")
        for name, (dtype, shape) in expected.items():
            found = given[name]
            expect(found.dtype == dtype, f"tensor {name}: {dtype} expected, got {found.dtype}")
            expect(found.shape == shape, f"tensor {name}: shape {list(shape)} expected, got {list(found.shape)}")

    @property
    def codebooks(self) -> int:
        """B, of each layer."""
        return self.model.kv_heads if self.settings.grouping is Grouping.INDIVIDUAL else 1

    @property
    def lookups(self) -> int:
        """Lookups of one token in one codebook of a layer: G / c."""
        return self.model.group // self.settings.heads_joined

    @property
    def position_offset(self) -> int:
        """Added to the positions of a request's tokens: where the first token behind the prefix stands."""
        return self.prefix.tokens if self.settings.positions is Positions.AFTER_PREFIX else 0

    @property
    def heads_of_lookups(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[B][G / c][h]: the query heads that are joined, in their order, for each lookup of each codebook."""
        group, joined = self.model.group, self.settings.heads_joined
        alone = [
            [tuple(range(kv * group + first, kv * group + first + joined)) for first in range(0, group, joined)]
            for kv in range(self.model.kv_heads)
        ]
        if self.settings.grouping is Grouping.INDIVIDUAL:
            return tuple(tuple(lookups) for lookups in alone)
        return (tuple(tuple(head for lookups in alone for head in lookups[place]) for place in range(self.lookups)),)

    @property
    def entry_heads(self) -> int:
        """h, the query heads that an entry stands for."""
        return self.settings.heads_joined * (1 if self.settings.grouping is Grouping.INDIVIDUAL else self.model.kv_heads)

    @property
    def key_dim(self) -> int:
        """D, numbers of a lookup key."""
        return self.entry_heads * self.model.head_dim

    def require_whole(self) -> None:
        """Raise InvalidArgument where it stands for a further chunk alone, behind which no request can be answered."""
        expect(
            not self.prefix.first,
            f"{self.name} {self.version} stands for a further chunk alone, read behind {self.prefix.first} tokens: it is no prefix; "
            "`treadle asm extend` adds it to the version that it was built for",
        )

    def tensor_shapes(self) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
        """(name, (dtype, shape)) of every tensor, as the module says."""
        settings, model, rows = self.settings, self.model, str(self.settings.dtype)
        books, entries, heads = self.codebooks, settings.entries, self.entry_heads
        for layer in self.layers:
            yield tensor_name(layer, "keys"), (rows, (books, entries, self.key_dim))
            yield tensor_name(layer, "states"), (rows, (books, entries, heads, model.head_dim))
            if settings.dtype is RowDtype.I8:
                yield tensor_name(layer, "key_scales"), ("F16", (books, entries))
                yield tensor_name(layer, "state_scales"), ("F16", (books, entries, heads))
            yield tensor_name(layer, "log_z"), ("F32", (books, entries, heads))
            yield tensor_name(layer, "counts"), ("I32", (books, entries))
            yield tensor_name(layer, "cosine_quantiles"), ("F32", (books, QUANTILES))
            if settings.lists:
                yield tensor_name(layer, "list_keys"), ("F32", (books, settings.lists, self.key_dim))
                yield tensor_name(layer, "list_starts"), ("I32", (books, settings.lists + 1))
            if settings.whitened:
                yield tensor_name(layer, "whitening"), ("F32", (model.heads, model.head_dim, model.head_dim))
            if settings.matched_keys:
                matched = "F32" if settings.dtype is RowDtype.F32 else "BF16"
                for part in ("matched_keys", "matched_values"):
                    yield tensor_name(layer, part), (matched, (model.kv_heads, settings.matched_keys, model.head_dim))
                yield tensor_name(layer, "matched_biases"), ("F32", (model.kv_heads, settings.matched_keys))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors: the storage of the dictionary, without the prefix KV beside it."""
        return sum(info.nbytes for _, info in self.tensors)

    @property
    def version(self) -> str:
        """sha256 of the canonical manifest, which lists the digests of the tensors: the name of the content."""
        return version_of(self.to_manifest())

    @property
    def fingerprint(self) -> Fingerprint:
        """What it depends on, field by field."""
        fields: dict[str, object] = dict(self.model.fingerprint)
        fields |= {f"prefix.{name}": value for name, value in asdict(self.prefix).items() if name not in _SELDOM or value}
        fields |= {f"calibration.{name}": value for name, value in asdict(self.calibration).items()}
        fields |= {f"settings.{name}": value for name, value in asdict(self.settings).items()}
        return Fingerprint.of(fields | {"layers": self.layers, "version": self.version})

    def to_manifest(self) -> dict[str, Any]:
        """The manifest as JSON values."""
        prefix = asdict(self.prefix) | {"chunks": list(self.prefix.chunks), "parts": list(self.prefix.parts)}
        prefix = {name: value for name, value in prefix.items() if name not in _SELDOM or value}
        manifest: dict[str, Any] = {
            "schema": SCHEMA, "name": self.name, "model": asdict(self.model), "layers": list(self.layers), "prefix": prefix,
            "calibration": asdict(self.calibration), "settings": {key: _plain(value) for key, value in asdict(self.settings).items()},
            "tensors": {
                name: {"dtype": info.dtype, "shape": list(info.shape), "sha256": info.sha256} for name, info in self.tensors
            },
        }  # fmt: skip
        return manifest | ({"prefix_kv": self.prefix_kv} if self.prefix_kv is not None else {})

    def to_json(self) -> bytes:
        """The canonical manifest: what `version` is the sha256 of."""
        return canonical_json(self.to_manifest())

    @classmethod
    def from_json(cls, text: bytes | str) -> Dictionary:
        """Read a manifest. Raises InvalidArgument naming the field that is missing, unknown or wrong."""
        if len(text) > MANIFEST_BYTES_MAX:
            raise InvalidArgument(f"manifest: {len(text)} bytes, the limit is {MANIFEST_BYTES_MAX}")
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"manifest: not JSON: {error}") from error
        return cls.from_manifest(manifest)

    @classmethod
    def from_manifest(cls, manifest: object) -> Dictionary:
        """Read a manifest from JSON values. Raises InvalidArgument naming the field that is missing, unknown or wrong."""
        fields = object_fields("manifest", manifest, _REQUIRED, {"prefix_kv"})
        expect(fields["schema"] == SCHEMA, f"schema: {SCHEMA} expected, got {fields['schema']!r}")
        prefix = _part(fields, "prefix", Prefix, optional=_SELDOM)
        try:
            return cls(
                name=fields["name"],
                model=DictionaryModel(**_part(fields, "model", DictionaryModel)),
                layers=tuple(fields["layers"]),
                prefix=Prefix(**(prefix | {"chunks": tuple(prefix["chunks"]), "parts": tuple(prefix.get("parts", ()))})),
                calibration=Calibration(**_part(fields, "calibration", Calibration)),
                settings=_read_settings(_part(fields, "settings", DictionarySettings)),
                tensors=_read_tensors(fields["tensors"]),
                prefix_kv=fields.get("prefix_kv"),
            )
        except (TypeError, AttributeError) as error:
            raise InvalidArgument(f"manifest: a field has the wrong type: {error}") from error


_REQUIRED = {"schema", "name", "model", "layers", "prefix", "calibration", "settings", "tensors"}
_SELDOM = frozenset({"parts", "first"})  # of a prefix; not written where there are none, so that versions stay what they were
_WORDS: Mapping[str, type[StrEnum]] = {
    "key": KeyMode, "grouping": Grouping, "aggregation": Aggregation, "chunk_merge": ChunkMerge, "positions": Positions,
    "dtype": RowDtype,
}  # fmt: skip


def tensor_name(layer: int, part: str) -> str:
    """Name of a tensor in the file."""
    return f"layers.{layer}.{part}"


def _plain(value: object) -> object:
    return str(value) if isinstance(value, StrEnum) else value


def _part(fields: Mapping[str, Any], name: str, kind: type, *, optional: Set[str] = frozenset()) -> dict[str, Any]:
    required = set(kind.__dataclass_fields__) - optional  # type: ignore[attr-defined]  # of a dataclass
    return object_fields(name, fields[name], required, set(optional))


def _read_settings(fields: Mapping[str, Any]) -> DictionarySettings:
    for name, words in _WORDS.items():
        expect(fields[name] in list(words), f"settings.{name}: one of {[str(word) for word in words]}, got {fields[name]!r}")
    return DictionarySettings(**(dict(fields) | {name: words(fields[name]) for name, words in _WORDS.items()}))


def _read_tensors(tensors: object) -> tuple[tuple[str, TensorInfo], ...]:
    expect(isinstance(tensors, dict), "tensors: an object keyed by name")
    assert isinstance(tensors, dict)
    read = []
    for name in sorted(tensors):
        info = object_fields(f"tensors.{name}", tensors[name], {"dtype", "shape", "sha256"}, set())
        read.append((name, TensorInfo(info["dtype"], tuple(info["shape"]), info["sha256"])))
    return tuple(read)

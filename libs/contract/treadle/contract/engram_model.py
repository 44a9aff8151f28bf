"""The EngramModel manifest: everything that decides which rows a token needs and how to read them.

One definition for pool, SDK, kernels and engines. Derived numbers (primes, multipliers) are stored, so that
nobody derives them differently; `families` makes them for the known families.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from treadle.contract.checks import comma_list, expect, is_int, object_fields, rising
from treadle.contract.errors import InvalidArgument
from treadle.contract.fingerprint import Fingerprint
from treadle.contract.row_layout import RowLayout, Scale
from treadle.contract.version import canonical_json, check_name, check_version, version_of

SCHEMA = "treadle.engram-model/1"
LAYERS_MAX, COLUMNS_MAX, ORDER_MAX = 64, 256, 16
ROWS_MAX = 1 << 40  # rows of one table: offsets in bytes stay below 2^63 at ROW_BYTES_MAX
MANIFEST_BYTES_MAX = 1 << 20  # a manifest fits one gRPC message
CARD_BYTES_MAX = 256 << 10  # what a grown memory says of its origin; it travels with every open
FUSION_BYTES_MAX = 1 << 30  # fusion weights; two layers of a 16,384-wide model with 1,024 inputs take 134 MB in bf16


class Family(StrEnum):
    """How tokens become row ids (facts: Engram demo code, DeepSeek-V4.1, Qwen PLE)."""

    DEMO = "engram-demo"
    DEEPSEEK_V41 = "deepseek-v4.1"
    QWEN_PLE = "qwen-ple"


@dataclass(frozen=True, slots=True)
class Fusion:
    """How rows enter the hidden state: `form` demo or v4.1, and the digest of the weights file (None: random, seeded)."""

    form: str
    weights: str | None = None

    def __post_init__(self) -> None:
        expect(self.form in ("demo", "v4.1"), f"fusion.form: demo or v4.1, got {self.form!r}")
        if self.weights is not None:
            check_version(self.weights)


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one Engram layer: how many, and the version of their content (see `segment`)."""

    rows: int
    version: str

    def __post_init__(self) -> None:
        expect(is_int(self.rows, 1, ROWS_MAX), f"table.rows: 1 to {ROWS_MAX}, got {self.rows!r}")
        check_version(self.version)


@dataclass(frozen=True, slots=True)
class EngramModel:
    """One Engram model. `tables` is empty in a template: a manifest whose rows have not been loaded yet.

    layers:      0-based decoder layers, rising
    orders:      n-gram orders, rising, e.g. (2, 3)
    primes:      [layer][order][head] rows of each head; column (order-major, head-minor) takes `mix mod prime`
    multipliers: [layer][Nmax] odd numbers; token ids times these never overflow int64
    pad_id:      raw token id that stands for "before the sequence" and for blocked look-backs
    eos_id:      raw token id that ends a segment (qwen-ple only)
    compressed_vocab_size, token_map: size of the compressed id space; sha256 of the int32 little-endian map raw -> compressed
    """

    name: str
    family: Family
    layers: tuple[int, ...]
    orders: tuple[int, ...]
    heads: int
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    multipliers: tuple[tuple[int, ...], ...]
    pad_id: int
    row: RowLayout
    eos_id: int | None = None
    compressed_vocab_size: int | None = None
    token_map: str | None = None
    fusion: Fusion | None = None
    tables: tuple[tuple[int, Table], ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        expect(rising(self.layers, 0, 1 << 16) and 1 <= len(self.layers) <= LAYERS_MAX, f"layers: 1 to {LAYERS_MAX} rising indices")
        expect(rising(self.orders, 1, ORDER_MAX) and bool(self.orders), f"orders: rising, 1 to {ORDER_MAX}")
        expect(is_int(self.heads, 1, COLUMNS_MAX) and self.columns <= COLUMNS_MAX, f"heads: orders x heads is 1 to {COLUMNS_MAX}")
        expect(
            len(self.primes) == len(self.layers) and len(self.multipliers) == len(self.layers),
            "primes, multipliers: one entry a layer",
        )
        for orders in self.primes:
            expect(
                len(orders) == len(self.orders) and all(len(heads) == self.heads for heads in orders),
                "primes: layer x order x head",
            )
            expect(all(is_int(p, 2, ROWS_MAX) for heads in orders for p in heads), f"primes: 2 to {ROWS_MAX}")
        for row in self.multipliers:
            expect(
                len(row) == self.order_max and all(is_int(m, 1, (1 << 63) - 1) for m in row),
                "multipliers: layer x largest order, positive int64",
            )
        expect(is_int(self.pad_id, 0, (1 << 31) - 1), f"pad_id: a token id, got {self.pad_id!r}")
        expect((self.eos_id is not None) == (self.family is Family.QWEN_PLE), "eos_id: for qwen-ple, and only there")
        expect(self.eos_id is None or is_int(self.eos_id, 0, (1 << 31) - 1), f"eos_id: a token id, got {self.eos_id!r}")
        compresses = self.family is not Family.QWEN_PLE
        expect(
            (self.token_map is not None) == compresses and (self.compressed_vocab_size is not None) == compresses,
            f"token_map, compressed_vocab_size: {'needed by' if compresses else 'not for'} {self.family}",
        )
        if self.token_map is not None:
            check_version(self.token_map)
        expect(
            self.compressed_vocab_size is None or is_int(self.compressed_vocab_size, 1, 1 << 31), "compressed_vocab_size: positive"
        )
        expect(
            not self.tables or tuple(layer for layer, _ in self.tables) == self.layers, "tables: one for each layer, or none yet"
        )
        for layer, table in self.tables:
            expect(
                table.rows >= self.rows_hashed(layer),
                f"tables.{layer}: {table.rows} rows, the primes need {self.rows_hashed(layer)}",
            )

    @property
    def order_max(self) -> int:
        """Nmax, the largest n-gram order; a look-back has Nmax-1 columns."""
        return self.orders[-1]

    @property
    def columns(self) -> int:
        """C, rows for each token and layer: orders x heads."""
        return len(self.orders) * self.heads

    @property
    def version(self) -> str:
        """sha256 of the canonical manifest, tables included."""
        return version_of(self.to_manifest())

    def rows_hashed(self, layer: int) -> int:
        """Rows of `layer` that the hash can reach: the sum of its primes."""
        return sum(map(sum, self.primes[self.layer_position(layer)]))

    def layer_position(self, layer: int) -> int:
        """Place of `layer` in `layers`. Raises InvalidArgument for a layer without a table."""
        if layer not in self.layers:
            raise InvalidArgument(f"layer {layer}: {self.name} has Engram layers {list(self.layers)}")
        return self.layers.index(layer)

    def table(self, layer: int) -> Table:
        """The table of `layer`. Raises InvalidArgument for a template or a layer without one."""
        self.layer_position(layer)
        for candidate, table in self.tables:
            if candidate == layer:
                return table
        raise InvalidArgument(f"{self.name} is a template: its tables have not been loaded")

    def with_tables(self, tables: Mapping[int, Table]) -> EngramModel:
        """The same model with its tables' rows and versions filled in."""
        return replace(self, tables=tuple((layer, tables[layer]) for layer in self.layers if layer in tables))

    @property
    def template(self) -> EngramModel:
        """The same model without tables: what a loader starts from."""
        return replace(self, tables=())

    @property
    def fingerprint(self) -> Fingerprint:
        """What an engine must agree with before it may use these rows."""
        return Fingerprint.of(
            {
                "family": self.family,
                "layers": comma_list(self.layers),
                "orders": comma_list(self.orders),
                "heads": self.heads,
                "row_bytes": self.row.bytes,
                "row_dim": self.row.dim,
                "row_dtype": self.row.dtype,
                "row_scale": self.row.scale.bits if self.row.scale is not None else None,  # the one of all rows
                "pad_id": self.pad_id,
                "eos_id": self.eos_id,
                "compressed_vocab_size": self.compressed_vocab_size,
                "token_map": self.token_map,
                "hash": version_of({"primes": self.primes, "multipliers": self.multipliers}),
                "version": self.version,
            }
        )

    def to_manifest(self) -> dict[str, Any]:
        """The manifest as JSON values; optional fields that are None are left out."""
        row: dict[str, Any] = {"bytes": self.row.bytes, "dim": self.row.dim, "dtype": self.row.dtype}
        if self.row.scale is not None:
            row["scale"] = {"dtype": self.row.scale.dtype, "block": self.row.scale.block}
            if self.row.scale.bits is not None:
                row["scale"]["bits"] = self.row.scale.bits
        manifest: dict[str, Any] = {
            "schema": SCHEMA,
            "name": self.name,
            "family": str(self.family),
            "layers": list(self.layers),
            "orders": list(self.orders),
            "heads": self.heads,
            "primes": [[list(heads) for heads in orders] for orders in self.primes],
            "multipliers": [list(row) for row in self.multipliers],
            "pad_id": self.pad_id,
            "row": row,
            "tables": {str(layer): {"rows": table.rows, "version": table.version} for layer, table in self.tables},
        }
        optional = {"eos_id": self.eos_id, "compressed_vocab_size": self.compressed_vocab_size, "token_map": self.token_map}
        manifest.update({key: value for key, value in optional.items() if value is not None})
        if self.fusion is not None:
            manifest["fusion"] = {"form": self.fusion.form} | ({"weights": self.fusion.weights} if self.fusion.weights else {})
        return manifest

    def to_json(self) -> bytes:
        """The canonical manifest: what `version` is the sha256 of."""
        return canonical_json(self.to_manifest())

    @classmethod
    def from_json(cls, text: bytes | str) -> EngramModel:
        """Read a manifest. Raises InvalidArgument naming the field that is missing, unknown or wrong."""
        if len(text) > MANIFEST_BYTES_MAX:
            raise InvalidArgument(f"manifest: {len(text)} bytes, the limit is {MANIFEST_BYTES_MAX}")
        try:
            manifest = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"manifest: not JSON: {error}") from error
        return cls.from_manifest(manifest)

    @classmethod
    def from_manifest(cls, manifest: object) -> EngramModel:
        """Read a manifest from JSON values. Raises InvalidArgument naming the field that is missing, unknown or wrong."""
        fields = object_fields("manifest", manifest, _REQUIRED, _OPTIONAL)
        expect(fields["schema"] == SCHEMA, f"schema: {SCHEMA} expected, got {fields['schema']!r}")
        expect(fields["family"] in list(Family), f"family: one of {[str(f) for f in Family]}, got {fields['family']!r}")
        row = object_fields("row", fields["row"], {"bytes", "dim", "dtype"}, {"scale"})
        scale = object_fields("row.scale", row["scale"], {"dtype", "block"}, {"bits"}) if "scale" in row else None
        fusion = object_fields("fusion", fields["fusion"], {"form"}, {"weights"}) if "fusion" in fields else None
        try:
            return cls(
                name=fields["name"],
                family=Family(fields["family"]),
                layers=tuple(fields["layers"]),
                orders=tuple(fields["orders"]),
                heads=fields["heads"],
                primes=tuple(tuple(tuple(heads) for heads in orders) for orders in fields["primes"]),
                multipliers=tuple(tuple(numbers) for numbers in fields["multipliers"]),
                pad_id=fields["pad_id"],
                row=RowLayout(row["bytes"], row["dim"], row["dtype"], Scale(**scale) if scale else None),
                eos_id=fields.get("eos_id"),
                compressed_vocab_size=fields.get("compressed_vocab_size"),
                token_map=fields.get("token_map"),
                fusion=Fusion(**fusion) if fusion else None,
                tables=_read_tables(fields["tables"]),
            )
        except (TypeError, AttributeError) as error:
            raise InvalidArgument(f"manifest: a field has the wrong type: {error}") from error


_REQUIRED = {"schema", "name", "family", "layers", "orders", "heads", "primes", "multipliers", "pad_id", "row", "tables"}
_OPTIONAL = {"eos_id", "compressed_vocab_size", "token_map", "fusion"}


def _read_tables(tables: object) -> tuple[tuple[int, Table], ...]:
    expect(isinstance(tables, dict) and all(str(key).isdecimal() for key in tables), "tables: an object keyed by layer")
    assert isinstance(tables, dict)
    read = []
    for key in sorted(tables, key=int):
        table = object_fields(f"tables.{key}", tables[key], {"rows", "version"}, set())
        read.append((int(key), Table(table["rows"], table["version"])))
    return tuple(read)

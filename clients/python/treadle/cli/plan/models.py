"""Models as the plan sees them: layers, rows, bytes.

The four of the CXL paper ("Pooling Engram Conditional Memory in Large Language Models using CXL", arXiv 2603.10087) are known by
sizes alone, and the paper's sizes can be read in two ways; the others have a manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from treadle.contract import EngramModel, InvalidArgument, NotFound, RowLayout, Scale
from treadle.contract.engram_model import MANIFEST_BYTES_MAX
from treadle.contract.families import deepseek_v41_model, qwen_ple_model

PAPER_LAYERS = (1, 14)  # the paper's k = 2 and 15 count from 1
PAPER_DECODER_LAYERS = 64  # of Qwen3-32B, its case study (section 3.2)
PAPER_WIDTH = 1280  # emb_dim (section 5.2): values of an n-gram order, all heads together
PAPER_HEADS = 16  # rows of a token and layer (section 3.1)
VALUE_BYTES, GB = 2, 10**9  # bf16; 100B are 200 GB (section 5.4)
QWEN_PADDED_ROWS = 128 * 2_500_012  # shards of the published checkpoint
DECODER_LAYERS_MAX = 1024


@dataclass(frozen=True, slots=True)
class PlannedLayer:
    """One Engram layer. `index` from 0; `rows` of its table, of `row_bytes` each; a token needs `rows_per_token` of them."""

    index: int
    rows: int
    row_bytes: int
    rows_per_token: int

    @property
    def table_bytes(self) -> int:
        """Bytes of its rows."""
        return self.rows * self.row_bytes

    @property
    def token_bytes(self) -> int:
        """S_layer: bytes of the rows of one token."""
        return self.rows_per_token * self.row_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read what is known of a model's layout, and why."""

    name: str
    why: str
    layers: tuple[PlannedLayer, ...]

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of all layers."""
        return sum(layer.table_bytes for layer in self.layers)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """A model. Readings agree in the bytes of its tables; the first one is the one that counts where one must be chosen."""

    name: str
    source: str
    decoder_layers: int
    readings: tuple[Reading, ...]

    def __post_init__(self) -> None:
        deepest = max(layer.index for layer in self.readings[0].layers)
        if not deepest < self.decoder_layers <= DECODER_LAYERS_MAX:
            raise InvalidArgument(
                f"decoder layers: {deepest + 1} to {DECODER_LAYERS_MAX} (the deepest Engram layer of {self.name} is {deepest}, "
                f"counted from 0), got {self.decoder_layers}"
            )

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows of all layers."""
        return self.readings[0].table_bytes


def known_model(name: str, decoder_layers: int | None = None) -> PlannedModel:
    """A model by name; decoder_layers: another depth than its own. Raises InvalidArgument listing the names."""
    made = KNOWN.get(name.lower())
    if made is None:
        raise InvalidArgument(f"no model {name!r} to plan for; there are {', '.join(KNOWN)}, or give --manifest FILE")
    model = made()
    return model if decoder_layers is None else PlannedModel(model.name, model.source, decoder_layers, model.readings)


def manifest_model(path: Path, decoder_layers: int | None) -> PlannedModel:
    """The model of a manifest file. Raises NotFound, InvalidArgument."""
    try:
        with path.open("rb") as file:
            text = file.read(MANIFEST_BYTES_MAX + 1)
    except OSError as error:
        raise NotFound(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _of_manifest(EngramModel.from_json(text), decoder_layers, str(path))
    except InvalidArgument as error:
        raise InvalidArgument(f"{path}: {error}") from error


def _of_manifest(manifest: EngramModel, decoder_layers: int | None, source: str) -> PlannedModel:
    """The model of a manifest, whose tables may not be loaded yet. Raises InvalidArgument without the depth of its engine."""
    if decoder_layers is None:
        raise InvalidArgument(
            f"{manifest.name}: give --decoder-layers, how many layers the language model has: a layer's window is its share of the step"
        )
    rows = {layer: table.rows for layer, table in manifest.tables}
    layers = tuple(
        PlannedLayer(layer, rows.get(layer, manifest.rows_hashed(layer)), manifest.row.bytes, manifest.columns)
        for layer in manifest.layers
    )
    why = f"{manifest.columns} rows x {manifest.row.bytes} B ({manifest.row.dtype})"
    return PlannedModel(manifest.name, source, decoder_layers, (Reading("as stored", why, layers),))


def _paper(name: str, parameters: int, source: str) -> PlannedModel:
    """A model of the paper with so many parameters in its tables, two layers of them."""
    wide, narrow = PAPER_WIDTH // 8, PAPER_WIDTH // PAPER_HEADS
    readings = []
    for reading, dim, why in (
        ("16 x 320 B", wide, "5 KB a token and layer: section 3.1 and Table 1"),
        ("16 x 160 B", narrow, "2.5 KB a token and layer: section 3.3 (its 8 x 320 B) and emb_dim 1,280 over 16 rows"),
    ):
        rows = parameters // (len(PAPER_LAYERS) * dim)
        layers = tuple(PlannedLayer(layer, rows, dim * VALUE_BYTES, PAPER_HEADS) for layer in PAPER_LAYERS)
        readings.append(Reading(reading, why, layers))
    return PlannedModel(name, source, PAPER_DECODER_LAYERS, tuple(readings))


def _vocabulary(name: str, vocabulary: int) -> PlannedModel:
    source = f"CXL paper, section 5.2: vocab_size {vocabulary:,}, emb_dim 1,280; 64 decoder layers as in its case study"
    return _paper(name, len(PAPER_LAYERS) * vocabulary * PAPER_WIDTH, source)


def _nominal(name: str, billions: int) -> PlannedModel:
    source = "CXL paper, section 5.4 and Table 5, known by its size alone; 64 decoder layers as in its case study"
    return _paper(name, billions * 10**9, source)


def _v41() -> PlannedModel:
    manifest = deepseek_v41_model("v4.1", token_map="0" * 64, pad_id=2)  # the map decides which rows, not how many
    return _of_manifest(manifest, 40, "DeepSeek-V4.1-Flash, 20 + 20 layers as reported")


def _qwen(name: str, row: RowLayout) -> PlannedModel:
    manifest = qwen_ple_model(name, layers=(1,), row=row)
    layer = PlannedLayer(1, QWEN_PADDED_ROWS, row.bytes, manifest.columns)
    why = f"{manifest.columns} rows x {row.bytes} B ({row.dtype}), 128 shards of 2,500,012 rows"
    return PlannedModel(name, "Qwen3.8-Flash-Next, 48 layers", 48, (Reading("as stored", why, (layer,)),))


KNOWN: dict[str, Callable[[], PlannedModel]] = {
    "27b": lambda: _vocabulary("27b", 2_262_400),
    "40b": lambda: _vocabulary("40b", 7_239_680),
    "100b": lambda: _nominal("100b", 100),
    "400b": lambda: _nominal("400b", 400),
    "v4.1": _v41,
    "qwen-ple": lambda: _qwen("qwen-ple", RowLayout(160, 160, "fp8_e4m3", Scale.of_all_rows(1.0))),
    "qwen-ple-bf16": lambda: _qwen("qwen-ple-bf16", RowLayout(320, 160, "bf16")),
    "qwen-ple-nf4": lambda: _qwen("qwen-ple-nf4", RowLayout(84, 160, "nf4", Scale("fp32", 160))),
}

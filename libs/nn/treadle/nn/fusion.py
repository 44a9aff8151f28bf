"""How gathered Engram rows enter the hidden state: keys, values, a gate, and the demo form's short convolution.

    demo   value = gate (W_v e + b_v); delta = value + SiLU(causal depthwise conv(RMSNorm(value)))
    v4.1   delta = gate W_v e; no biases, no convolution
    gate   sigmoid of the signed square root of <RMSNorm(key), RMSNorm(hidden)> / sqrt(d), 0 where a token is not live

Sources: the Engram demonstration code (arXiv 2601.07372) and DeepSeek-V4.1; one residual branch, as plain models have.
Owns the weights of the fusion. Does not gather (`treadle.kernels`), wait, or add its delta to anything (the engine does).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from treadle.contract import EngramModel, canonical_json
from treadle.contract.errors import DataLoss, FingerprintMismatch, InvalidArgument, NotFound
from treadle.nn.dequantise import dequantise
from treadle.nn.half_linear import HalfLinear
from treadle.nn.kv import KeepsHistory
from treadle.nn.linear import Linear

SCHEMA = "treadle.engram-fusion/1"
WEIGHTS_BYTES_MAX = 4 << 30  # read into memory whole
CONV_KERNEL = 4
CONV_EPS = 1e-5
GATE_EPS = {"demo": float(np.finfo(np.float32).eps), "v4.1": 1e-6}  # torch's default for RMSNorm; DeepSeek's rms_norm_eps
DOT_MIN = 1e-6  # keeps the square root's slope finite
RANDOM_ROW_RMS = 0.055  # of a bf16, fp16 or fp32 table filled by `treadle pool load --random`


@dataclass(frozen=True, slots=True)
class FusionShape:
    """What the weights must agree with: canonical JSON of this stands in the file's metadata."""

    form: str
    layers: tuple[int, ...]
    hidden: int
    inputs: int  # columns x row.dim, what one token's rows hold
    dilation: int  # of the convolution: the largest n-gram order; 0 without a convolution

    def to_json(self) -> str:
        """Canonical JSON with the schema's name."""
        return canonical_json({"schema": SCHEMA} | asdict(self)).decode()


class FusionLayer(nn.Module):
    """Frozen weights of one Engram layer, of the dtype they were stored in; all is computed in fp32.

    wkv: [2 hidden, inputs], keys before values; bias: [2 hidden] or None; query_weight, key_weight, conv_norm: [hidden]
    conv: [hidden, CONV_KERNEL], the last column meets the current token; None without a convolution
    """

    wkv: Tensor
    bias: Tensor | None
    query_weight: Tensor
    key_weight: Tensor
    conv_norm: Tensor | None
    conv: Tensor | None

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name in ("wkv", "bias", "query_weight", "key_weight", "conv_norm", "conv"):
            self.register_buffer(name, weights.get(name))
        self._packed: Linear | HalfLinear | None = None

    def pack(self, *, keep: bool = True) -> None:
        """Lay the projection out for the CPU now, and not at first use; keep: see EngramFusion.pack."""
        if self._packed is None and self.wkv.device.type == "cpu":
            bias = None if self.bias is None else self.bias.to(torch.float32)
            fits = HalfLinear.fits(self.wkv)
            self._packed = HalfLinear(self.wkv, bias) if fits else Linear(self.wkv.to(torch.float32), bias)
        if self._packed is not None and not keep:
            self.wkv = self.wkv.new_empty(0)

    def project(self, rows: Tensor) -> Tensor:
        """Keys beside values, [T, 2 hidden] fp32, of rows [T, inputs] fp32. On CPU the weight is packed at first use."""
        if rows.device.type == "cpu":
            self.pack()
            assert self._packed is not None
            return self._packed(rows)
        bias = None if self.bias is None else self.bias.to(torch.float32)
        return linear(rows, self.wkv.to(torch.float32), bias)


def gate(hidden: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, form: str) -> Tensor:
    """[T] in (0, 1) for hidden and key [T, hidden] fp32; weights [hidden], or [T, hidden] where each token has its own."""
    eps, width = GATE_EPS[form], (hidden.shape[-1],)
    query = rms_norm(hidden, width, None, eps) * query_weight.to(torch.float32)
    dot = (query * (rms_norm(key, width, None, eps) * key_weight.to(torch.float32))).sum(-1) / hidden.shape[-1] ** 0.5
    root = dot.abs().clamp_min(DOT_MIN).sqrt()
    if form == "demo":
        return torch.sigmoid(root * dot.sign())
    return torch.sigmoid(torch.where(dot < 0, -root, root))  # at exactly 0 the two forms differ


class EngramFusion(nn.Module):
    """The fusion of all Engram layers of one model. Frozen; safe for several threads once each layer ran once."""

    def __init__(self, model: EngramModel, shape: FusionShape, weights: Mapping[int, Mapping[str, Tensor]]) -> None:
        super().__init__()
        self.shape = shape
        self.row = model.row
        self.kind = f"{shape.form} {shape.inputs} {model.row}"  # memories of one kind are read and gated in the same way
        self.parts = nn.ModuleDict({str(layer): FusionLayer(weights[layer]) for layer in shape.layers})

    @classmethod
    def build(
        cls, model: EngramModel, hidden: int, seed: int = 0, *, delta_rms: float | Mapping[int, float] = 0.05,
        row_rms: float = RANDOM_ROW_RMS, conv: bool = True,
    ) -> EngramFusion:  # fmt: skip
        """Random weights, the same for the same arguments (numpy's PCG64 stream, seeded with (seed, layer)).

        hidden:    width of the hidden state
        delta_rms: root mean square that the delta shall have, for all layers or by layer, given rows of `row_rms`
        conv:      False leaves the demo form's convolution out, so that nothing is kept for each sequence
        Raises InvalidArgument for a manifest without a fusion form.
        """
        shape = _shape(model, hidden, conv)
        rms = dict(delta_rms) if isinstance(delta_rms, Mapping) else dict.fromkeys(model.layers, delta_rms)
        return cls(model, shape, {layer: _random_weights(shape, layer, seed, rms[layer], row_rms) for layer in shape.layers})

    @classmethod
    def load(cls, path: Path, model: EngramModel, hidden: int) -> EngramFusion:
        """Read weights that `save` wrote; their sha256 must be the manifest's fusion.weights.

        Raises NotFound, and what `from_bytes` does.
        """
        return cls.from_bytes(_read(path), model, hidden, origin=str(path))

    @classmethod
    def from_bytes(cls, data: bytes, model: EngramModel, hidden: int, *, origin: str = "fusion weights") -> EngramFusion:
        """The weights in `data`, a file that `save` wrote, in the dtype they have there; `origin` names it in errors.

        Raises InvalidArgument (a manifest without a digest, a tensor of another size), FingerprintMismatch (field
        `fusion.weights`: other bytes than the manifest asks for; `fusion.shape`: made for another hidden width, or other
        layers or rows), DataLoss (the digest fits, but it is no such file).
        """
        if model.fusion is None or model.fusion.weights is None:
            raise InvalidArgument(f"fusion.weights: the manifest of {model.name} names no weights; build them from a seed")
        digest = hashlib.sha256(data).hexdigest()
        if digest != model.fusion.weights:
            raise FingerprintMismatch("fusion.weights", model.fusion.weights, digest)
        tensors, metadata = _parse(origin, data)
        with_conv = any(name.endswith(".conv") for name in tensors)
        shape = _shape(model, hidden, with_conv)
        if metadata != shape.to_json():
            raise FingerprintMismatch("fusion.shape", shape.to_json(), metadata)
        return cls(model, shape, {layer: _layer_weights(shape, layer, tensors) for layer in shape.layers})

    def pack(self, *, keep: bool = True) -> None:
        """Lay all projections out for the CPU now, where the caller has the time, and not in the first step.

        keep: False lets go of the plain weights, half of what a fusion occupies; it can then not be written or moved any more
        """
        for layer in self.shape.layers:
            self.part(layer).pack(keep=keep)

    def to_bytes(self) -> bytes:
        """The weights as a safetensors file; its sha256 is what a manifest's fusion.weights holds.

        Raises InvalidArgument once `pack` has let go of them.
        """
        if not all(self.part(layer).wkv.numel() for layer in self.shape.layers):
            raise InvalidArgument("fusion: only the packed weights are left, which no file holds; pack with keep=True")
        tensors = {name.removeprefix("parts."): tensor.contiguous() for name, tensor in self.state_dict().items()}
        data: bytes = save(tensors, {"treadle": self.shape.to_json()})  # one key: a second would be written in random order
        return data

    def save(self, path: Path) -> str:
        """Write the weights to `path` (whole or not at all) and return their sha256."""
        data = self.to_bytes()
        partial = path.with_name(path.name + ".partial")
        partial.write_bytes(data)
        partial.rename(path)
        return hashlib.sha256(data).hexdigest()

    @property
    def history_widths(self) -> dict[int, int]:
        """What a SequenceKV must keep for each token (layer -> width): the convolution's inputs; empty without one."""
        return dict.fromkeys(self.shape.layers, self.shape.hidden) if self.shape.dilation else {}

    @torch.inference_mode()
    def forward(
        self,
        layer: int,
        hidden: Tensor,
        rows: Tensor,
        live: Tensor | None = None,
        starts: Sequence[int] = (),
        kv: Sequence[KeepsHistory] = (),
    ) -> Tensor:
        """What is to be added to the hidden state before `layer`; call it once for each step and layer.

        hidden: [T, hidden]
        rows:   [T, C, row.bytes] uint8, borrowed, as gathered
        live:   [T] bool or None, False where a token is dead or its rows are missing: its gate is 0
        starts, kv: the step's, as in CausalLM.forward; needed where `history_widths` is not empty, and appended to there
        Returns [T, hidden] of hidden's dtype, computed in fp32.
        Raises InvalidArgument (shapes, a layer without an Engram, a convolution without its sequences).
        """
        part = self.part(layer)
        self.check(hidden, rows, live)
        key, value = part.project(dequantise(rows, self.row).flatten(1)).chunk(2, dim=-1)
        trust = gate(hidden.to(torch.float32), key, part.query_weight, part.key_weight, self.shape.form)
        return self.gated(layer, trust.unsqueeze(-1) * value, live, starts, kv).to(hidden.dtype)

    def gated(self, layer: int, value: Tensor, live: Tensor | None, starts: Sequence[int], kv: Sequence[KeepsHistory]) -> Tensor:
        """The delta [T, hidden] of gated values [T, hidden] fp32: tokens that are not live silenced, the convolution added."""
        part = self.part(layer)
        if live is not None:
            value = torch.where(live.unsqueeze(-1), value, 0.0)  # chosen, not multiplied: garbage may be NaN
        return value if part.conv is None else value + self._short_conv(part, layer, value, starts, kv)

    def _short_conv(
        self, part: FusionLayer, layer: int, value: Tensor, starts: Sequence[int], kv: Sequence[KeepsHistory]
    ) -> Tensor:
        """SiLU of the causal depthwise convolution over each sequence; zeros stand before its first token."""
        if len(starts) != len(kv) + 1 or starts[-1] != len(value):
            raise InvalidArgument("fusion: the convolution needs the step's starts and sequences; make them with `history_widths`")
        assert part.conv is not None
        assert part.conv_norm is not None
        conv = part.conv.to(torch.float32)
        normed = rms_norm(value, (self.shape.hidden,), part.conv_norm.to(torch.float32), CONV_EPS)
        dilation, before = self.shape.dilation, (CONV_KERNEL - 1) * self.shape.dilation
        pieces, bases = [], []
        for index, sequence in enumerate(kv):
            chunk = normed[starts[index] : starts[index + 1]]
            bases.append(starts[index] + index * before + torch.arange(len(chunk)))
            pieces += [sequence.history(layer, before), chunk]
            sequence.append_history(layer, chunk)
        padded, base = (
            torch.cat(pieces),
            torch.cat(bases),
        )  # each sequence's chunk behind its own past; row of each token's oldest tap
        out = padded[base] * conv[:, 0]
        for tap in range(1, CONV_KERNEL):
            out = out + padded[base + tap * dilation] * conv[:, tap]
        return silu(out)

    def part(self, layer: int) -> FusionLayer:
        """The weights of one layer. Raises InvalidArgument for a layer without an Engram."""
        if layer not in self.shape.layers:
            raise InvalidArgument(f"layer {layer}: the fusion has layers {list(self.shape.layers)}")
        part = self.parts[str(layer)]
        assert isinstance(part, FusionLayer)
        return part

    def check(self, hidden: Tensor, rows: Tensor, live: Tensor | None) -> None:
        """Raise InvalidArgument unless the arrays have the shapes that `forward` asks for."""
        if hidden.ndim != 2 or hidden.shape[1] != self.shape.hidden or rows.shape[0] != hidden.shape[0]:
            raise InvalidArgument(
                f"fusion: hidden [T, {self.shape.hidden}] and rows [T, …] expected, got {list(hidden.shape)}, {list(rows.shape)}"
            )
        if rows.shape[1] * self.row.dim != self.shape.inputs:
            raise InvalidArgument(f"rows: {rows.shape[1]} columns, {self.shape.inputs // self.row.dim} expected")
        if live is not None and (live.shape != hidden.shape[:1] or live.dtype != torch.bool):
            raise InvalidArgument(f"live: bool [{hidden.shape[0]}] expected, got {live.dtype} {list(live.shape)}")


def _shape(model: EngramModel, hidden: int, conv: bool) -> FusionShape:
    if model.fusion is None:
        raise InvalidArgument(f"fusion: the manifest of {model.name} has no fusion form")
    dilation = model.order_max if model.fusion.form == "demo" and conv else 0
    return FusionShape(model.fusion.form, model.layers, hidden, model.columns * model.row.dim, dilation)


def _sizes(shape: FusionShape) -> dict[str, tuple[int, ...]]:
    hidden = shape.hidden
    sizes: dict[str, tuple[int, ...]] = {"wkv": (2 * hidden, shape.inputs), "query_weight": (hidden,), "key_weight": (hidden,)}
    if shape.form == "demo":
        sizes["bias"] = (2 * hidden,)
    if shape.dilation:
        sizes |= {"conv_norm": (hidden,), "conv": (hidden, CONV_KERNEL)}
    return sizes


def _random_weights(shape: FusionShape, layer: int, seed: int, delta_rms: float, row_rms: float) -> dict[str, Tensor]:
    draw = np.random.default_rng([seed, layer])
    sizes = _sizes(shape)
    weights = {name: torch.zeros(size) if name == "bias" else torch.ones(size) for name, size in sizes.items()}
    unit = torch.from_numpy(draw.standard_normal(sizes["wkv"], dtype=np.float32)) / (row_rms * shape.inputs**0.5)
    # A gate over random keys has a root mean square of 0.53. The value carries 0.9 of the delta and the convolution, where
    # there is one, 0.4: SiLU halves small numbers, and four taps of unit variance add up to twice one of them.
    value_rms = delta_rms / 0.53 * (0.9 if shape.dilation else 1.0)
    weights["wkv"] = torch.cat((unit[: shape.hidden], unit[shape.hidden :] * value_rms))
    if shape.dilation:
        weights["conv"] = torch.from_numpy(draw.standard_normal(sizes["conv"], dtype=np.float32)) * (0.4 * delta_rms)
    return weights


def _layer_weights(shape: FusionShape, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    weights = {}
    for name, size in _sizes(shape).items():
        tensor = tensors.get(f"{layer}.{name}")
        if tensor is None or tuple(tensor.shape) != size or not tensor.is_floating_point():
            found = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise InvalidArgument(f"fusion weights: {layer}.{name} is {found}, {list(size)} expected")
        weights[name] = tensor
    return weights


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise NotFound(f"{path}: no such fusion weights")
    if path.stat().st_size > WEIGHTS_BYTES_MAX:
        raise InvalidArgument(f"{path}: {path.stat().st_size} bytes, fusion weights have at most {WEIGHTS_BYTES_MAX}")
    return path.read_bytes()


def _parse(origin: str, data: bytes) -> tuple[dict[str, Tensor], str]:
    try:
        tensors = load(data)
        header: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return tensors, str(header["__metadata__"]["treadle"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataLoss(f"{origin}: not a file of fusion weights: {error!r}") from error

"""What one sequence leaves behind in each layer: rotated keys, values, and what some layers ask to see again.

Owns the buffers, their growth and their limit, and cutting them into blocks for a prefix cache. Does not decide what is
cached, evicted or trusted (the engine), and does not compute (`model`, `attention`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from treadle.contract.errors import InvalidArgument, ResourceExhausted
from treadle.nn.config import ModelConfig

CAPACITY_STEP = 64  # tokens; capacity grows to twice itself, at least to a multiple of this


class KeepsHistory(Protocol):
    """What a layer's convolution has seen of one sequence before this step, wherever it is kept; SequenceKV fits."""

    def history(self, layer: int, rows: int) -> Tensor:
        """The last `rows` vectors before this step: [rows, width] fp32, zeros where the sequence had not begun."""

    def append_history(self, layer: int, vectors: Tensor) -> None:
        """Keep the vectors of this step, [T, width]."""


@dataclass(frozen=True, slots=True, eq=False)
class KVBlock:
    """A copy of the tokens [start, end) of a sequence: immutable, shared freely, good for any sequence with that same prefix.

    kv:      [layers, 2, kv_heads, end - start, head_dim], keys then values
    history: layer -> [end - start, width]
    """

    start: int
    end: int
    kv: Tensor
    history: Mapping[int, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes held by this block."""
        return self.kv.nbytes + sum(rows.nbytes for rows in self.history.values())


class SequenceKV:
    """Keys and values of one sequence, appended in place; not safe for two threads at once.

    config:  gives layers, heads and the limit, positions_max tokens
    dtype:   of keys and values
    history: layer -> width of an fp32 vector kept for each token beside its KV (the Engram convolution's inputs)
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, history: Mapping[int, int] | None = None) -> None:
        self.tokens_max = config.positions_max
        self.length = 0
        self.capacity = 0
        # Each head's tokens lie together: decoding streams them, and runs up to 1.9 times as fast as over a token-major layout.
        self._kv = torch.empty(config.layers, 2, config.kv_heads, 0, config.head_dim, dtype=dtype)
        self._layers = list(self._kv.unbind(0))
        self._history = {layer: torch.empty(0, width) for layer, width in (history or {}).items()}

    @property
    def nbytes(self) -> int:
        """Bytes allocated: the operating system backs them only as they are written."""
        return self._kv.nbytes + sum(rows.nbytes for rows in self._history.values())

    @torch.inference_mode(False)  # else a buffer that grew inside a forward could not be written outside of one
    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` in all. Raises ResourceExhausted beyond positions_max; nothing has changed then."""
        if tokens > self.tokens_max:
            raise ResourceExhausted(f"sequence: {tokens} tokens, the model's positions_max is {self.tokens_max}")
        if tokens <= self.capacity:
            return
        stepped = -(-max(tokens, 2 * self.capacity) // CAPACITY_STEP) * CAPACITY_STEP
        capacity = min(stepped, self.tokens_max)
        grown = self._kv.new_empty(*self._kv.shape[:3], capacity, self._kv.shape[4])
        grown[:, :, :, : self.length] = self._kv[:, :, :, : self.length]
        for layer, rows in self._history.items():
            self._history[layer] = rows.new_empty(capacity, rows.shape[1])
            self._history[layer][: self.length] = rows[: self.length]
        self._kv, self._layers, self.capacity = grown, list(grown.unbind(0)), capacity

    def append(self, layer: int, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values of one layer behind `length`, and return all of that layer's keys and values.

        kv: [T, 2, kv_heads, head_dim]; room was reserved. The tokens count only once `advance` is called, so that a step
        that fails half-way leaves the sequence as it was.
        Returns views [length + T, kv_heads, head_dim], valid until the next `reserve`.
        """
        end = self.length + kv.shape[0]
        rows = self._layers[layer].narrow(2, 0, end)
        rows.narrow(2, self.length, kv.shape[0]).copy_(kv.permute(1, 2, 0, 3))
        keys, values = rows.transpose(1, 2).unbind(0)
        return keys, values

    def advance(self, tokens: int) -> None:
        """Count `tokens` that have been appended in every layer."""
        if self.length + tokens > self.capacity:
            raise InvalidArgument(f"advance: {self.length} + {tokens} tokens exceed the reserved {self.capacity}")
        self.length += tokens

    def truncate(self, tokens: int) -> None:
        """Forget all but the first `tokens`. Raises InvalidArgument if there are fewer."""
        if not 0 <= tokens <= self.length:
            raise InvalidArgument(f"truncate: {tokens} of {self.length} tokens")
        self.length = tokens

    def keys(self, layer: int) -> Tensor:
        """View [length, kv_heads, head_dim] of one layer's rotated keys, valid until the next `reserve`."""
        return self._layers[layer][0, :, : self.length].transpose(0, 1)

    def values(self, layer: int) -> Tensor:
        """View [length, kv_heads, head_dim] of one layer's values, valid until the next `reserve`."""
        return self._layers[layer][1, :, : self.length].transpose(0, 1)

    def as_array(self) -> NDArray[np.float32]:
        """The fp32 buffer itself, [layers, 2, kv_heads, capacity, head_dim], valid until the next `reserve`."""
        array: NDArray[np.float32] = self._kv.numpy()
        return array

    def history(self, layer: int, rows: int) -> Tensor:
        """The last `rows` history vectors before this step: [rows, width] fp32, zeros where the sequence had not begun.

        Raises InvalidArgument for a layer that this sequence keeps no history for.
        """
        kept = self._history_of(layer)
        last = kept[max(0, self.length - rows) : self.length]
        return pad(last, (0, 0, rows - last.shape[0], 0)) if last.shape[0] < rows else last

    def append_history(self, layer: int, vectors: Tensor) -> None:
        """Write the step's history vectors [T, width] behind `length`; they count once `advance` is called."""
        end = self.length + vectors.shape[0]
        if end > self.capacity:
            self.reserve(end)
        self._history_of(layer)[self.length : end] = vectors

    def block(self, start: int, end: int) -> KVBlock:
        """A copy of the tokens [start, end). Raises InvalidArgument unless 0 <= start < end <= length."""
        if not 0 <= start < end <= self.length:
            raise InvalidArgument(f"block: [{start}, {end}) of {self.length} tokens")
        history = {layer: rows[start:end].clone() for layer, rows in self._history.items()}
        return KVBlock(start, end, self._kv[:, :, :, start:end].clone(memory_format=torch.contiguous_format), history)

    def extend_from(self, block: KVBlock) -> None:
        """Append a copied block; it must begin where this sequence ends and come from the same model and dtype.

        Raises InvalidArgument where it does not, ResourceExhausted beyond positions_max; nothing has changed then.
        """
        tokens = block.end - block.start
        if block.start != self.length:
            raise InvalidArgument(f"block: begins at {block.start}, the sequence has {self.length} tokens")
        if block.kv.shape != (*self._kv.shape[:3], tokens, self._kv.shape[4]) or block.kv.dtype != self._kv.dtype:
            raise InvalidArgument(
                f"block: {block.kv.dtype} {list(block.kv.shape)} does not fit {self._kv.dtype} {list(self._kv.shape)}"
            )
        if block.history.keys() != self._history.keys():
            raise InvalidArgument(f"block: history of layers {sorted(block.history)}, the sequence keeps {sorted(self._history)}")
        self.reserve(block.end)
        self._kv[:, :, :, block.start : block.end] = block.kv
        for layer, rows in block.history.items():
            self._history[layer][block.start : block.end] = rows
        self.length = block.end

    def _history_of(self, layer: int) -> Tensor:
        if layer not in self._history:
            raise InvalidArgument(f"history: none is kept for layer {layer}; make the sequence with the fusion's `history_widths`")
        return self._history[layer]

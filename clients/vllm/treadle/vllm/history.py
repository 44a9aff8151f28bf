"""What the fusion's convolution has seen, kept for each slot of vLLM's paged KV.

A vector depends on the hidden state, so that a prefix-cache hit cannot make it again from rows. It lies where the token's keys
and values lie, at block x block_tokens + offset, and so is shared, kept and forgotten with them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from treadle.contract.errors import InvalidArgument
from treadle.vllm.windows import Span


class HistoryPages:
    """Vectors by slot, for each layer that asks. Memory is taken as slots are first written: slots x width x 4 bytes at most."""

    def __init__(self, slots: int, block_tokens: int, device: torch.device | None = None) -> None:
        self.slots, self.block_tokens = slots, block_tokens
        self.page_device = device or torch.device("cpu")
        self._pages: dict[int, Tensor] = {}

    def page(self, layer: int, width: int) -> Tensor:
        """[slots, width] fp32 of a layer; all memories of a model have one width, that of its hidden state."""
        page = self._pages.get(layer)
        if page is None:
            page = self._pages[layer] = torch.empty(self.slots, width, dtype=torch.float32, device=self.page_device)
        if page.shape[1] != width:
            raise InvalidArgument(f"history: layer {layer} keeps vectors of {page.shape[1]}, not {width}")
        return page

    def slots_of(self, blocks: NDArray[np.int32], first: int, end: int) -> NDArray[np.int64]:
        """Where the tokens from `first` to `end` of a request lie. blocks: [n] of it, in order"""
        positions = np.arange(first, end)
        return blocks[positions // self.block_tokens].astype(np.int64) * self.block_tokens + positions % self.block_tokens

    def of(self, span: Span, blocks: NDArray[np.int32], reach: int, width: int) -> PagedHistory:
        """The history of one request in a step. blocks: [n] of the request; reach: tokens that the convolution looks back."""
        return PagedHistory(self, span, blocks, reach, width)


class PagedHistory:
    """One request's history in one step, as the fusion asks for it (a treadle.nn.kv.KeepsHistory)."""

    def __init__(self, pages: HistoryPages, span: Span, blocks: NDArray[np.int32], reach: int, width: int) -> None:
        self._pages, self._width, self._before = pages, width, min(span.first, reach)
        slots = pages.slots_of(blocks, span.first - self._before, span.first + span.count)
        self._slots = torch.from_numpy(slots).to(pages.page_device)

    def history(self, layer: int, rows: int) -> Tensor:
        """See KeepsHistory."""
        taken = min(rows, self._before)
        last = self._pages.page(layer, self._width)[self._slots[self._before - taken : self._before]]
        return pad(last, (0, 0, rows - taken, 0)) if taken < rows else last

    def append_history(self, layer: int, vectors: Tensor) -> None:
        """See KeepsHistory."""
        self._pages.page(layer, self._width)[self._slots[self._before :]] = vectors

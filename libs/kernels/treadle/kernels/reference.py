"""The kernels in numpy: the specification of the native form, and what runs where that was not built.

Owns what a row id is. Sources: Engram paper (arXiv 2601.07372) and its demo code, DeepSeek-V4.1's Engram, Qwen's per-layer
embeddings (PLE), as served by vLLM.

The window of the token at position i of its request: x_0 is the token itself, x_k the one k places before it, taken from the
look-back where the request's tokens of this step do not reach back far enough. With m the multipliers:

    mix_1 = x_0 m_0        mix_n = mix_(n-1) XOR x_(n-1) m_(n-1)        column (n, h) = mix_n mod prime(n, h)

Row id = column + the sum of the primes of the columns before it. Which ids enter:

- engram-demo, deepseek-v4.1: compressed ids, token_map[raw]. The start of the sequence or a dead token *blocks* its own place and
  all places further back: they read `pad`. A dead current token thus reads pad everywhere; its row ids stay in range, and the
  caller masks it. (The demo code knows no dead tokens: here they block in the same way.)
- qwen-ple: raw ids; pad is the EOS id. The start, a dead token or an EOS among the look-backs blocks its place and all further
  back. An EOS as the current token blocks nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from treadle.contract import Family, Windows
from treadle.kernels import arguments
from treadle.kernels.crc_reference import crc32c
from treadle.kernels.dedup_reference import spread, unique_rows
from treadle.kernels.dequantise_reference import dequantise
from treadle.kernels.hash_plan import HashPlan
from treadle.kernels.nearest_reference import nearest

__all__ = ["crc32c", "dequantise", "gather_rows", "lookup", "nearest", "row_ids", "spread", "unique_rows"]


def row_ids(plan: HashPlan, windows: Windows, out: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
    """Row ids of every token, head offsets added.

    out: [T, C] int64, owned by the caller, overwritten and returned; None: a new array
    Raises InvalidArgument for a token id that the plan does not know, or a look-back narrower than Nmax-1.
    """
    arguments.check_windows(plan, windows)
    arguments.check_tokens(plan, windows)
    out = arguments.row_ids_out(plan, windows, out)
    ids = _window_ids(plan, windows)
    column = 0
    mix = np.zeros(windows.token_count, dtype=np.uint64)
    for order in range(1, plan.order_max + 1):
        mix ^= ids[:, order - 1] * plan.multipliers[order - 1]
        if order in plan.orders:
            heads = slice(column, column + plan.heads)
            np.remainder(mix[:, None], plan.primes.view(np.uint64)[heads], out=out.view(np.uint64)[:, heads])
            column += plan.heads
    out += plan.offsets
    return out


def gather_rows(table: NDArray[np.uint8], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copy table[rows] into out.

    table: [N, row_bytes] uint8, C-contiguous, read-only; row_bytes 16 to 4096; may be shared memory
    rows:  [..., C] int64, head offsets already added; all are checked before any byte is read
    out:   [..., C, row_bytes] uint8, owned by the caller, overwritten; apart from the table
    Raises RowOutOfRange naming the first bad id, `out` is then untouched; InvalidArgument for shapes and dtypes. The native form
    alone: DataLoss where the file behind the table was truncated meanwhile; here that ends the process (SIGBUS).
    """
    arguments.check_gather(table, rows, out)
    if rows.size:
        np.take(table, rows, axis=0, out=out, mode="clip")  # the ids were checked; "raise" would copy through a buffer


def lookup(plan: HashPlan, table: NDArray[np.uint8], windows: Windows, out: NDArray[np.uint8]) -> None:
    """Hash and gather: out[i, c] = the row of column c of token i.

    table: [N, row_bytes] uint8 with N >= plan.rows_hashed    out: [T, C, row_bytes] uint8, owned by the caller, overwritten
    Raises InvalidArgument as `row_ids` does, and for a table that is too small; `out` is then untouched. DataLoss as `gather_rows`.
    """
    arguments.check_lookup_shapes(plan, table, windows, out)
    gather_rows(table, row_ids(plan, windows), out)


def _window_ids(plan: HashPlan, windows: Windows) -> NDArray[np.uint64]:
    """What the hash multiplies: [T, Nmax] uint64, column k the token k places back, blocked places filled with pad."""
    raw, blocked = _raw_windows(plan.order_max, windows)
    blocked |= raw < 0
    if plan.family is Family.QWEN_PLE:
        blocked[:, 1:] |= raw[:, 1:] == plan.eos
    np.logical_or.accumulate(blocked, axis=1, out=blocked)
    raw[blocked] = 0
    ids = raw if plan.token_map is None else plan.token_map[raw].astype(np.int64)
    ids[blocked] = plan.pad
    return ids.view(np.uint64)


def _raw_windows(order_max: int, windows: Windows) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Raw ids and dead marks of every window, both [T, Nmax]."""
    count = windows.token_count
    raw = np.empty((count, order_max), dtype=np.int64)
    dead = np.zeros((count, order_max), dtype=np.bool_)
    raw[:, 0] = windows.tokens
    if windows.dead is not None:
        dead[:, 0] = windows.dead
    request = np.repeat(np.arange(windows.lookback.shape[0]), np.diff(windows.starts))
    offset = np.arange(count) - windows.starts[request]  # place inside the request
    for back in range(1, order_max):
        raw[back:, back] = windows.tokens[:-back]
        dead[back:, back] = dead[:-back, 0]
        head = np.flatnonzero(offset < back)  # these reach back beyond the step
        column = back - offset[head] - 1
        raw[head, back] = windows.lookback[request[head], column]
        dead[head, back] = False if windows.lookback_dead is None else windows.lookback_dead[request[head], column]
    return raw, dead

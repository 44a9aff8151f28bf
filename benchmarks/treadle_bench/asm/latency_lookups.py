"""The ways to attend to a prefix that are timed against each other: attention over it, and lookups with gather and merge.

Owns what is inside the clock. Every scan has keys of its own, so that none finds in the cache what another one has read.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from treadle.contract.errors import Unavailable
from treadle.kernels import DecodeStep, EntryArrays, EntryStates, merge_states, nearest
from treadle.nn.attention import merge
from treadle_bench.asm.latency_layer import (
    GROUP,
    HEAD_DIM,
    HEADS,
    HEADS_JOINED,
    KEY_DIM,
    KV_HEADS,
    LOOKUPS,
    Floats,
    Layer,
    Lists,
    asked_keys,
)

Find = Callable[[Floats], NDArray[Any]]
"""Lookup keys [B, lookups, D] to entries [B, lookups]."""
Attend = Callable[[Floats], object]
"""One token's query heads [heads, head_dim] to its attention state, which is worth something until the next call."""

Stored = tuple[NDArray[Any], NDArray[np.float16] | None]
"""Rows and their scales."""

GRAPH_NEIGHBOURS, GRAPH_BUILD, GRAPH_SEARCH = 12, 100, 32  # hnswlib's M, ef_construction, ef


def attentions(layer: Layer) -> dict[str, Attend]:
    """Exact attention over the prefix, four ways: what the best of them takes is the baseline."""
    keys, values = (torch.from_numpy(each) for each in layer.prefix())
    keys_first, values_first, scale = keys.unsqueeze(0), values.unsqueeze(0), 1 / math.sqrt(HEAD_DIM)

    def sdpa(query: Floats) -> Tensor:
        heads = torch.from_numpy(query).view(1, HEADS, 1, HEAD_DIM)
        return scaled_dot_product_attention(heads, keys_first, values_first, enable_gqa=True)

    def folded(query: Floats) -> Tensor:
        heads = torch.from_numpy(query).view(1, KV_HEADS, GROUP, HEAD_DIM)
        return scaled_dot_product_attention(heads, keys_first, values_first)

    def bmm(query: Floats) -> Tensor:
        heads = torch.from_numpy(query).view(KV_HEADS, GROUP, HEAD_DIM) * scale
        return torch.bmm(torch.bmm(heads, keys.transpose(1, 2)).softmax(-1), values)

    own = np.stack((keys.numpy(), values.numpy()))[
        None
    ]  # [1, 2, kv_heads, L, head_dim], the last of L tokens written again and again
    step = DecodeStep([own], np.array([layer.entries - 1]), np.zeros(1, np.int64), HEADS)
    last = np.ascontiguousarray(own[:, :, :, -1])
    out, log_z = np.empty((1, HEADS, HEAD_DIM), np.float32), np.empty((1, HEADS), np.float32)

    def decoded(query: Floats) -> Tensor:  # as an engine decodes
        step.attend(0, query[None], last, out, log_z)
        return torch.from_numpy(out)

    return {"SDPA": sdpa, "SDPA, heads folded": folded, "two bmm": bmm, "DecodeStep": decoded}


def lookups(layer: Layer, probed: int) -> dict[str, tuple[Attend, Find]]:
    """Lookups by this library's kernels, keys and states of one dtype each, as an engine calls them; and their search alone, for its recall."""
    fp32: tuple[Stored, Stored] = (layer.keys, None), (layer.states, None)
    half: tuple[Stored, Stored] = (bf16(layer.keys), None), (bf16(layer.states), None)
    small: tuple[Stored, Stored] = int8(layer.keys), int8(layer.states)
    forms = {
        "linear, fp32": (fp32, None), "two levels, fp32": (fp32, layer.lists), "two levels, bf16": (half, layer.lists),
        "linear, int8": (small, None), "two levels, int8": (small, layer.lists),
    }  # fmt: skip
    return {
        name: (_looked_up(layer, keys, states, lists, probed), scan(*keys, lists, probed))
        for name, ((keys, states), lists) in forms.items()
    }


def _looked_up(layer: Layer, keys: Stored, states: Stored, lists: Lists | None, probed: int) -> Attend:
    """Lookup and merge with the request's own state, which is there already: its tokens cost the same in all variants."""
    heads_of = np.arange(HEADS, dtype=np.int32).reshape(KV_HEADS, LOOKUPS, HEADS_JOINED)
    list_keys, list_starts = (None, None) if lists is None else (lists.keys, lists.starts)
    entries = EntryArrays(
        keys[0].copy(), states[0], layer.log_z, np.zeros(KV_HEADS, np.float32), heads_of, keys[1], states[1], list_keys, list_starts, probed
    )  # fmt: skip
    found_by = EntryStates(entries)
    own, own_log_z = np.zeros((1, HEADS, HEAD_DIM), np.float32), np.zeros((1, HEADS), np.float32)

    def attend(query: Floats) -> tuple[Floats, Floats]:
        own.fill(0)
        own_log_z.fill(0)
        found = found_by.find(query[None])
        merge_states(own, own_log_z, None, found.states, found.log_z)
        return own, own_log_z

    return attend


def scan(keys: NDArray[Any], scales: NDArray[np.float16] | None = None, lists: Lists | None = None, probed: int = 1) -> Find:
    """`treadle.kernels.nearest` over a copy of the keys."""
    own = keys.copy()
    if lists is None:
        return lambda asked: nearest(asked, own, scales)[0]
    return lambda asked: nearest(asked, own, scales, lists.keys, lists.starts, probed)[0]


def rivals(layer: Layer, probed: int) -> tuple[dict[str, tuple[Attend, Find]], list[str]]:
    """The same by libraries that are installed, and what is said of those that are not."""
    openers: dict[str, tuple[str, Callable[[Any], Find]]] = {
        "hnswlib, fp32": ("hnswlib", lambda module: graph_of(module, layer)),
        "faiss IVF-flat, fp32": ("faiss", lambda module: inverted_file_of(module, layer, probed)),
    }
    found: dict[str, tuple[Attend, Find]] = {}
    missing = []
    for name, (package, opened) in openers.items():
        try:
            find = opened(_imported(package))
        except Unavailable as error:
            missing.append(f"not measured: {name}: {error}")
            continue
        found[name] = (_merged(find, layer), find)
    return found, missing


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = {"faiss": "faiss-cpu"}.get(package, package)
        raise Unavailable(f"not installed here; `pip install {name}` beside this package measures it") from error


def graph_of(hnswlib: Any, layer: Layer) -> Find:
    """One graph for each codebook, by inner product of unit vectors."""
    graphs = []
    for keys in layer.keys:
        graph = hnswlib.Index(space="ip", dim=KEY_DIM)
        graph.init_index(max_elements=layer.entries, M=GRAPH_NEIGHBOURS, ef_construction=GRAPH_BUILD, random_seed=0)
        graph.set_num_threads(1)
        graph.add_items(keys)
        graph.set_ef(GRAPH_SEARCH)
        graphs.append(graph)
    return lambda asked: np.stack(
        [graph.knn_query(each, k=1)[0][:, 0].astype(np.int32) for graph, each in zip(graphs, asked, strict=True)]
    )


def inverted_file_of(faiss: Any, layer: Layer, probed: int) -> Find:
    """One IVF-flat index for each codebook, with as many lists as the dictionary has."""
    faiss.omp_set_num_threads(1)
    lists, indices = layer.lists.keys.shape[1], []
    for keys in layer.keys:
        index = faiss.IndexIVFFlat(faiss.IndexFlatIP(KEY_DIM), KEY_DIM, lists, faiss.METRIC_INNER_PRODUCT)
        index.own_fields, index.nprobe, index.cp.min_points_per_centroid = False, probed, 1
        index.train(keys)
        index.add(keys)
        indices.append((index, index.quantizer))
    return lambda asked: np.stack([index.search(each, 1)[1][:, 0] for (index, _), each in zip(indices, asked, strict=True)])


def int8(values: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Numbers and their scale along the last axis, rounded up, so that the largest fits."""
    scales = np.nextafter((np.abs(values).max(axis=-1) / 127).astype(np.float16), np.float16(np.inf))
    return np.rint(values / scales[..., None].astype(np.float32)).astype(np.int8), scales


def bf16(values: Floats) -> NDArray[np.uint16]:
    """Nearest bf16 as the bits that it has."""
    return torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()


def _merged(find: Find, layer: Layer) -> Attend:
    """The same around a search of another library."""
    states, log_z = torch.from_numpy(layer.states).reshape(-1, KEY_DIM), torch.from_numpy(layer.log_z).reshape(-1, HEADS_JOINED)
    own, own_log_z = torch.zeros(1, HEADS, HEAD_DIM), torch.zeros(1, HEADS)
    first_entries = np.arange(KV_HEADS, dtype=np.int64)[:, None] * layer.entries

    def attend(query: Floats) -> tuple[Tensor, Tensor]:
        flat = torch.from_numpy((find(asked_keys(query)) + first_entries).reshape(-1))
        found = states.index_select(0, flat).view(1, HEADS, HEAD_DIM), log_z.index_select(0, flat).view(1, HEADS)
        return merge(own, own_log_z, *found)

    return attend

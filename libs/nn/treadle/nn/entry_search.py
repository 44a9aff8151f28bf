"""The nearest entry over a graph of a codebook's keys, where scanning them takes too long: hnswlib, which is optional."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument, NotFound
from treadle.kernels import as_numbers

GRAPH_LINKS, GRAPH_BUILD_EF, GRAPH_EF = 16, 200, 64  # hnswlib's M, ef_construction and ef


def check_hnswlib() -> Any:
    """The library. Raises NotFound where it is not installed."""
    try:
        import hnswlib
    except ImportError as error:
        raise NotFound("index 'hnsw' needs hnswlib: pip install treadle-nn[hnsw], or choose index 'scan'") from error
    return hnswlib


class GraphSearch:
    """An hnswlib graph of each codebook's keys (arXiv 1603.09320): a few hundred products a query, and now and then not the nearest entry."""

    def __init__(self, keys: NDArray[Any], key_scales: NDArray[np.float16] | None, seed: int) -> None:
        """Copies and links all keys, [B, K, D]: seconds for 10,000 entries. Raises NotFound where hnswlib is not installed."""
        hnswlib = check_hnswlib()
        self._graphs = []
        for book in range(len(keys)):
            graph = hnswlib.Index(space="ip", dim=keys.shape[2])
            graph.init_index(keys.shape[1], M=GRAPH_LINKS, ef_construction=GRAPH_BUILD_EF, random_seed=seed % (1 << 31))
            graph.add_items(as_numbers(keys[book], None if key_scales is None else key_scales[book]), num_threads=1)
            graph.set_ef(GRAPH_EF)
            self._graphs.append(graph)

    @property
    def nbytes(self) -> int:
        """Bytes that the graphs take, the copied keys among them."""
        return sum(int(graph.index_file_size()) for graph in self._graphs)

    def find(self, queries: NDArray[np.float32]) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """For queries [B, N, D] of length 1, C-contiguous: the entry of each in its codebook int32 [B, N], and its cosine fp32 [B, N].

        Any thread may ask. Raises InvalidArgument where a query holds NaN.
        """
        if np.isnan(queries).any():
            raise InvalidArgument("queries: one holds NaN")
        found = [graph.knn_query(asked, k=1, num_threads=1) for graph, asked in zip(self._graphs, queries, strict=True)]
        index = np.stack([labels[:, 0] for labels, _ in found]).astype(np.int32)
        return index, (1.0 - np.stack([distances[:, 0] for _, distances in found])).astype(np.float32)

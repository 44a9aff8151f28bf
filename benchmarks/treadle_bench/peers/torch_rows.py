"""torch over the mapped table, one thread: `index_select` into a buffer, and `F.embedding`, what an embedding layer calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from treadle_bench.peers.peer import Call, Fetcher, Held, Peer


def tensor_over(array: NDArray[np.uint8]) -> torch.Tensor:
    """A tensor on the memory of an array, which may be read-only: torch warns of that, and nobody writes here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


@contextmanager
def _opened(held: Held) -> Iterator[Sequence[Fetcher]]:
    table, threads = tensor_over(held.table), torch.get_num_threads()

    def index_select(ids: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        torch.index_select(table, 0, torch.from_numpy(ids.reshape(-1)), out=torch.from_numpy(out).view(-1, table.shape[1]))

    def embedding(ids: NDArray[np.int64], _: NDArray[np.uint8]) -> NDArray[np.uint8]:
        rows: NDArray[np.uint8] = torch.nn.functional.embedding(torch.from_numpy(ids), table).numpy()
        return rows

    torch.set_num_threads(1)
    try:
        yield [Call("torch.index_select", held, index_select), Call("F.embedding", held, embedding)]
    finally:
        torch.set_num_threads(threads)


PEER = Peer("torch", "pip install torch", _opened, in_process=True)

"""What a peer is: something that is opened on a table and then fetches rows of it by id."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.layouts import Layout

IDS_BYTES_MAX = 32 << 20  # of ids made beforehand for one table


@dataclass(frozen=True, slots=True)
class Held:
    """One table as it is held here.

    table:        u8 [N, row_bytes], mapped read-only from `path`, where it begins at `offset_bytes`
    pool_address: of the pool that holds it; pool_model: its name there
    copied_rows:  how many of its first rows a peer copies that keeps them in a form of its own
    pages:        size of the mapping's pages, such as 4KiB
    """

    layout: Layout
    table: NDArray[np.uint8]
    path: Path
    offset_bytes: int
    pool_address: str
    pool_model: str
    copied_rows: int
    pages: str

    def id_sets(self, table_rows: int) -> IdSets:
        """Ids below `table_rows`."""
        return IdSets.uniform(table_rows, self.layout.columns, IDS_BYTES_MAX // 8 // self.layout.columns)


class Fetcher(Protocol):
    """Fetches rows. table_rows: how many first rows of the table it knows; pages: of its memory, such as 4KiB; empty: not known."""

    name: str
    table_rows: int
    pages: str

    def microseconds(self, ids: IdSets, first: int, tokens: int) -> float:
        """What fetching the rows of `tokens` tokens took. ids: always the same object. Raises Unavailable for no answer in time."""
        ...

    def fetches_rightly(self, ids: IdSets, first: int, tokens: int) -> bool:
        """The same rows, compared with the table byte by byte."""
        ...


@dataclass(frozen=True, slots=True)
class Peer:
    """Something that users may take. get: how to have it here. Opening raises Unavailable with the reason why it cannot run."""

    name: str
    get: str
    open: Callable[[Held], AbstractContextManager[Sequence[Fetcher]]]
    in_process: bool = False


class Call:
    """A fetcher that is a call in this process: ids [T, C] and out u8 [T, C, row_bytes] -> rows, in `out` or in an array of its own."""

    def __init__(
        self, name: str, held: Held, act: Callable[[NDArray[np.int64], NDArray[np.uint8]], object],
        pages: str | None = None, buffer: Callable[[tuple[int, ...]], NDArray[np.uint8]] | None = None,
    ) -> None:  # fmt: skip
        """act: returns None if the rows lie in `out`, else what holds them; pages: None: it reads the mapped table; buffer: makes `out`"""
        self.name, self.table_rows, self.pages = name, len(held.table), held.pages if pages is None else pages
        self._held, self._act, self._buffer = held, act, buffer or _plain_buffer
        self._out: NDArray[np.uint8] | None = None

    def microseconds(self, ids: IdSets, first: int, tokens: int) -> float:
        wanted, out = ids.rows(first, tokens), self._out_of(tokens)
        begun = time.perf_counter_ns()
        self._act(wanted, out)
        return (time.perf_counter_ns() - begun) / 1e3

    def fetches_rightly(self, ids: IdSets, first: int, tokens: int) -> bool:
        wanted, out = ids.rows(first, tokens), self._out_of(tokens)
        out[:] = 0  # so its pages are there before anything is timed
        returned = self._act(wanted, out)
        fetched = out if returned is None else np.asarray(returned)
        return fetched.tobytes() == self._held.table[wanted].tobytes()

    def _out_of(self, tokens: int) -> NDArray[np.uint8]:
        shape = (tokens, self._held.layout.columns, self._held.layout.row.bytes)
        if self._out is None or self._out.shape != shape:
            self._out = None  # given back first: the memory that buffers are made of may not be enough for two
            self._out = self._buffer(shape)
        return self._out


def _plain_buffer(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    return np.empty(shape, dtype=np.uint8)


def pages_of(page_bytes: int) -> str:
    """The size of a page as it stands in figures; empty for 0, which is none in this process."""
    return "" if not page_bytes else f"{page_bytes >> 10}KiB" if page_bytes < 1 << 20 else f"{page_bytes >> 20}MiB"

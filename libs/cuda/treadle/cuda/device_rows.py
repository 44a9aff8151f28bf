"""Rows on a device: gathered from registered host memory on a stream beside the model's, with an event that layer k's stream waits for.

The host's one copy is read by the device over the bus (the CXL paper's Listing 2): no copy by the host, no launch for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from treadle.contract import EngramModel, InvalidArgument, RowOutOfRange, Unavailable, Windows
from treadle.cuda.library import Library, library
from treadle.cuda.registration import RegisteredTable
from treadle.kernels import HashPlan, row_ids

_NONE_BAD = (1 << 63) - 1  # the smallest place with a row id outside the table starts above every place


class TableHandle(Protocol):
    """What is needed of an EngramHandle whose rows lie in this process (transports mapped and local)."""

    @property
    def model(self) -> EngramModel: ...
    def tables(self) -> Mapping[int, tuple[HashPlan, NDArray[np.uint8]]]: ...


@dataclass(frozen=True, slots=True)
class DeviceLayerRows:
    """Rows of one layer on their way to the device.

    rows:  u8 [T, C, row_bytes] on the device, the caller's; not to be read before `event`
    event: recorded behind the gather
    """

    rows: torch.Tensor
    event: torch.cuda.Event
    _bad: torch.Tensor
    _row_count: int

    def wait(self, stream: torch.cuda.Stream | None = None) -> torch.Tensor:
        """Have `stream` (None: the current one) wait for the rows; returns them at once, without waiting on the host."""
        target = torch.cuda.current_stream(self.rows.device) if stream is None else stream
        target.wait_event(self.event)
        self.rows.record_stream(target)
        return self.rows

    def check(self) -> None:
        """Wait on the host, and raise RowOutOfRange naming the first bad place: such rows are zeros. For ids that a device computed."""
        self.event.synchronize()
        place = int(self._bad.item())
        if place != _NONE_BAD:
            raise RowOutOfRange(f"rows[{place}] lies outside the table's rows 0 to {self._row_count - 1}")


class DeviceRows:
    """The tables of one handle, registered for one device. Close it before the handle; a context manager.

    device:     a CUDA device
    blocks_max: thread blocks of one gather, so that the model keeps its multiprocessors; 0: two for each of them (not measured: no GPU yet)
    Raises Unavailable where there is no device, or the rows do not lie in this process; ResourceExhausted where they cannot be pinned.
    """

    def __init__(
        self, handle: TableHandle, device: torch.device | str = "cuda", *, blocks_max: int = 0, native: Library | None = None
    ) -> None:
        """native: the compiled library; None: this package's own"""
        if torch.device(device).type != "cuda" or blocks_max < 0:
            raise InvalidArgument(f"a CUDA device and blocks_max >= 0 are needed, got {device} and {blocks_max}")
        self._native, self._blocks_max = native or library(), blocks_max
        self.model, self._plans = handle.model, dict[int, HashPlan]()
        self._tables: dict[int, RegisteredTable] = {}
        tables = handle.tables()
        self._index = _index_of(torch.device(device))
        self.device = torch.device("cuda", self._index)
        try:
            for layer, (plan, table) in tables.items():
                self._plans[layer] = plan
                self._tables[layer] = RegisteredTable(self._native, self._index, table)
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        except BaseException:
            self.close()
            raise

    @classmethod
    def register(cls, handle: TableHandle, device: torch.device | str = "cuda") -> Self:
        """Register a handle's tables; some seconds for large ones."""
        return cls(handle, device)

    def gather(
        self, layer: int, row_ids: torch.Tensor | NDArray[np.int64], stream: torch.cuda.Stream | None = None
    ) -> DeviceLayerRows:
        """Start to bring rows of `layer` to the device; returns at once.

        row_ids: int64 [T, C], head offsets added: on this device, or a numpy array, which is checked here and sent
        stream:  on which `row_ids` were computed; None: the current one
        Raises InvalidArgument for shapes and layers, RowOutOfRange for ids of the host; ids of the device: see `DeviceLayerRows.check`.
        """
        table, made_on = self._table(layer), torch.cuda.current_stream(self.device) if stream is None else stream
        with torch.cuda.stream(self._side):  # all but a device's ids is made here, so that the gather waits for nothing else
            ids = self._on_device(table, row_ids, made_on)
            rows = torch.empty((*ids.shape, table.row_bytes), dtype=torch.uint8, device=self.device)
            bad = torch.full((1,), _NONE_BAD, dtype=torch.int64, device=self.device)
            self._native.gather(
                self._index, table.address, table.row_count, table.row_bytes, ids.data_ptr(), ids.numel(), rows.data_ptr(), bad.data_ptr(),
                blocks_max=self._blocks_max, stream=self._side.cuda_stream,
            )  # fmt: skip
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._side)
        return DeviceLayerRows(rows, event, bad, table.row_count)

    def lookup(self, windows: Windows, layers: Sequence[int] | None = None) -> dict[int, DeviceLayerRows]:
        """Hash a step's windows on the host and start the gathers of `layers` (None: all), the first layer first."""
        wanted = self.model.layers if layers is None else layers
        return {layer: self.gather(layer, row_ids(self._plan(layer), windows)) for layer in wanted}

    def close(self) -> None:
        """Wait for gathers in flight, and let go of the memory."""
        if self._tables and hasattr(self, "_side"):
            self._side.synchronize()
        while self._tables:
            self._tables.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _table(self, layer: int) -> RegisteredTable:
        self.model.layer_position(layer)  # raises InvalidArgument, naming the layers there are
        if layer not in self._tables:
            raise InvalidArgument("these tables are not registered any more: closed")
        return self._tables[layer]

    def _plan(self, layer: int) -> HashPlan:
        self.model.layer_position(layer)
        return self._plans[layer]

    def _on_device(self, table: RegisteredTable, ids: torch.Tensor | NDArray[np.int64], made_on: torch.cuda.Stream) -> torch.Tensor:
        if isinstance(ids, np.ndarray):
            return torch.from_numpy(checked_ids(ids, table.row_count)).pin_memory().to(self.device, non_blocking=True)
        if ids.dtype != torch.int64 or ids.dim() != 2 or ids.device != self.device or not ids.is_contiguous():
            raise InvalidArgument(
                f"row_ids: contiguous int64 [T, C] on {self.device} expected, got {ids.dtype} {list(ids.shape)} on {ids.device}"
            )
        self._side.wait_stream(made_on)
        ids.record_stream(self._side)  # its memory is not given to others before the gather has ended
        return ids


def _index_of(device: torch.device) -> int:
    """The device's number; the current one where none is named. Raises Unavailable where torch has no such device."""
    if not torch.cuda.is_available():
        raise Unavailable(
            "torch sees no CUDA device: there is none, or this torch was built without CUDA; use the transport mapped"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise Unavailable(f"there is no device {index}: torch sees {torch.cuda.device_count()}")
    return index


def checked_ids(ids: NDArray[np.int64], row_count: int) -> NDArray[np.int64]:
    """Ids of the host, C-contiguous int64 [T, C] below `row_count`. Raises InvalidArgument, RowOutOfRange naming the first bad place."""
    if ids.dtype != np.int64 or ids.ndim != 2:
        raise InvalidArgument(f"row_ids: int64 [T, C] expected, got {ids.dtype} {list(ids.shape)}")
    outside = (ids < 0) | (ids >= row_count)
    if outside.any():
        place = int(np.argmax(outside))
        raise RowOutOfRange(f"rows[{place}] is {int(ids.reshape(-1)[place])}; the table has rows 0 to {row_count - 1}")
    return np.ascontiguousarray(ids)

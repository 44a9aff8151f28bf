"""Engram tables as a client sees them: handles, tickets, the prefetcher of a step."""

from treadle.client.engram.async_pool import AsyncEngramPool
from treadle.client.engram.handle import EngramHandle, fake_handle
from treadle.client.engram.pool import EngramPool
from treadle.client.engram.step_prefetcher import GroupRows, LayerFigures, Step, StepPrefetcher
from treadle.client.engram.ticket import LayerRows, LookupTicket

__all__ = [
    "AsyncEngramPool", "EngramHandle", "EngramPool", "GroupRows", "LayerFigures", "LayerRows", "LookupTicket", "Step",
    "StepPrefetcher", "fake_handle",
]  # fmt: skip

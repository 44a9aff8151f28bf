"""What lookups at other hosts' socket doors count is among the worker's metrics."""

from __future__ import annotations

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from inference_worker.adapters.remote_metrics import RemoteMetrics
from treadle.contract import Deadline, TreadleError
from treadle.dataplane import IMPLEMENTATION, RemoteLayer, RemoteRows, remote_stats


@pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: install a C++20 compiler")
def test_lookups_over_owners_are_counted() -> None:
    registry = CollectorRegistry()
    RemoteMetrics(registry)
    before = registry.get_sample_value("treadle_worker_engram_remote_requests_total")
    assert before is not None
    rows = RemoteRows("0" * 64, bytes(32), [RemoteLayer(1, 10, 8, 1)])
    try:
        until = Deadline.after(0.05)
        ticket = rows.submit_gather(1, np.zeros(3, np.int64), np.zeros((3, 8), np.uint8), until, until)  # nobody holds them
        with pytest.raises(TreadleError):
            ticket.wait(10.0)
    finally:
        rows.close()
    assert registry.get_sample_value("treadle_worker_engram_remote_requests_total") == before + 1
    assert {f"{family.name.removeprefix('treadle_worker_engram_remote_')}_total" for family in registry.collect()} == set(
        remote_stats()
    )

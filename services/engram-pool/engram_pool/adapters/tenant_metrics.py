"""What tenants have had, slack, predictions and reserves for Prometheus: read off the data plane when metrics are fetched."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from treadle.dataplane import PREDICTION_ERROR_PARTS, SLACK_SECONDS, DeadlineQueue, Tenants


class TenantMetrics(Collector):
    """A collector on `registry`. queue: of the native doors; None: there are none."""

    def __init__(self, registry: CollectorRegistry, tenants: Tenants, queue: DeadlineQueue | None) -> None:
        self._tenants, self._queue = tenants, queue
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        admitted = CounterMetricFamily("treadle_engram_admitted", "Requests for rows that were admitted", labels=["tenant"])
        late = CounterMetricFamily("treadle_engram_late", "Requests admitted that ended after their deadline", labels=["tenant"])
        refused = CounterMetricFamily("treadle_engram_refused", "Requests refused at once, by reason", labels=["tenant", "reason"])
        rows = CounterMetricFamily("treadle_engram_tenant_rows", "Rows handed out, by tier", labels=["tenant", "tier"])
        byte_count = CounterMetricFamily("treadle_engram_row_bytes", "Bytes of rows handed out, by tier", labels=["tenant", "tier"])
        slack = HistogramMetricFamily(
            "treadle_engram_slack_seconds", "Deadline minus completion; negative: late", labels=["tenant"]
        )
        for index in range(len(self._tenants.limits)):
            now = self._tenants.figures(index)
            admitted.add_metric([now.name], now.admitted)
            late.add_metric([now.name], now.late)
            for reason, count in now.refused.items():
                refused.add_metric([now.name, reason], count)
            for tier in now.rows:
                rows.add_metric([now.name, tier], now.rows[tier])
                byte_count.add_metric([now.name, tier], now.row_bytes[tier])
            slack.add_metric([now.name], _cumulative(SLACK_SECONDS, now.slack), now.slack_seconds)
        yield from (admitted, late, refused, rows, byte_count, slack)
        if self._queue is not None:
            yield from _of_queue(self._queue)


def _of_queue(queue: DeadlineQueue) -> Iterator[Metric]:
    now, reserved = queue.stats(), queue.reserved()
    errors = HistogramMetricFamily(
        "treadle_engram_prediction_error_ratio", "Predicted minus real finish at the native doors, over the time the request took"
    )
    errors.add_metric([], _cumulative(PREDICTION_ERROR_PARTS, now["prediction_errors"]), now["prediction_error_sum"])
    yield errors
    for name, text, value in (
        ("door_requests_queued", "Requests at the native doors that wait for a thread", now["queued"]),
        (
            "reserved_bytes_per_second",
            "Bandwidth of this host's memory that is kept for other traffic",
            reserved.reserved_bytes_per_second,
        ),
        ("left_bytes_per_second", "Bandwidth that is left to rows; 0: not measured", reserved.left_bytes_per_second),
    ):
        yield GaugeMetricFamily(f"treadle_engram_{name}", text, value=value)


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    buckets, total = [], 0
    for bound, count in zip([*map(str, bounds), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets

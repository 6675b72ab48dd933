"""What the server counts, in a Prometheus registry of its own. Knows no requests, only their labels.

What the engine counts is read from it when Prometheus asks, and costs nothing in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from worldkv.engine.engine import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One app's. Two apps in one process do not share anything."""

    def __init__(self, engine: Engine[Any, Any, Any]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine))
        self.requests = Counter(
            "worldkv_requests",
            "Requests by dialect and outcome (ok, error, abandoned: the client went away first).",
            ["dialect", "outcome"],
            registry=self._registry,
        )
        self.errors = Counter("worldkv_errors", "Errors told to clients, by reason.", ["code"], registry=self._registry)
        self.sessions_ended = Counter(
            "worldkv_sessions_ended", "Sessions ended, by reason.", ["reason"], registry=self._registry
        )
        self.connections = Gauge("worldkv_connections", "Open websockets.", registry=self._registry)
        self.sessions = Gauge("worldkv_sessions", "Open sessions.", registry=self._registry)
        self.snapshots = Gauge("worldkv_snapshots", "Snapshots held by clients.", registry=self._registry)
        self.ready = Gauge("worldkv_ready", "1 from the end of warm-up to shutdown.", registry=self._registry)
        self._stages = Histogram(
            "worldkv_tick_stage_seconds",
            "Latency of answered ticks by stage.",
            ["stage"],
            buckets=_STAGE_BUCKETS,
            registry=self._registry,
        )

    def observe_tick(self, milliseconds: Mapping[str, float]) -> None:
        for stage, value in milliseconds.items():
            self._stages.labels(stage).observe(value / 1e3)

    def error_counts(self) -> dict[str, int]:
        """Errors told to clients so far, by code."""
        samples = (sample for metric in self.errors.collect() for sample in metric.samples)
        return {s.labels["code"]: int(s.value) for s in samples if s.name.endswith("_total")}

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine[Any, Any, Any]) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats, capacity = self._engine.stats(), self._engine.capacity()
        blocks = GaugeMetricFamily(
            "worldkv_blocks",
            "KV blocks: in all, held by histories and conditioning, free, held by more than one history, promised.",
            labels=["state"],
        )
        for state, number in {
            "total": capacity.num_blocks,
            "used": capacity.num_used,
            "free": capacity.num_blocks - capacity.num_used,
            "shared": stats.blocks_shared,
            "charged": capacity.num_charged,
        }.items():
            blocks.add_metric([state], number)
        yield blocks
        attention = GaugeMetricFamily("worldkv_attention", "1 for the attention backend in use.", labels=["backend"])
        attention.add_metric([stats.attention], 1)
        yield attention
        yield _rows_per_forward(stats.rows_per_forward)
        yield GaugeMetricFamily("worldkv_block_bytes", "Bytes of one block.", capacity.bytes_per_block)
        yield GaugeMetricFamily("worldkv_sessions_parked", "Sessions on the host.", stats.num_parked)
        yield GaugeMetricFamily("worldkv_parked_bytes", "Bytes of host memory of parked sessions.", stats.bytes_parked)
        yield GaugeMetricFamily("worldkv_sessions_more", "Sessions that still fit.", capacity.num_more_sessions)
        yield GaugeMetricFamily("worldkv_ticks_in_flight", "Ticks waiting or running.", stats.num_ticks_in_flight)
        yield CounterMetricFamily("worldkv_blocks_copied", "Blocks copied on write.", stats.blocks_copied)
        conditioning = CounterMetricFamily(
            "worldkv_conditioning_lookups", "Conditioning asked for, by whether it was stored.", labels=["outcome"]
        )
        conditioning.add_metric(["hit"], stats.conditioning_hits)
        conditioning.add_metric(["miss"], stats.conditioning_misses)
        yield conditioning


def _rows_per_forward(forwards: Mapping[int, int]) -> HistogramMetricFamily:
    """`forwards`: number of rows -> forwards of that many."""
    buckets = [(str(limit), float(sum(n for rows, n in forwards.items() if rows <= limit))) for limit in _ROW_BUCKETS]
    family = HistogramMetricFamily("worldkv_rows_per_forward", "Rows (sessions times branches) of a forward.")
    family.add_metric(
        [], [*buckets, ("+Inf", float(sum(forwards.values())))], float(sum(rows * n for rows, n in forwards.items()))
    )
    return family

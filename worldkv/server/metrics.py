"""What the server counts, in a Prometheus registry of its own. Knows no requests, only their labels."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

CONTENT_TYPE = CONTENT_TYPE_LATEST
_STAGE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One app's. Two apps in one process do not share anything."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
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

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

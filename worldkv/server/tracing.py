"""OpenTelemetry traces of ticks, where a collector is named: a span per tick, and one per stage in it.

A tick shares its batches with others, so a stage's time is the sum of the batches that it took part in; the stages are
laid one after the other in the order in which they happen.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worldkv.server.console.history import TickRow

# of a tick, in the order in which they happen; "read" is the server's, before the tick
STAGES = ("read", "queue", "preprocess", "encode", "commit", "denoise", "postprocess")


class TickTracer:
    """`provider`: an OpenTelemetry TracerProvider."""

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("worldkv")

    @classmethod
    def to_collector(cls, url: str) -> TickTracer:
        """Spans go to an OTLP collector over HTTP, in batches, off the serving threads.

        Raises ValueError without the packages.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ValueError(f"traces need OpenTelemetry ({error}): pip install 'worldkv[otel]'") from error

        provider = TracerProvider(resource=Resource.create({"service.name": "worldkv"}))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=f"{url.rstrip('/')}/v1/traces")))
        return cls(provider)

    def tick(self, session_id: str, row: TickRow) -> None:
        """One answered tick, which ended now."""
        from opentelemetry.trace import set_span_in_context

        end = time.time_ns()
        begin = end - _nanoseconds(row.timings.get("total", sum(row.timings.values())))
        attributes = {
            "worldkv.session": session_id,
            "worldkv.tick": row.number,
            **{f"worldkv.{name}": "" if value is None else value for name, value in row.facts.items()},
            "worldkv.imagined": row.imagined,
        }
        tick = self._tracer.start_span("tick", start_time=begin, attributes=attributes)
        context, at = set_span_in_context(tick), begin
        for stage in STAGES:
            if (milliseconds := row.timings.get(stage)) is not None:
                span = self._tracer.start_span(stage, context=context, start_time=at)
                at += _nanoseconds(milliseconds)
                span.end(end_time=at)
        tick.end(end_time=end)

    def close(self) -> None:
        """Send what waits."""
        self._provider.shutdown()


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1e6)

"""Metrics, logs and traces: complete, documented, and what the dashboard asks for exists."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from engines import random_checkpoint
from server_fakes import eventually, http_get
from test_console import call, observation

from worldkv.cli.main import main
from worldkv.cli.top import sparks
from worldkv.client import PolicyClient
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.server.logs import TICKS, JsonLines
from worldkv.server.server import PolicyServer, ServerConfig

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def server() -> Iterator[PolicyServer]:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=4))
    with PolicyServer(policy, ServerConfig(port=0)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        yield server
    policy.close()
    policy.engine.shutdown()


def test_every_metric_is_documented_and_the_dashboard_asks_for_what_exists(server: PolicyServer) -> None:
    exposed = set(re.findall(r"^# TYPE (\w+) ", http_get(server.port, "/metrics")[1], re.MULTILINE))
    exposed = {name for name in exposed if not name.endswith("_created")}
    documented = set(re.findall(r"`(worldkv_\w+)(?:\{[\w,]+\})?`", (DOCS / "observability.md").read_text()))
    assert {name.removesuffix("_total") for name in documented} == {name.removesuffix("_total") for name in exposed}
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = {
        name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"worldkv_\w+", t["expr"])
    }
    bases = {re.sub(r"_(bucket|sum|count|total)$", "", name) for name in asked}
    assert bases == {re.sub(r"_total$", "", name) for name in exposed} - {"worldkv_attention"}


def test_a_line_of_json_an_event_with_session_tick_and_reason(
    server: PolicyServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), caplog.at_level(logging.INFO, TICKS):
        with PolicyClient(port=server.port, session_id="arm") as robot:
            robot.infer(observation(0))
        call(server, "DELETE", "sessions/arm")
        assert http_get(server.port, "/v1/sessions/arm")[0] == 404
    told = [json.loads(JsonLines().format(record)) for record in caplog.records]
    by_event = {line["event"]: line for line in told if line.get("session") in (None, "arm")}
    assert by_event["session_opened"]["session"] == "arm"
    assert (by_event["tick"]["tick"], by_event["tick"]["restart_reason"]) == (0, "first tick")
    assert by_event["tick"]["milliseconds"]["total"] > 0
    assert by_event["session_ended"]["reason"] == "deleted"
    assert by_event["warning"]["level"] == "warning"
    error = by_event["error"]
    assert (error["code"], len(error["error_id"])) == ("session_not_found", 8)
    assert "SessionNotFound" in error["exception"]
    assert all("\n" not in JsonLines().format(record) for record in caplog.records)


def test_a_tick_is_a_span_with_its_stages(server: PolicyServer) -> None:
    trace = pytest.importorskip("opentelemetry.sdk.trace")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from worldkv.server.tracing import STAGES, TickTracer

    provider = trace.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(memory))
    server._service.tracer = TickTracer(provider)
    try:
        with PolicyClient(port=server.port, session_id="traced") as robot:
            robot.infer(observation(0))
    finally:
        server._service.tracer = None
    spans = {span.name: span for span in memory.get_finished_spans()}
    assert set(spans) == {"tick", *STAGES} - {"read"}, "the server's own part is not in a tick"
    tick = spans.pop("tick")
    assert (tick.attributes["worldkv.session"], tick.attributes["worldkv.tick"]) == ("traced", 0)
    for span in spans.values():
        assert span.parent.span_id == tick.context.span_id
        assert tick.start_time <= span.start_time <= span.end_time
    call(server, "DELETE", "sessions/traced")


def test_a_collector_without_the_packages_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert main(["serve", "--checkpoint", str(random_checkpoint("ti2v")), "--otlp", "http://collector:4318"]) == 2
    error = capsys.readouterr().err
    assert "pip install 'worldkv[otel]'" in error
    assert "loading" not in error


def test_top_prints_what_the_console_shows(server: PolicyServer, capsys: pytest.CaptureFixture[str]) -> None:
    with PolicyClient(port=server.port, session_id="arm-7") as robot:
        robot.infer(observation(0))
        assert main(["top", "--url", f"ws://127.0.0.1:{server.port}", "--once"]) == 0
    out = capsys.readouterr().out
    for words in ("RANDOM WEIGHTS", "1 session, 0 parked", "arm-7", "1/9", "more fit", "blocks [#"):
        assert words in out
    assert main(["top", "--url", "ws://127.0.0.1:9"]) == 1
    assert "check the address" in capsys.readouterr().err
    assert sparks([1, 2, 4]) == "▃▅█"
    call(server, "DELETE", "sessions/arm-7")

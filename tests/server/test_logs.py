"""Log lines: nobody forges one, nobody makes a storm of them."""

from __future__ import annotations

import http.client
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import pytest
from server_fakes import FakePolicy, infer_message, raw_client, receive, serving

from worldkv.server.logs import LINES, TICKS, JsonLines, TextLines, Throttle
from worldkv.wire import pack

FORGED = "x\n2026-01-01 00:00:00,000 I worldkv: key accepted\r\x1b[2J\x9b31m\u2028\u202e\x00\x7fend"
FORMS = {"text": TextLines, "json": JsonLines}


@contextmanager
def log(form: str) -> Iterator[io.StringIO]:
    """What a server's process would write to standard error."""
    stream, root = io.StringIO(), logging.getLogger()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(FORMS[form]())
    handler.addFilter(Throttle())
    root.addHandler(handler)
    levels = {logger: logger.level for logger in (root, logging.getLogger(TICKS))}  # a command may have set them
    for logger in levels:
        logger.setLevel(logging.INFO)
    try:
        yield stream
    finally:
        root.removeHandler(handler)
        for logger, level in levels.items():
            logger.setLevel(level)


def require_honest(text: str, form: str) -> None:
    assert all(c == "\n" or c.isprintable() for c in text), "a control character came through"
    for line in text.splitlines():
        if form == "json":
            json.loads(line)
        else:
            assert not line.startswith("2026-01-01 00:00:00,000"), f"forged: {line}"


@pytest.mark.parametrize("form", FORMS)
def test_a_forged_message_stays_in_its_line(form: str) -> None:
    with log(form) as written:
        logger = logging.getLogger("worldkv.test")
        logger.info("path %s", FORGED, extra={"event": "e", "session": FORGED})
        try:
            raise ValueError(FORGED)
        except ValueError:
            logger.exception(FORGED)
    require_honest(written.getvalue(), form)
    assert "key accepted" in written.getvalue(), "it was cut instead"
    if form == "json":
        assert json.loads(written.getvalue().splitlines()[0])["session"] == FORGED, "JSON loses nothing"


@pytest.mark.parametrize("form", FORMS)
def test_no_client_forges_a_line_by_path_id_header_or_prompt(form: str) -> None:
    with log(form) as written, serving(FakePolicy()) as server:
        for path, headers in [
            (f"/v1/{quote(FORGED)}", {}),
            (f"/v1/sessions/{quote(FORGED)}", {}),
            ("/v1/sessions", {"origin": "http://x\x9b31m"}),
            ("/v1/sessions", {"host": "x\x9b31m\x85"}),
        ]:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
            connection.request("GET", path, headers=headers)
            assert connection.getresponse().status >= 400
            connection.close()
        for message in (infer_message(prompt=7), infer_message(FORGED), infer_message(FORGED, prompt=FORGED)):
            with raw_client(server.port) as ws:
                ws.send(pack({**message, FORGED: 1}))
                receive(ws)
    assert "key accepted" in written.getvalue()
    require_honest(written.getvalue(), form)


@pytest.mark.parametrize("form", FORMS)
def test_a_storm_is_cut_and_counted_and_others_are_heard(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("worldkv.server.counts.time.monotonic", lambda: now[0])
    with log(form) as written:
        storm, other = logging.getLogger("worldkv.storm"), logging.getLogger("worldkv.other")
        for number in range(100_000):
            storm.warning("refused %d", number)
        other.warning("something else")
        now[0] += 1.0
        storm.warning("refused %d", -1)
    lines = written.getvalue().splitlines()
    assert len(lines) == LINES + 2
    assert "something else" in lines[-2]
    assert f"refused -1 ({100_000 - LINES} more lines of this kind were left out before)" in lines[-1]


def test_ticks_are_no_storm() -> None:
    with log("json") as written:
        for _ in range(2 * LINES):
            logging.getLogger(TICKS).info("tick")
    assert written.getvalue().count("tick") >= 2 * LINES

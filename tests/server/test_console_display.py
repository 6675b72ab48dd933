"""What the console displays, in headless Chromium: nothing hidden, nothing cut, axes with units and times, and numbers
that say what they are of."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from console_page import (
    PATIENCE_S,
    call,
    click,
    displayed,
    image_of,
    num_colours,
    observation,
    panel,
    press,
    record_labels,
    resize,
    row,
    serving,
    shown,
    theme,
    visit,
    wait_for,
)
from server_fakes import eventually

from worldkv.client import PolicyClient
from worldkv.robots.policy import Policy
from worldkv.server.console.history import SessionHistory, TickRow
from worldkv.server.server import PolicyServer
from worldkv.server.sessions import Entry

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(180)]

HIDDEN_YET_SHOWN = """return [...document.querySelectorAll('[hidden]')]
    .filter((e) => getComputedStyle(e).display !== 'none' || e.getClientRects().length).map((e) => e.outerHTML)"""
# What sticks out of the screen, or out of a box that cuts it off without a way to scroll there.
CUT_OFF = """const cut = [];
    for (const e of document.querySelectorAll('body *')) {
      if (!e.checkVisibility() || e.closest('#toast')) continue;
      const r = e.getBoundingClientRect(), s = getComputedStyle(e);
      if (r.width && (r.left < -1 || r.right > innerWidth + 1)) cut.push(e.outerHTML.slice(0, 200));
      if (s.overflowX !== 'visible' && e.scrollWidth > e.clientWidth + 1)
        cut.push('scrolls: ' + e.outerHTML.slice(0, 200));
    }
    return cut;"""


@contextmanager
def many_sessions(server: PolicyServer, number: int) -> Iterator[list[str]]:
    """All of one engine session: the page does not know. Their latencies and ages are in no order."""
    table, session = server._service.sessions, server._service.app.open_session("one")
    names = [f"robot-{n}" for n in range(number)]
    now = time.time()
    for n, name in enumerate(names):
        history = SessionHistory(opened_at=now - 60 * (7 * n % number))
        for tick in range(n % 3):
            timings = {"denoise": 10.0 * (11 * n % number), "total": 10.0 * (11 * n % number)}
            history.ticks.append(TickRow(tick, now - 5 + tick, timings, {"frames_cached": 1}, False))
        table._entries[name] = Entry(name, session, True, last_used=time.monotonic() + 1e9, history=history)
    try:
        yield names
    finally:
        for name in names:
            del table._entries[name]
        session.close("done")


@pytest.mark.parametrize("random_weights", [True, False])
def test_nothing_that_is_hidden_is_displayed_and_only_random_weights_are_called_random(
    browser: Any, console_policy: Policy, monkeypatch: pytest.MonkeyPatch, random_weights: bool
) -> None:
    monkeypatch.setattr(console_policy, "random_weights", random_weights)
    expected = ["random weights"] if random_weights else []
    with serving(console_policy, api_key="right") as server:
        visit(browser, server)
        eventually(lambda: bool(displayed(browser, "#key")), PATIENCE_S)
        assert displayed(browser, "#random") == [], "nobody has logged in yet"
        assert browser.execute_script(HIDDEN_YET_SHOWN) == []
        browser.find_element("id", "key").send_keys("right")
        click(browser, "Open")
        wait_for(browser, "No session is open")
        for address in ("#/", "#/s/nobody"):
            browser.execute_script(f"location.hash = '{address}'")
            wait_for(browser, "This session is not open" if "nobody" in address else "Block pool")
            assert displayed(browser, "#random") == expected
            assert browser.execute_script(HIDDEN_YET_SHOWN) == []


def test_live_is_who_has_a_socket_and_others_are_told_apart(browser: Any, console_server: PolicyServer) -> None:
    for name in ("planned", "sleeper"):
        call(console_server, "POST", "sessions", {"session_id": name})
    call(console_server, "POST", "sessions/sleeper/park")
    visit(browser, console_server)
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        client.infer(observation(0))
        wait_for(browser, "live", row("arm", "state"))
        assert shown(browser, row("planned", "state")) == "open, nobody connected"
        assert shown(browser, row("sleeper", "state")) == "parked"
    wait_for(browser, "open, nobody connected", row("arm", "state"))


def test_actions_and_state_have_names_units_and_times(browser: Any, console_server: PolicyServer) -> None:
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        client.infer(observation(0))
        visit(browser, console_server, "#/s/arm")
        written = record_labels(browser)
        wait_for(browser, "live", ".session .chip")
        client.infer(observation(1))
        wait_for(browser, "rad", panel("arm"))
        robot = console_server._service.app.embodiment
        end = f"{robot.action_horizon / robot.fps:.1f} s"
        joints = {f"joint_position {number}, rad" for number in range(1, 8)}
        expected = {*joints, "gripper_position, 0 (open) to 1 (closed)", "0", end}
        eventually(lambda: written("actions of the chunk") >= expected, PATIENCE_S)
        state = displayed(browser, ".values dt")
        assert state == ["joint_positionrad", "gripper_position0 (open) to 1 (closed)"]
        eventually(lambda: any(words.endswith(" ms") for words in written("time by stage")), PATIENCE_S)
        assert any(words.count(":") == 2 for words in written("time by stage")), "no time of day below the ticks"


def test_percentiles_are_those_of_the_ticks_they_name(browser: Any, console_server: PolicyServer) -> None:
    with many_sessions(console_server, 1):
        history = console_server._service.sessions.get("robot-0").history
        now = time.time()
        for number in range(60):
            timings = {"denoise": 100.0 + number, "total": 100.0 + number}
            history.ticks.append(TickRow(number, now - 60 + number, timings, {"frames_cached": 1}, False))
        history.num_ticks = 60
        visit(browser, console_server)
        wait_for(browser, "159 ms", row("robot-0", "latency"))
        assert shown(browser, row("robot-0", "p50")) == "139 ms"  # of 120 to 159
        assert shown(browser, row("robot-0", "p99")) == "159 ms"
        chart = browser.find_element("css selector", f"{row('robot-0')} canvas")
        assert chart.get_attribute("title") == "the last 40 ticks, over 39 s"
        browser.find_element("link text", "robot-0").click()
        wait_for(browser, "40 ticks over 39 s; p50 129 ms, p99 159 ms, of the last 60", panel("robot-0"))


def test_a_chart_of_two_minutes_does_not_stretch_two_seconds(browser: Any, console_server: PolicyServer) -> None:
    visit(browser, console_server)
    written = record_labels(browser)
    wait_for(browser, "live", "#status")
    eventually(lambda: written("rows per forward") >= {"2 min ago", "1 min ago", "now"}, PATIENCE_S)
    script = """const c = document.querySelector("canvas[aria-label='rows per forward']"), g = c.getContext('2d');
        const blue = getComputedStyle(document.documentElement).getPropertyValue('--blue').trim().slice(1);
        const [r, b] = [0, 4].map((at) => parseInt(blue.slice(at, at + 2), 16));
        const d = g.getImageData(0, 0, c.width, c.height).data, columns = [];
        for (let i = 0; i < d.length; i += 4)
          if (Math.abs(d[i] - r) < 40 && Math.abs(d[i + 2] - b) < 40 && d[i + 3] > 200)
            columns.push((i / 4) % c.width / c.width);
        return columns.length ? [Math.min(...columns), Math.max(...columns)] : null"""
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        first = client.infer(observation(0))

        def is_drawn() -> bool:
            return len(client.infer(observation(1))) == len(first) and browser.execute_script(script) is not None

        eventually(is_drawn, PATIENCE_S)
    assert browser.execute_script(script)[0] > 0.7, "what was seen for some seconds fills two minutes"


def test_axes_have_round_numbers_and_rows_are_whole(browser: Any, console_server: PolicyServer) -> None:
    with many_sessions(console_server, 1):
        history = console_server._service.sessions.get("robot-0").history
        for total in (37.0, 159.0, 90.0):
            history.ticks.append(
                TickRow(0, time.time(), {"denoise": total, "total": total}, {"frames_cached": 1}, False)
            )
        visit(browser, console_server)
        written = record_labels(browser)
        browser.execute_script("location.hash = '#/s/robot-0'")
        eventually(lambda: written("time by stage") >= {"0", "100 ms", "200 ms"}, PATIENCE_S)
        browser.execute_script("location.hash = '#/'")
        eventually(lambda: len(written("rows per forward")) > 3, PATIENCE_S)
        marks = written("rows per forward") - {"2 min ago", "1 min ago", "now", "none yet"}
        assert {"0", "1"} <= marks
        assert all(mark.isdigit() for mark in marks), "half a row"


@pytest.mark.parametrize(
    ("most", "whole", "expected"),
    [
        (0.0, False, [0, 1]),
        (1.0, True, [0, 1]),
        (3.6, True, [0, 2, 4]),
        (6.0, True, [0, 2, 4, 6]),
        (64.0, True, [0, 25, 50, 75]),
        (159.0, False, [0, 100, 200]),
        (1025.0, False, [0, 500, 1000, 1500]),
    ],
)
def test_an_axis_ends_at_or_above_the_largest_number(
    browser: Any, console_server: PolicyServer, most: float, whole: bool, expected: list[float]
) -> None:
    visit(browser, console_server)
    script = "return import('/console/charts.js').then(({ marks }) => marks(arguments[0], arguments[1]))"
    assert browser.execute_script(script, most, whole) == expected


def test_a_session_without_a_tick_says_so_and_displays_no_empty_pictures(
    browser: Any, console_server: PolicyServer
) -> None:
    call(console_server, "POST", "sessions", {"session_id": "planned"})
    visit(browser, console_server, "#/s/planned")
    wait_for(browser, "nothing yet: its next tick shows it", panel("planned"))
    wait_for(browser, "Actions of the newest chunknone yet", panel("planned"))
    wait_for(browser, "Statenone yet", panel("planned"))
    wait_for(browser, "The last ticks by stagenone yet", panel("planned"))
    assert displayed(browser, f"{panel('planned')} canvas") == []
    with PolicyClient(port=console_server.port, session_id="planned") as client:
        client.infer(observation(0))
        wait_for(browser, "what it expects to see next", panel("planned"))
        eventually(lambda: len(displayed(browser, f"{panel('planned')} canvas")) == 6, PATIENCE_S)  # three cameras too
        assert "none yet" not in shown(browser, panel("planned"))


def test_what_was_expected_is_displayed_beside_what_is_seen(browser: Any, console_server: PolicyServer) -> None:
    expected = f"{panel('arm')} canvas[aria-label='what it had expected']"
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        client.infer(observation(0))
        visit(browser, console_server, "#/s/arm")
        wait_for(browser, "live", ".session .chip")  # nothing is kept of ticks that nobody watched
        client.infer(observation(1))
        wait_for(browser, "tick 1, frame", panel("arm"))
        assert displayed(browser, expected) == [], "nobody saw what was imagined before"
        client.infer(observation(2))
        wait_for(browser, "what tick 1 had expected to see by now", panel("arm"))
        wait_for(browser, "tick 2, frame", panel("arm"))
        assert displayed(browser, expected) == [""]
        assert num_colours(browser, expected) > 10
        client.reset()
        client.infer(observation(0))
        wait_for(browser, "tick 3, frame", panel("arm"))
        assert displayed(browser, expected) == [], "another episode was not expected"


def test_who_was_asked_to_come_again_has_not_failed(browser: Any, console_server: PolicyServer) -> None:
    errors = console_server._service.metrics.errors
    for code, number in (("session_busy", 20), ("admission_refused", 3), ("bad_request", 2)):
        errors.labels(code).inc(number)
    visit(browser, console_server)
    wait_for(browser, "nothing has failed")
    wait_for(browser, "asked to come again: session busy: 20, no room: 3")
    wait_for(browser, "told what was wrong with a request: bad request: 2")
    errors.labels("internal").inc()
    wait_for(browser, "internal: 1")
    assert "nothing has failed" not in shown(browser)


def test_thirty_sessions_are_sorted_and_searched(browser: Any, console_server: PolicyServer) -> None:
    with many_sessions(console_server, 30) as names:
        visit(browser, console_server)
        order = lambda: displayed(browser, "td.id")  # noqa: E731
        eventually(lambda: order() == names, PATIENCE_S)
        histories = [console_server._service.sessions.get(name).history for name in names]
        with_ticks = [n for n in range(30) if histories[n].ticks]
        by_latency = sorted(with_ticks, key=lambda n: histories[n].ticks[-1].timings["total"])
        by_age = sorted(range(30), key=lambda n: -histories[n].opened_at)
        for column, wanted in (("latency", by_latency), ("age", by_age)):
            click(browser, column, "thead")
            eventually(lambda w=wanted: order()[: len(w)] == [names[n] for n in w], PATIENCE_S)
            click(browser, column, "thead")
            eventually(lambda w=wanted: order()[: len(w)] == [names[n] for n in reversed(w)], PATIENCE_S)
        click(browser, "session", "thead")
        eventually(lambda: order() == names, PATIENCE_S)  # 2 before 10
        press(browser, "/")
        press(browser, "ROBOT-2")
        eventually(lambda: order() == ["robot-2", *(f"robot-2{n}" for n in range(10))], PATIENCE_S)
        wait_for(browser, "11 of 30 shown")
        press(browser, "x")
        wait_for(browser, "No session matches “ROBOT-2x”.")
        press(browser, "\ue003")
        browser.find_element("link text", "robot-20").click()
        wait_for(browser, "open, nobody connected", panel("robot-20"))
        press(browser, "\ue00c")
        eventually(lambda: len(order()) == 11, PATIENCE_S)  # as it was left


def test_a_narrow_screen_shows_everything_and_cuts_nothing(browser: Any, console_server: PolicyServer) -> None:
    resize(browser, 390, 844)
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        client.infer(observation(0))
        long_name = "a-planner-with-" + "a-very-long-name-" * 6
        call(console_server, "POST", "sessions/arm/fork", {"session_id": long_name})
        call(console_server, "POST", "sessions/arm/snapshot", {})
        with many_sessions(console_server, 30):
            visit(browser, console_server)
            eventually(lambda: len(displayed(browser, "tr[data-id]")) == 32, PATIENCE_S)
            assert fits(browser) == []
            for control in ("#status", "#help", "input[type=search]", "thead button", row("arm", "latency")):
                assert displayed(browser, control), control
            assert {"session", "latency", "age", "state"} <= set(displayed(browser, "thead button"))
            browser.find_element("link text", "arm").click()
            wait_for(browser, "live", ".session .chip")
            client.infer(observation(1))
            wait_for(browser, "rad", panel("arm"))
            assert fits(browser) == []
            buttons = displayed(browser, ".session button")
            for name in ("Fork", "Snapshot", "Imagine", "Park", "Reset", "Close", "fork", "go back", "release"):
                assert name in buttons
            press(browser, "?")
            assert fits(browser) == []
            click(browser, "Done")
            press(browser, "r")
            wait_for(browser, "Reset arm?", "#ask")
            assert fits(browser) == []
            click(browser, "Keep it")


def fits(browser: Any) -> list[str]:
    width, room = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert room == 390
    return [f"the page is {width} wide"] * (width > room) + [str(cut) for cut in browser.execute_script(CUT_OFF)]


def test_colours_follow_the_theme_even_of_a_page_that_hears_nothing(browser: Any, console_policy: Policy) -> None:
    canvases = ("blocks of the pool", "rows per forward", "memory by kind")
    dot = "return getComputedStyle(document.querySelector('.legend .dot')).backgroundColor"
    with serving(console_policy) as server, PolicyClient(port=server.port, session_id="arm") as client:
        client.infer(observation(0))
        visit(browser, server)
        wait_for(browser, "live", row("arm", "state"))
    wait_for(browser, "does not answer", "#banner")  # from here on only the theme changes
    seen = {name: image_of(browser, f"canvas[aria-label='{name}']") for name in canvases}
    light = browser.execute_script(dot)
    theme(browser, "dark")
    for name in canvases:
        eventually(lambda n=name: image_of(browser, f"canvas[aria-label='{n}']") != seen[n], PATIENCE_S)
    assert browser.execute_script(dot) != light
    theme(browser, "light")
    for name in canvases:
        eventually(lambda n=name: image_of(browser, f"canvas[aria-label='{n}']") == seen[n], PATIENCE_S)
    assert browser.execute_script(dot) == light
    assert np.unique(list(seen.values())).size == len(canvases)

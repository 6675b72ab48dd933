"""The console in headless Chromium, with a robot ticking: what its buttons and keys do, and what a page says when the
server goes away."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")

from console_page import (
    PATIENCE_S,
    call,
    click,
    displayed,
    num_colours,
    observation,
    panel,
    press,
    robot,
    row,
    serving,
    shown,
    visit,
    wait_for,
)
from server_fakes import eventually, http_get

from worldkv.client import PolicyClient
from worldkv.robots.policy import Policy
from worldkv.server.server import PolicyServer, ServerConfig

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(180)]
ESCAPE = "\ue00c"


def state_of(server: PolicyServer, name: str) -> dict[str, Any]:
    return call(server, "GET", f"sessions/{name}")


def test_from_the_overview_to_two_futures_side_by_side(browser: Any, console_server: PolicyServer) -> None:
    with robot(console_server):
        visit(browser, console_server)
        wait_for(browser, "1 open")
        eventually(lambda: num_colours(browser, "canvas[aria-label='blocks of the pool']") > 3, PATIENCE_S)
        first = int(shown(browser, row("arm", "ticks")))
        eventually(lambda: int(shown(browser, row("arm", "ticks"))) > first, PATIENCE_S)
        eventually(lambda: num_colours(browser, f"{row('arm')} canvas") > 1, PATIENCE_S)
        browser.find_element("link text", "arm").click()
        wait_for(browser, "stack the cups")
        for name, least in (("wrist_image_left", 100), ("imagined video", 100), ("actions of the chunk", 2)):
            canvas = f"canvas[aria-label='{name}']"
            eventually(lambda c=canvas, n=least: num_colours(browser, c) > n, PATIENCE_S)
        click(browser, "Fork")
        wait_for(browser, "goes on from arm", panel("arm-fork1"))
        assert len(displayed(browser, "article.session")) == 2
        click(browser, "Imagine", panel("arm-fork1"))
        video = f"{panel('arm-fork1')} canvas[aria-label='imagined video']"
        eventually(lambda: num_colours(browser, video) > 100, PATIENCE_S)
        press(browser, ESCAPE)
        wait_for(browser, "2 open")


def test_a_parked_session_is_resumed_by_a_button_and_has_lost_nothing(
    browser: Any, console_server: PolicyServer
) -> None:
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        client.infer(observation(0))
        client.infer(observation(1))
        visit(browser, console_server, "#/s/arm")
        wait_for(browser, "live", ".chip")
        before = state_of(console_server, "arm")["frames_seen"]
        assert "Resume" not in displayed(browser, ".toolbar button")
        click(browser, "Park")
        wait_for(browser, "parked", ".session .chip")
        assert "Park" not in displayed(browser, ".toolbar button")
        click(browser, "Resume")
        wait_for(browser, "live", ".session .chip")
        wait_for(browser, "was resumed", ".log")
        assert "2 ticks" in shown(browser, ".session")
        state = state_of(console_server, "arm")
        assert (state["state"], state["frames_seen"]) == ("live", before)


def test_a_restore_goes_to_the_session_that_is_looked_at_and_names_it_and_its_robot(
    browser: Any, console_server: PolicyServer
) -> None:
    with PolicyClient(port=console_server.port, session_id="arm") as client:
        for tick in range(3):
            client.infer(observation(tick))
        call(console_server, "POST", "sessions/arm/fork", {"session_id": "fork"})
        snapshot = call(console_server, "POST", "sessions/fork/snapshot", {})
        client.infer(observation(3))
        frames = state_of(console_server, "arm")["frames_seen"]
        assert frames > snapshot["frames_seen"]
        visit(browser, console_server, "#/s/arm")
        wait_for(browser, "snapshot", panel("arm"))
        assert "go back" not in displayed(browser, "button"), "the snapshot is another session's"
        click(browser, "put arm here")
        question = shown(browser, "#ask")
        for words in ("Put arm back to fork's snapshot", "What arm has seen", "A robot is connected to arm"):
            assert words in question
        click(browser, "Keep it")
        assert state_of(console_server, "arm")["frames_seen"] == frames
        call(console_server, "POST", "sessions/fork/imagine", {})
        visit(browser, console_server, "#/s/fork")
        wait_for(browser, "snapshot", panel("fork"))
        click(browser, "go back")
        assert "Put fork back to its snapshot" in shown(browser, "#ask")
        assert "robot" not in shown(browser, "#ask"), "nobody is connected to the fork"
        click(browser, "Put fork back")
        wait_for(browser, "went back to a snapshot of fork", ".log")
        assert state_of(console_server, "fork")["frames_seen"] == snapshot["frames_seen"]
        assert state_of(console_server, "arm")["frames_seen"] == frames


def test_what_is_lost_is_asked_about_first(browser: Any, console_server: PolicyServer) -> None:
    with robot(console_server):
        visit(browser, console_server, "#/s/arm")
        wait_for(browser, "stack the cups")
        for letter, question in (("r", "Reset arm?"), ("c", "Close arm?"), ("i", "Imagine a tick of arm?")):
            eventually(browser.find_element("css selector", ".toolbar").is_enabled, PATIENCE_S)  # not while it is stale
            press(browser, letter)
            wait_for(browser, question, "#ask")
            assert "A robot is connected to arm" in shown(browser, "#ask")
            click(browser, "Keep it")
        assert "was reset" not in shown(browser, ".log")
        click(browser, "Reset")
        click(browser, "Reset it")
        wait_for(browser, "was reset", ".log")


def test_keys_act_on_one_of_two_panels_and_are_listed(browser: Any, console_server: PolicyServer) -> None:
    for name in ("left", "right"):
        call(console_server, "POST", "sessions", {"session_id": name})
    visit(browser, console_server, "#/s/left,right")
    wait_for(browser, "open, nobody connected", panel("right"))
    assert displayed(browser, ".focused h1") == ["1 left keys act here"]
    press(browser, "2")
    press(browser, "p")
    wait_for(browser, "parked", f"{panel('right')} .chip")
    assert shown(browser, f"{panel('left')} .chip") == "open, nobody connected"
    browser.find_element("css selector", f"{panel('left')} h1").click()
    press(browser, "s")
    wait_for(browser, "a snapshot was taken", f"{panel('left')} .log")
    assert "snapshot" not in shown(browser, f"{panel('right')} .log")
    press(browser, "?")
    keys = displayed(browser, "#keys kbd")
    assert sorted(keys) == sorted(["?", "Esc", "/", "1 to 4", *"fsipdrc"])
    assert all(displayed(browser, "#keys dd")), "a key without a word about it"
    click(browser, "Done")
    press(browser, "2")
    press(browser, "c")
    click(browser, "Close it")
    eventually(lambda: displayed(browser, "h1") == ["left"], PATIENCE_S)


def test_a_server_that_dies_makes_the_page_old_and_one_that_comes_back_makes_it_live(
    browser: Any, console_policy: Policy
) -> None:
    with serving(console_policy) as first, PolicyClient(port=first.port, session_id="arm") as client:
        client.infer(observation(0))
        visit(browser, first)
        wait_for(browser, "live", "#status")
        wait_for(browser, "live", row("arm", "state"))
        browser.execute_script("document.body.style.minHeight = '5000px'; scrollTo(0, 3000)")
    wait_for(browser, "The server does not answer. What you see is 1 s old", "#banner")
    top, bottom, height = browser.execute_script(
        "const r = document.getElementById('banner').getBoundingClientRect(); return [r.top, r.bottom, innerHeight]"
    )
    assert 0 <= top < bottom <= height, "the banner has scrolled away"
    assert "live" not in shown(browser, "#status")
    assert shown(browser, row("arm", "state")) in (
        *("was live", "was busy"),
        "was open, nobody connected",  # the robot's socket may have been closed before the page's
    )
    wait_for(browser, "2 s old", "#status")  # it ages
    browser.execute_script("location.hash = '#/s/arm'")
    wait_for(browser, "was ", ".session .chip")
    assert not [b for b in browser.find_elements("css selector", ".toolbar button") if b.is_enabled()]
    browser.execute_script("location.hash = '#/'")
    with serving(console_policy, port=first.port):
        wait_for(browser, "No session is open")
        assert shown(browser, "#status") == "live"
        assert not displayed(browser, "#banner")


def test_a_server_that_is_connected_and_silent_is_not_live(browser: Any, console_server: PolicyServer) -> None:
    visit(browser, console_server)
    wait_for(browser, "live", "#status")
    loop = console_server._service.closing.get_loop()
    loop.call_soon_threadsafe(time.sleep, 6)
    wait_for(browser, "The server says nothing.", "#banner")
    assert "live" not in shown(browser, "#status")
    eventually(lambda: shown(browser, "#status") == "live" and not displayed(browser, "#banner"), PATIENCE_S)


def test_a_warm_up_that_fails_is_told(browser: Any, console_policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    with PolicyServer(console_policy, ServerConfig(port=0)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        monkeypatch.setattr(server._service, "warm_up_error", RuntimeError("no memory"))

        async def ends_when_told(_: int) -> bool:  # at once otherwise, too soon for a page
            return bool(server._uvicorn.should_exit)

        monkeypatch.setattr(server._uvicorn, "on_tick", ends_when_told)
        visit(browser, server)
        wait_for(browser, "warm-up failed", "#banner")
        assert "live" not in shown(browser, "#status")


def test_a_session_that_opens_ends_and_opens_again_while_it_is_looked_at(
    browser: Any, console_server: PolicyServer
) -> None:
    visit(browser, console_server, "#/s/late")
    wait_for(browser, "This session is not open.")
    for _ in range(2):
        call(console_server, "POST", "sessions", {"session_id": "late"})
        with robot(console_server, "late"):
            wait_for(browser, "stack the cups", panel("late"))
            eventually(lambda: num_colours(browser, "canvas[aria-label='wrist_image_left']") > 100, PATIENCE_S)
        call(console_server, "DELETE", "sessions/late")
        wait_for(browser, "This session is not open: it was deleted")


def test_a_wrong_key_is_refused_and_the_right_one_opens(browser: Any, console_policy: Policy) -> None:
    with serving(console_policy, api_key="right") as server:
        visit(browser, server)
        for key, told in (("wrong", "not one of this server's"), ("right", "No session is open")):
            eventually(lambda: bool(displayed(browser, "#key")), PATIENCE_S)
            browser.find_element("id", "key").send_keys(key)
            click(browser, "Open")
            wait_for(browser, told)


@pytest.mark.parametrize("address", ["#/s/%E0%A4%A", "#/nonsense", "#/s/,", "#/s/%"])
def test_an_address_that_names_nothing_says_so_and_shows_all_sessions(
    browser: Any, console_server: PolicyServer, address: str
) -> None:
    call(console_server, "POST", "sessions", {"session_id": "one"})
    visit(browser, console_server, address)
    wait_for(browser, "This address names nothing here")
    wait_for(browser, "open, nobody connected", row("one", "state"))
    browser.find_element("link text", "one").click()
    wait_for(browser, "open, nobody connected", panel("one"))


def test_sessions_that_are_named_twice_or_too_many_are_not_lost(browser: Any, console_server: PolicyServer) -> None:
    visit(browser, console_server, "#/s/a,a,b,c,d,e")
    wait_for(browser, "4 sessions fit side by side; e are not shown")
    assert [text.split()[1] for text in displayed(browser, "h1")] == list("abcd")


def test_closing_a_session_with_dots_in_its_name_closes_no_other(browser: Any, console_server: PolicyServer) -> None:
    for name in ("arm", "a/../arm"):
        call(console_server, "POST", "sessions", {"session_id": name})
    visit(browser, console_server)
    wait_for(browser, "2 open")
    browser.find_element("link text", "a/../arm").click()
    click(browser, "Close")
    click(browser, "Close it")
    wait_for(browser, "1 open")
    assert [state["session_id"] for state in call(console_server, "GET", "sessions")["sessions"]] == ["arm"]

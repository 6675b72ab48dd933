"""The page of a server of videos in headless Chromium: words begin a world, change it, fork it, go back, keep it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from console_page import (
    PATIENCE_S,
    call,
    click,
    displayed,
    image_of,
    num_colours,
    press,
    resize,
    shown,
    theme,
    visit,
    wait_for,
)
from server_fakes import eventually
from video_viewers import running_app, serving

from worldkv.models.wan.tiny_decoder import TinyDecoder
from worldkv.server.server import PolicyServer
from worldkv.videos.app import VideoApp

pytestmark = pytest.mark.timeout(240)
PICTURES = os.environ.get("WORLDKV_PICTURES")  # a folder for what the page looks like
FIRST = ".player:first-child"
CANVAS = f"{FIRST} canvas.video"


@pytest.fixture(scope="module")
def app() -> Iterator[VideoApp]:
    with running_app(max_sessions=10) as app:
        yield app


@pytest.fixture
def server(app: VideoApp) -> Iterator[PolicyServer]:
    with serving(app) as server:
        yield server


def take_picture(browser: Any, name: str) -> None:
    if PICTURES:
        Path(PICTURES).mkdir(parents=True, exist_ok=True)
        browser.save_screenshot(str(Path(PICTURES) / f"{name}.png"))


def begin(browser: Any, words: str, seed: int = 3) -> None:
    browser.find_element("css selector", ".begin textarea").clear()
    browser.find_element("css selector", ".begin textarea").send_keys(words)
    browser.find_element("css selector", ".begin input").clear()
    browser.find_element("css selector", ".begin input").send_keys(str(seed))
    click(browser, "Begin")


def block(browser: Any, player: str = FIRST) -> int:
    found = re.search(r"block (\d+)", shown(browser, f"{player} .numbers"))
    return int(found[1]) if found else -1


def reaches(browser: Any, number: int, player: str = FIRST) -> None:
    eventually(lambda: block(browser, player) >= number, PATIENCE_S)


def test_words_begin_a_world_other_words_change_it_and_it_is_kept(
    browser: Any, server: PolicyServer, tmp_path: Path
) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    visit(browser, server)
    wait_for(browser, "A world in words")
    take_picture(browser, "begin")
    begin(browser, "a quiet lake")
    reaches(browser, 2)
    assert num_colours(browser, CANVAS) > 50
    before = image_of(browser, CANVAS)
    eventually(lambda: image_of(browser, CANVAS) != before, PATIENCE_S)
    assert shown(browser, f"{FIRST} .words") == "“a quiet lake”"
    browser.find_element("css selector", f"{FIRST} .change input").send_keys("a storm over the lake")
    click(browser, "Change")
    wait_for(browser, "“a storm over the lake”", f"{FIRST} .words")
    eventually(lambda: shown(browser, f"{FIRST} .words") == "“a storm over the lake”", PATIENCE_S)
    take_picture(browser, "playing")
    click(browser, "Pause")
    wait_for(browser, "paused", f"{FIRST} .chip")
    click(browser, "Download")
    eventually(lambda: bool(list(tmp_path.glob("world-*.mp4"))), PATIENCE_S)
    (film,) = tmp_path.glob("world-*.mp4")
    import av

    with av.open(str(film)) as container:
        assert sum(1 for _ in container.decode(video=0)) >= 33


def test_a_decoder_that_is_not_the_model_s_own_is_named(
    browser: Any, app: VideoApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = app.maker.model
    tiny = TinyDecoder.random("cpu", model.dit.dtype)
    monkeypatch.setattr(model, "encoders", replace(model.encoders, tiny=tiny))
    with serving(app) as server:
        visit(browser, server)
        wait_for(browser, "Decoder: tiny (TAEHV), other pixels than the model's own.")


def test_a_mark_is_gone_back_to_and_futures_stand_side_by_side(browser: Any, server: PolicyServer) -> None:
    visit(browser, server)
    begin(browser, "a quiet lake")
    reaches(browser, 1)
    browser.find_element("css selector", "body").click()
    press(browser, "m")
    wait_for(browser, "go back", f"{FIRST} .marks")
    marked = int(re.findall(r"block (\d+)", shown(browser, f"{FIRST} .marks"))[0])
    reaches(browser, marked + 3)
    click(browser, "go back")
    wait_for(browser, "back at block", "#toast")
    eventually(lambda: marked < block(browser) <= marked + 2, PATIENCE_S)
    click(browser, "Two futures")
    eventually(lambda: len(displayed(browser, ".player")) == 3, PATIENCE_S)
    wait_for(browser, "paused", f"{FIRST} .chip")
    for future in (".player:nth-child(2)", ".player:nth-child(3)"):
        reaches(browser, marked + 1, future)
    browser.find_element("css selector", ".player:nth-child(2) .change input").send_keys("rain")
    click(browser, "Change", ".player:nth-child(2)")
    eventually(lambda: shown(browser, ".player:nth-child(2) .words") == "“rain”", PATIENCE_S)
    assert shown(browser, ".player:nth-child(3) .words") == "“a quiet lake”"
    take_picture(browser, "futures")
    for name in ("light", "dark"):
        theme(browser, name)
        resize(browser, 390, 844)
        width = browser.execute_script("return document.documentElement.scrollWidth")
        take_picture(browser, f"narrow-{name}")
        assert width <= 390, "something is wider than the telephone"
    assert len(call(server, "GET", "sessions")["sessions"]) == 3
    resize(browser, 1280, 1400)
    take_picture(browser, "futures-dark")
    click(browser, "Close", ".player:nth-child(3)")
    click(browser, "Close it")
    eventually(lambda: len(displayed(browser, ".player")) == 2, PATIENCE_S)
    eventually(lambda: len(call(server, "GET", "sessions")["sessions"]) == 2, PATIENCE_S)


def test_sessions_stay_within_reach_and_a_world_goes_on_when_it_is_looked_at_again(
    browser: Any, server: PolicyServer
) -> None:
    visit(browser, server)
    begin(browser, "a quiet lake")
    reaches(browser, 1)
    browser.find_element("link text", "sessions").click()
    wait_for(browser, "Block pool")
    wait_for(browser, "1 open")
    take_picture(browser, "sessions")
    browser.find_element("css selector", "td.id a").click()
    wait_for(browser, "Imagined")
    assert "Actions of the newest chunk" not in displayed(browser, "h2")
    take_picture(browser, "session")
    browser.find_element("link text", "video").click()
    wait_for(browser, "paused", f"{FIRST} .chip")
    at = block(browser)
    click(browser, "Play")
    reaches(browser, at + 2)
    visit(browser, server)
    wait_for(browser, "open, not shown here:")
    browser.find_element("css selector", ".studio .card .small").click()
    reaches(browser, at + 3)


def test_what_is_wrong_is_said_in_words(browser: Any, app: VideoApp) -> None:
    with serving(app, max_sessions=2) as server:
        visit(browser, server)
        begin(browser, "a quiet lake")
        reaches(browser, 1)
        click(browser, "Four futures")
        wait_for(browser, "2 sessions are open, the most that one client may have", f"{FIRST} .bad")
        take_picture(browser, "refused")
        (session,) = call(server, "GET", "sessions")["sessions"]
        call(server, "DELETE", f"sessions/{session['session_id']}")
        wait_for(browser, "has ended: it was deleted", f"{FIRST} .bad")
    wait_for(browser, "The server does not answer", "#banner")


def test_a_server_with_keys_asks_for_one_and_keys_of_the_keyboard_are_listed(browser: Any, app: VideoApp) -> None:
    with serving(app, api_key="right") as server:
        visit(browser, server)
        eventually(lambda: bool(displayed(browser, "#key")), PATIENCE_S)
        browser.find_element("id", "key").send_keys("right")
        click(browser, "Open")
        wait_for(browser, "A world in words")
        begin(browser, "a quiet lake")
        reaches(browser, 1)
        browser.find_element("css selector", "body").click()
        press(browser, " ")
        wait_for(browser, "paused", f"{FIRST} .chip")
        press(browser, "g")
        eventually(lambda: len(displayed(browser, ".player")) == 5, PATIENCE_S)
        for number in range(2, 6):
            reaches(browser, 2, f".player:nth-child({number})")
        take_picture(browser, "four")
        press(browser, "?")
        assert "play, pause" in shown(browser, "#keys dd")
        take_picture(browser, "keys")
        click(browser, "Done")
        browser.execute_script("sessionStorage.clear()")


PLAY_MP4 = """
const [port, done] = arguments;
const video = document.createElement('video'), media = new MediaSource(), chunks = [];
let source = null, blocks = 0, how = 'opening';
setTimeout(() => done({ error: `${how}, ${blocks} blocks, ${chunks.length} waiting` }), 30000);
document.body.append(video);
video.muted = true;
video.src = URL.createObjectURL(media);
const next = () => {
  if (!source || source.updating) return;
  if (chunks.length) return source.appendBuffer(chunks.shift());
  if (blocks < 6) return;
  how = 'seeking';
  video.onseeked = () => done({
    error: video.error?.message ?? null, width: video.videoWidth, height: video.videoHeight,
    ranges: source.buffered.length, end: source.buffered.end(0), at: video.currentTime,
  });
  video.currentTime = 1;
};
video.onerror = () => done({ error: video.error.message });
media.onsourceopen = () => {
  how = 'connecting';
  const socket = new WebSocket(`ws://127.0.0.1:${port}/v1/video`);
  socket.binaryType = 'arraybuffer';
  const say = (type, fields) => socket.send(JSON.stringify({ type, ...fields }));
  socket.onopen = () => say('start', { prompt: 'a quiet lake', format: 'mp4', pace: 'fast' });
  socket.onmessage = ({ data }) => {
    if (typeof data !== 'string') {
      if (++blocks === 6) socket.close();
      chunks.push(data);
      return next();
    }
    const message = JSON.parse(data);
    how = message.type;
    if (message.type === 'error') done({ error: message.message });
    if (message.type !== 'block') return;
    if (!source) {
      if (!MediaSource.isTypeSupported(message.mime)) return done({ unsupported: message.mime });
      source = media.addSourceBuffer(message.mime);
      source.onupdateend = next;
    }
    say('shown', { block: message.block });
    if (message.block === 2) say('prompt', { prompt: 'a storm' });
  };
};
"""


def test_a_browser_plays_the_fragments_of_mp4_as_they_come(browser: Any, server: PolicyServer) -> None:
    visit(browser, server)
    browser.set_script_timeout(60)
    told = browser.execute_async_script(PLAY_MP4, server.port)
    if "unsupported" in told:
        pytest.skip(f"this browser does not play {told['unsupported']}")
    assert told["error"] is None
    assert (told["width"], told["height"], told["ranges"]) == (48, 32, 1)
    assert told["end"] == pytest.approx((9 + 5 * 12) / 16, abs=0.01)
    assert told["at"] == pytest.approx(1, abs=0.07)

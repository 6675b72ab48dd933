"""The videos' socket: words in, blocks out, words changed on the way, marks, forks, and what it says of mistakes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
pytest.importorskip("av")

from server_fakes import eventually
from video_viewers import Block, call, expected, running_app, same, serving, viewer

from worldkv.server.server import PolicyServer
from worldkv.videos.app import VideoApp
from worldkv.wire import CloseCode

LAKE, STORM = "a quiet lake", "a storm over the lake"


@pytest.fixture(scope="module")
def app() -> Iterator[VideoApp]:
    with running_app(batch_invariant=True) as app:
        yield app


@pytest.fixture
def server(app: VideoApp) -> Iterator[PolicyServer]:
    with serving(app) as server:
        yield server


def test_words_bring_a_world_block_after_block(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server) as one:
        assert one.hello["frames_per_second"] == 16
        started = one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(3)
    assert started["width"], started["height"] == (48, 32)
    assert [block.number for block in blocks] == [0, 1, 2]
    assert [block.header["first_frame"] for block in blocks] == [0, 9, 21]
    assert [block.header["pts"] for block in blocks] == [0.0, 9 / 16, 21 / 16]
    assert [block.header["prompt"] for block in blocks] == [LAKE] * 3
    assert all(block.header["timings"]["denoise"] > 0 for block in blocks)
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {})
    assert all(same(*pair) for pair in zip(blocks, frames, strict=True)), "not what the app makes of the same calls"


def test_other_words_take_effect_at_the_next_block_and_are_acknowledged_with_it(
    app: VideoApp, server: PolicyServer
) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(4)  # no more, until one is shown
        one.say("prompt", prompt="rain", id="a")
        one.say("prompt", prompt=STORM, switch="keep", id={"number": 2})
        one.say("shown", block=3)
        blocks += one.blocks(2)
    assert [block.header["applied"] for block in blocks] == [[], [], [], [], ["a", {"number": 2}], []]
    assert [block.header["prompt"] for block in blocks] == [LAKE] * 4 + [STORM] * 2
    assert blocks[4].header["frames_recached"] == 0, "history was to be kept"
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {}, {}, {"prompt": STORM, "switch": "keep"}, {})
    assert all(same(*pair) for pair in zip(blocks, frames, strict=True))


def test_history_is_computed_anew_under_other_words_unless_it_is_to_be_kept(
    app: VideoApp, server: PolicyServer
) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(4)
        one.say("prompt", prompt=STORM)
        one.say("shown", block=0)
        blocks.append(one.block())
    assert blocks[4].header["frames_recached"] > 0
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {}, {}, {"prompt": STORM})
    assert same(blocks[4], frames[4])


def test_a_mark_brings_the_same_pictures_again_and_the_timeline_goes_on(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3)
        one.blocks(4)
        one.say("mark", name="before the storm")
        marked = one.hear("marked")
        one.say("shown", block=3)
        once = one.blocks(4)
        one.say("pause")
        one.hear("paused")
        one.say("seek", mark=marked["mark"])
        sought = one.hear("sought")
        one.say("play")
        one.hear("playing")
        again = one.blocks(4)
    assert (marked["block"], marked["name"], marked["pts"]) == (3, "before the storm", 45 / 16)
    assert (sought["block"], sought["pts"]) == (3, 93 / 16)
    assert [block.number for block in again] == [4, 5, 6, 7]
    assert [block.data for block in again] == [block.data for block in once]
    assert [block.header["pts"] for block in again] == [(93 + 12 * n) / 16 for n in range(4)]
    assert [block.header["sought"] for block in again] == [marked["mark"], None, None, None]
    assert all(block.header["frames_skipped"] == 0 for block in again)


def test_forks_go_on_from_the_same_moment_each_on_its_own_socket(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3, session_id="lake")
        one.blocks(4)
        one.say("fork", count=2)
        forked = one.hear("forked")
        assert forked["block"] == 3
        assert len(forked["sessions"]) == 2
        one.say("shown", block=3)
        goes_on = one.blocks(2)
        with viewer(server) as two, viewer(server) as three:
            assert two.start(session_id=forked["sessions"][0])["block"] == 3
            three.start(session_id=forked["sessions"][1], prompt=STORM)
            same_future, other_future = two.blocks(2), three.blocks(2)
    assert [block.data for block in same_future] == [block.data for block in goes_on]
    assert [block.number for block in other_future] == [4, 5]
    assert [block.header["pts"] for block in other_future] == [0, 12 / 16]
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {}, {}, {"prompt": STORM}, {})
    assert all(same(*pair) for pair in zip(other_future, frames[4:], strict=True))


def test_a_world_that_is_left_stays_and_goes_on_where_it_was_shown_up_to(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3, session_id="lake")
        first = one.blocks(4)
    eventually(lambda: call(server, "GET", "sessions/lake")["connections"] == 0)
    with viewer(server) as two:
        started = two.start(session_id="lake")
        assert (started["block"], started["pts"]) == (3, 45 / 16)
        later = two.blocks(2)
    frames = expected(app, {"prompt": LAKE, "seed": 3}, *[{}] * 5)
    assert all(same(*pair) for pair in zip(first + later, frames, strict=True))


def test_a_second_viewer_takes_a_world_over_and_the_first_is_told(server: PolicyServer) -> None:
    with viewer(server, shows=False) as one, viewer(server) as two:
        one.start(prompt=LAKE, session_id="lake")
        one.blocks(4)
        two.start(session_id="lake")
        assert one.hear("stopped")["why"] == "another viewer has taken it over"
        assert [block.number for block in two.blocks(2)] == [4, 5]
        one.say("play")
        assert "nothing was started yet" in one.hear("error")["message"]


def test_a_start_from_a_mark_is_a_world_of_its_own(server: PolicyServer) -> None:
    with viewer(server, shows=False) as one, viewer(server) as two:
        one.start(prompt=LAKE)
        one.blocks(4)
        one.say("mark")
        mark = one.hear("marked")["mark"]
        one.say("shown", block=3)
        goes_on = one.block()
        two.say("start", from_mark=mark, pace="fast")
        assert two.hear("started")["session_id"] != one.hello.get("session_id")
        assert two.hear("sought")["block"] == 3
        assert two.block().data == goes_on.data


def test_what_makes_no_sense_is_told_with_its_field_and_ends_nothing(server: PolicyServer) -> None:
    with viewer(server) as one:
        for kind, fields, field, words in (
            ("play", {}, "type", "nothing was started yet"),
            ("start", {}, "prompt", "begins with words"),
            ("start", {"prompt": " "}, "prompt", "expected words"),
            ("start", {"prompt": "x" * 30_000}, "prompt", "at most 20000 characters"),
            ("start", {"prompt": LAKE, "seed": -1}, "seed", "whole number from 0"),
            ("start", {"prompt": LAKE, "seed": "7"}, "seed", "expected a whole number, got '7'"),
            ("start", {"prompt": LAKE, "format": "gif"}, "format", "'jpeg' or 'mp4'"),
            ("start", {"prompt": LAKE, "speed": 2}, None, "'speed' is not known"),
            ("start", {"session_id": "nobody"}, None, "is not known here"),
            ("start", {"from_mark": "nowhere"}, None, "released or never taken"),
            ("dance", {}, "type", "expected one of start, prompt"),
        ):
            one.say(kind, **fields)
            error = one.hear("error")
            assert error["field"] == field, error
            assert words in error["message"], error
        for text in ("{", "[1]", "7", '{"id": NaN}', "[" * 5000, "x" * 70_000):
            one.socket.send(text)
            assert one.hear("error")["field"] == "message"
        one.socket.send(b"bytes")
        assert "expected a JSON object" in one.hear("error")["message"]
        one.start(prompt=LAKE)
        one.block()
        for kind, fields, field in (
            ("prompt", {"prompt": 7, "id": 1}, "prompt"),
            ("prompt", {"prompt": STORM, "switch": "fade", "id": 1}, "switch"),
            ("prompt", {"prompt": "\ud800", "id": 1}, "prompt"),
            ("prompt", {"prompt": STORM, "id": "x" * 300}, "id"),
            ("fork", {"count": 5}, "count"),
            ("shown", {"block": "1"}, "block"),
            ("seek", {}, "mark"),
        ):
            one.say(kind, **fields)
            while isinstance(message := one.next(), Block):
                pass
            assert (message["type"], message["field"]) == ("error", field)
            assert message["playing"]
        one.say("stop")
        one.hear_after_blocks("stopped")


def test_nonsense_without_end_closes_the_socket(server: PolicyServer) -> None:
    with viewer(server) as one:
        for number in range(101):
            time.sleep(0.0 if number < 50 else 0.03)  # a flood would be ended for being one
            one.say("dance")
        assert one.close_code() == CloseCode.BAD_REQUEST


def test_a_block_that_fails_is_told_and_asked_for_again(
    app: VideoApp, server: PolicyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(4)
        with monkeypatch.context() as broken:

            def fail(*_: object) -> object:
                raise RuntimeError("a secret of the server")

            broken.setattr(app.maker.model, "program", fail)
            one.say("prompt", prompt=STORM, id=1)
            one.say("shown", block=3)
            error = one.hear("error")
        assert error["code"] == "internal"
        assert "secret" not in error["message"]
        assert error["playing"] is False
        one.say("play")
        one.hear("playing")
        blocks += one.blocks(2)
    assert blocks[4].header["applied"] == [1]
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {}, {}, {"prompt": STORM}, {})
    assert all(same(*pair) for pair in zip(blocks, frames, strict=True))


def test_a_world_that_is_deleted_is_told_to_who_looks_at_it(server: PolicyServer) -> None:
    with viewer(server) as one:
        one.start(prompt=LAKE, session_id="lake")
        one.block()
        one.say("pause")
        one.hear_after_blocks("paused")
        call(server, "DELETE", "sessions/lake")
        error = one.hear("error")
        assert error["code"] == "session_not_found"
        assert "it was deleted" in error["message"]
        one.start(prompt=STORM, session_id="lake")
        assert one.block().number == 0


def test_a_server_that_shuts_down_lets_the_block_end_and_says_so(app: VideoApp) -> None:
    with serving(app) as server, viewer(server) as one:
        one.start(prompt=LAKE)
        one.block()
        server.stop()
        assert one.close_code() == CloseCode.GOING_AWAY


def test_the_key_comes_by_header_or_in_the_first_message_and_worlds_are_its_own(app: VideoApp) -> None:
    with serving(app, api_key="left,right") as server:
        with viewer(server, additional_headers={"Authorization": "Api-Key left"}) as one:
            one.start(prompt=LAKE, session_id="lake")
            one.block()
        with viewer(server, greeted=False) as two:
            two.say("start", key="right", session_id="lake")
            two.hear("hello")
            assert two.hear("error")["code"] == "session_not_found"
        with viewer(server, greeted=False) as three:
            three.socket.send('{"key": "left"}')
            three.hear("hello")
            assert three.start(session_id="lake")["block"] is not None
        for first in ('{"key": "wrong"}', '{"type": "start"}', "{"):
            with viewer(server, greeted=False) as four:
                four.socket.send(first)
                assert four.hear("error")["code"] in ("unauthorised", "bad_request")
                assert four.close_code() in (CloseCode.UNAUTHORISED, CloseCode.BAD_REQUEST)


def test_a_page_of_another_site_is_refused(server: PolicyServer) -> None:
    with viewer(server, greeted=False, origin="http://evil.example.org") as one:
        assert one.hear("error")["code"] == "unauthorised"


def test_the_client_that_the_documents_show_makes_a_film(
    server: PolicyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import av

    text = (Path(__file__).parents[2] / "docs" / "video.md").read_text(encoding="utf-8")
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len(code.splitlines()) <= 22
    monkeypatch.chdir(tmp_path)
    exec(compile(code.replace("gpu-box", "127.0.0.1").replace("8000", str(server.port)), "video.md", "exec"), {})
    with av.open("lake.mp4") as container:
        times = [float(frame.pts * frame.time_base) for frame in container.decode(video=0)]
    assert times == [n / 16 for n in range(9 + 19 * 12)]


def test_a_pause_is_no_new_episode_whatever_robots_do(app: VideoApp) -> None:
    with serving(app, episode_gap_s=0.2) as server, viewer(server) as one:
        one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(2)
        one.say("pause")
        one.hear_after_blocks("paused")
        time.sleep(0.5)
        one.say("play")
        one.hear("playing")
        following = one.block()
    assert following.header["first_frame"] >= blocks[-1].header["first_frame"] + 12
    assert following.header["prompt"] == LAKE


def test_words_come_little_by_little_within_as_many_blocks_as_are_said(app: VideoApp, server: PolicyServer) -> None:
    with viewer(server, shows=False) as one:
        one.start(prompt=LAKE, seed=3)
        blocks = one.blocks(4)
        one.say("prompt", prompt=STORM, switch="blend", blend_blocks=2)
        one.say("shown", block=3)
        blocks += one.blocks(3)
        one.say("prompt", prompt=STORM, blend_blocks="two")
        assert one.hear_after_blocks("error")["field"] == "blend_blocks"
    storm = {"prompt": STORM, "switch": "blend", "blend_blocks": 2}
    frames = expected(app, {"prompt": LAKE, "seed": 3}, {}, {}, {}, storm, {}, {})
    assert all(same(*pair) for pair in zip(blocks, frames, strict=True))

"""Where tokens go and what is visible: arithmetic, against the plain list it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worldkv.kv.window import Window

FAST = settings(max_examples=100, deadline=None, derandomize=True, database=None)

windows = st.builds(
    Window, st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.sampled_from(("slide", "reset"))
)


def test_chunks_fill_the_entries_in_order_then_the_newest_takes_the_oldest_one_s_place_after_the_sink() -> None:
    window = Window(chunk_size=4, window=3, sink=2)
    assert [window.entry(i) for i in range(9)] == [0, 1, 2, 3, 4, 2, 3, 4, 2]


def test_a_ring_without_a_sink_wraps_to_the_first_entry() -> None:
    window = Window(chunk_size=4, window=3)
    assert [window.entry(i) for i in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_adjacent_chunks_are_written_as_one_run() -> None:
    placement = Window(chunk_size=10, window=4).place(1, 2)
    assert placement.writes == (range(10, 30),)
    assert placement.num_visible == 30


def test_a_forward_that_wraps_is_written_as_two_runs_in_token_order() -> None:
    placement = Window(chunk_size=10, window=3, sink=1).place(3, 2)
    assert placement.writes == (range(30, 40), range(10, 20))
    assert placement.num_visible == 40


def test_draft_tokens_go_right_after_the_last_visible_video_token() -> None:
    filling = Window(chunk_size=10, window=4).place(0, 1, num_draft_tokens=3)
    assert (filling.writes, filling.num_visible) == ((range(10), range(10, 13)), 13)
    full = Window(chunk_size=10, window=2).place(4, 1, num_draft_tokens=3)
    assert (full.writes, full.num_visible) == ((range(10), range(20, 23)), 23)


def test_a_forward_of_more_chunks_than_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="a forward of 4 chunks does not fit the window of 3"):
        Window(chunk_size=10, window=3, sink=2).place(0, 4)


def test_reset_never_wraps_and_says_that_the_session_must_restart() -> None:
    window = Window(chunk_size=10, window=3, policy="reset")
    assert window.has_room(1, 2)
    assert window.place(1, 2).num_visible == 30
    assert not window.has_room(2, 2)
    with pytest.raises(ValueError, match=r"window full: 2 chunks of history and 2 more exceed 3.*restart"):
        window.place(2, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunk_size": 0, "window": 1}, "chunk_size: expected at least 1 token, got 0"),
        ({"chunk_size": 1, "window": 0}, "window: expected at least 1 chunk, got 0"),
        ({"chunk_size": 1, "window": 1, "sink": -1}, "sink: expected 0 or more chunks, got -1"),
        ({"chunk_size": 1, "window": 1, "policy": "wrap"}, "policy: expected 'reset' or 'slide', got 'wrap'"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Window(**fields)  # type: ignore[arg-type]


@given(windows, st.integers(0, 20))
@FAST
def test_visible_chunks_are_the_sink_and_the_most_recent_and_fill_the_prefix_without_a_hole(
    window: Window, num_chunks: int
) -> None:
    came = list(range(num_chunks))
    visible = came[: window.sink] + came[window.sink :][-window.window :]
    assert window.visible_chunks(num_chunks) == visible
    assert sorted(window.entry(i) for i in visible) == list(range(len(visible)))
    assert window.num_slots(num_chunks) == len(visible) * window.chunk_size


@given(windows, st.integers(0, 20), st.integers(1, 5), st.integers(0, 9))
@FAST
def test_a_placement_writes_each_current_token_once_and_every_write_is_visible(
    window: Window, first_chunk: int, num_chunks: int, num_draft_tokens: int
) -> None:
    fits = num_chunks <= window.window and (window.policy == "slide" or window.has_room(first_chunk, num_chunks))
    if not fits:
        with pytest.raises(ValueError, match="window"):
            window.place(first_chunk, num_chunks, num_draft_tokens)
        return
    placement = window.place(first_chunk, num_chunks, num_draft_tokens)
    slots = [slot for r in placement.writes for slot in r]
    chunks = range(first_chunk, first_chunk + num_chunks)
    video = [window.entry(i) * window.chunk_size + t for i in chunks for t in range(window.chunk_size)]
    num_video = window.num_slots(first_chunk + num_chunks)
    assert slots == video + list(range(num_video, num_video + num_draft_tokens))
    assert len(set(slots)) == len(slots)
    assert placement.num_visible == num_video + num_draft_tokens


@given(windows, st.integers(1, 20), st.integers(1, 8))
@FAST
def test_history_is_rewritten_in_its_own_slots_and_the_sink_only_while_nothing_has_left(
    window: Window, num_chunks: int, num_rewritten: int
) -> None:
    if num_rewritten > min(num_chunks, window.max_chunks):
        with pytest.raises(ValueError, match="cannot be rewritten"):
            window.place_again(num_chunks, num_rewritten)
        return
    placement, size = window.place_again(num_chunks, num_rewritten), window.chunk_size
    newest = list(range(num_chunks - num_rewritten, num_chunks))
    kept = newest if num_chunks <= window.max_chunks else newest[-window.window :]
    slots = [slot for r in placement.writes for slot in r]
    assert len(slots) == len(newest) * size, "a slot for each token, in their order"
    unread, written = slots[: (len(newest) - len(kept)) * size], slots[(len(newest) - len(kept)) * size :]
    assert written == [window.entry(chunk) * size + t for chunk in kept for t in range(size)]
    assert unread == list(range(placement.num_visible, placement.num_visible + len(unread)))
    assert placement.num_visible == window.num_slots(num_chunks)

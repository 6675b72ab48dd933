"""Keys turned by their place in the window: what the copy that forwards read must be, and what history keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from causal import make_engine, make_request, relative_error, run  # noqa: E402
from engines import inside  # noqa: E402

from worldkv.kv.window import CopiedChunks, Window  # noqa: E402
from worldkv.models.base import Forward  # noqa: E402
from worldkv.models.causal_wan.config import BRANCH  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402
from worldkv.models.wan.fused import FusedBlocks  # noqa: E402
from worldkv.models.wan.rotary import rotate  # noqa: E402

RELATIVE = replace(TINY, rope="relative")


def blocks_of(num_blocks: int, settings: Any = RELATIVE, **options: Any) -> list[Any]:
    engine = make_engine(settings, decodes=False, **options)
    session = engine.open_session()
    blocks = [run(engine, session, make_request(seed=3)) for _ in range(num_blocks)]
    engine.shutdown()
    return blocks


def test_places_are_frame_numbers_until_the_window_rolls() -> None:
    absolute, relative = blocks_of(5, TINY), blocks_of(5)
    errors = [relative_error(r.latents, a.latents) for r, a in zip(relative, absolute, strict=True)]
    assert max(errors[:3]) < 1e-6, "9 frames fit the window"
    assert min(errors[3:]) > 1e-3, errors


def test_history_keeps_keys_as_they_are_before_rotation() -> None:
    keys = {}
    for settings in (TINY, RELATIVE):
        engine = make_engine(settings, decodes=False)
        session = engine.open_session()
        for _ in range(2):
            run(engine, session, make_request(seed=3))
        keys[settings.rope] = inside(engine, session).kv.layer_kv(BRANCH, 0)
        phases = engine.model.dit.phases(0, 6, 4, 6)
        engine.shutdown()
    turned = rotate(keys["relative"][0], phases)
    assert relative_error(turned, keys["absolute"][0]) < 1e-6
    assert relative_error(keys["relative"][1], keys["absolute"][1]) < 1e-6


def test_a_window_is_copied_once_a_block_and_given_back_with_it() -> None:
    copies: list[tuple[str, Any]] = []

    def observe(kv: Any, request: Any, result: Any) -> None:
        if isinstance(request, Forward):
            copies.append((request.stage, kv.branches[BRANCH].copy))

    engine = make_engine(RELATIVE, decodes=False, observer=observe)
    session = engine.open_session()
    for number in range(5):
        copies.clear()
        run(engine, session, make_request())
        drafts = [copy for stage, copy in copies if stage == "denoise"]
        assert len({id(copy) for copy in drafts}) == 1, "each draft has copied the window anew"
        assert drafts[0].chunks.num_visible == min(9, 3 * number + 3)
        kv = inside(engine, session).kv
        assert kv.branches[BRANCH].copy is None
        assert drafts[0].blocks == []
    engine.close(session, "done").result()
    engine.core.cache.pool.check()
    assert engine.core.cache.pool.num_used == 0
    engine.shutdown()


def test_fused_blocks_keep_and_turn_the_same_keys() -> None:
    engine = make_engine(RELATIVE, decodes=False)
    engine.model.dit.run_blocks = FusedBlocks(engine.model.dit)
    session, blocks = engine.open_session(), []
    for _ in range(5):
        blocks.append(run(engine, session, make_request(seed=3)))
    for ours, expected in zip(blocks, blocks_of(5), strict=True):
        assert relative_error(ours.latents, expected.latents) < 1e-5
    engine.shutdown()


def test_positions_do_not_grow_with_a_session() -> None:
    engine = make_engine(replace(RELATIVE, frames_per_block=1, window_frames=4, sink_frames=1), decodes=False)
    first, last = engine.open_session(), engine.open_session()
    latents = torch.randn((1, 16, 1, 4, 6), generator=torch.Generator().manual_seed(0))
    noise = {"noise": torch.zeros(1, 16, 1, 4, 6), "epsilons": (torch.zeros(1, 16, 1, 4, 6),) * 3}
    seen = []
    for session, num_frames in ((first, 5), (last, 1500)):
        given = latents.expand(-1, -1, num_frames, -1, -1)
        seen.append(run(engine, session, make_request(given=given, **noise)))
    assert [block.first_frame for block in seen] == [5, 1500]
    assert torch.isfinite(seen[1].latents).all()
    assert all(len(rows) < 400 for rows in [engine.model.dit._rotary._rows])
    engine.shutdown()


@pytest.mark.parametrize(
    ("num_chunks", "num_own", "rewrites", "history", "num_unread", "num_visible"),
    [
        (0, 3, False, (), 0, 3),
        (6, 3, False, (0, 1, 2, 3, 4, 5), 0, 9),
        (9, 3, False, (0, 1, 2, 6, 7, 8), 0, 9),
        (12, 3, False, (0, 1, 2, 9, 10, 11), 0, 9),
        (6, 6, True, (), 0, 6),
        (9, 9, True, (), 0, 9),
        (12, 9, True, (0, 1, 2), 3, 9),
        (12, 4, True, (0, 1, 2, 6, 7), 0, 9),
    ],
)
def test_a_copy_has_what_the_forward_sees(
    num_chunks: int, num_own: int, rewrites: bool, history: tuple[int, ...], num_unread: int, num_visible: int
) -> None:
    chunks = CopiedChunks.of(Window(5, 6, sink=3), num_chunks, num_own, rewrites)
    assert (chunks.history, chunks.num_unread, chunks.num_visible) == (history, num_unread, num_visible)

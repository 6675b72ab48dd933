"""The DiT over packed rows: company does not matter, phases have no end, conditioning is projected once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from engines import make_engine, make_inputs  # noqa: E402

from worldkv.engine.engine import Engine  # noqa: E402
from worldkv.models.base import ForwardRequest  # noqa: E402
from worldkv.models.wan.rotary import Rotary, rotate, video_angles  # noqa: E402


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine("i2v", block_size=16)
    yield engine
    engine.shutdown()


@contextlib.contextmanager
def spied_forwards(engine: Engine) -> Iterator[list[Any]]:
    """All rows of all forwards and their outputs, while the engine goes on as usual."""
    seen: list[Any] = []
    forward = engine.model.forward

    def spy(cache: Any, rows: Any) -> Any:
        outputs = forward(cache, rows)
        seen.append((list(rows), outputs))
        return outputs

    engine.model.forward = spy
    yield seen
    engine.model.forward = forward


def drain(engine: Engine, num_ticks: int) -> list[Any]:
    with spied_forwards(engine) as seen:
        session = engine.open_session()
        for tick in range(num_ticks):
            engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result()
        engine.close(session, "done")
    return seen


def test_the_guidance_pair_is_two_rows_of_one_forward_and_clean_passes_read_out_nothing(engine: Engine) -> None:
    forwards = drain(engine, 2)
    assert [len(rows) for rows, _ in forwards] == [2] * 18, "9 forwards a tick: one clean pass, eight evaluated steps"
    for rows, outputs in forwards:
        assert [row.context.branch.name for row in rows] == ["conditional", "unconditional"]
        clean = rows[0].actions is None
        assert all((output.video_velocity is None) == clean for output in outputs)


def test_conditioning_is_projected_once_per_prompt_and_per_window(engine: Engine) -> None:
    calls = {"text": 0, "image": 0}
    dit = engine.model._dit

    def count(half: str) -> None:
        original = getattr(dit, f"project_{half}")

        def counted(x: Any) -> Any:
            calls[half] += 1
            return original(x)

        setattr(dit, f"project_{half}", counted)

    count("text"), count("image")
    session = engine.open_session()
    for tick in range(6):  # two windows of one prompt
        engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result()
    assert calls == {"text": 2, "image": 2}, "prompt and negative prompt; one image for each window's first frame"


def test_a_draft_can_be_repeated_with_the_same_result(engine: Engine) -> None:
    session = engine.open_session()
    program = engine.model.tick(engine.cache, session.kv, session.rollout, make_inputs(engine, 0, 1))
    request = next(program)
    while not (isinstance(request, ForwardRequest) and request.stage == "denoise"):
        request = program.send(engine.execute([request])[0])
    first = engine.model.forward(engine.cache, request.rows)
    second = engine.model.forward(engine.cache, request.rows)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.video_velocity, b.video_velocity)
        assert torch.equal(a.action_velocity, b.action_velocity)
    program.close()


def test_phases_have_no_end_and_agree_with_a_table() -> None:
    rotary = Rotary(32, "cpu")
    frames = torch.arange(5000, 5002, dtype=torch.float64)
    frequencies = 10000.0 ** -(torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    cos, sin = rotary.phases(5000, 2, 3, 4, 0, 0, 0)
    expected = (frames[:, None] * frequencies).repeat_interleave(12, 0)
    torch.testing.assert_close(cos[:, 0, :6], expected.cos().float())
    torch.testing.assert_close(sin[:, 0, :6], expected.sin().float())
    assert cos.shape == (24, 1, 16)


def test_the_phases_axes_share_a_head_of_128_as_44_42_42() -> None:
    angles = video_angles(1, 1, 2, 2, 128)
    assert angles.shape == (4, 64)
    assert (angles[:, :22] > 0).all(), "frame 1 turns the first 22 pairs"
    assert (angles[0, 22:] == 0).all(), "row 0, column 0 turn nothing else"
    assert (angles[1, 43:] > 0).all()
    assert (angles[2, 22:43] > 0).all()


def test_rotation_is_by_complex_pairs_of_adjacent_elements() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 2, 8)
    angles = torch.rand(5, 1, 4)
    turned = torch.view_as_complex(x.reshape(5, 2, 4, 2)) * torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(rotate(x, (angles.cos(), angles.sin())), torch.view_as_real(turned).flatten(-2))

"""The DiT over packed rows: company does not matter, phases have no end, conditioning is projected once."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from dits import FRAME_TOKENS, Stage, make_dit  # noqa: E402

from worldkv.models.dreamzero.dit import RowOutput  # noqa: E402
from worldkv.models.wan.rotary import Rotary, rotate, video_angles  # noqa: E402

KINDS = ["i2v", "ti2v", "t2v"]


def drain(num_ticks: int) -> list[Any]:
    """All rows of all forwards of a session's ticks, and their outputs."""
    pytest.importorskip("diffusers")
    from engines import make_engine, make_inputs

    engine = make_engine("i2v", block_size=16)
    model, seen = engine.model, []
    forward = model.forward

    def spy(cache: Any, rows: Any) -> Any:
        outputs = forward(cache, rows)
        seen.append((list(rows), outputs))
        return outputs

    model.forward = spy
    session = engine.open_session()
    for tick in range(num_ticks):
        engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result()
    engine.shutdown()
    return seen


def test_the_guidance_pair_is_two_rows_of_one_forward_and_clean_passes_read_out_nothing() -> None:
    forwards = drain(2)
    assert [len(rows) for rows, _ in forwards] == [2] * 18, "9 forwards a tick: one clean pass, eight evaluated steps"
    for rows, outputs in forwards:
        assert [row.context.branch.name for row in rows] == ["conditional", "unconditional"]
        for row, output in zip(rows, outputs, strict=True):
            assert (output.video_velocity is None) == row.context.commits


def test_conditioning_is_projected_once_per_prompt_and_per_window() -> None:
    pytest.importorskip("diffusers")
    from engines import make_engine, make_inputs

    engine = make_engine("i2v", block_size=16)
    calls = {"text": 0, "image": 0}
    dit = engine.model.dit

    def count(kind: str) -> None:
        original = getattr(dit, f"project_{kind}")

        def counted(x: Any) -> Any:
            calls[kind] += 1
            return original(x)

        setattr(dit, f"project_{kind}", counted)

    count("text"), count("image")
    session = engine.open_session()
    for tick in range(6):  # two windows of one prompt
        engine.submit(session, make_inputs(engine, tick, 1 if tick == 0 else 4)).result()
    engine.shutdown()
    assert calls == {"text": 2, "image": 2}, "prompt and negative prompt; one image for each window's first frame"


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_can_be_repeated_with_the_same_result(kind: str) -> None:
    stage = Stage(make_dit(kind))
    stage.forward(stage.sessions, [stage.row(session, 1) for session in stage.sessions])
    rows = [stage.row(session, 2, 500, draft=True) for session in stage.sessions]
    first, second = (stage.forward(stage.sessions, rows) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert all(torch.equal(*pair) for pair in zip(parts(a), parts(b), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_beside_a_clean_pass_comes_out_as_alone(kind: str) -> None:
    outputs = []
    for together in (True, False):
        stage = Stage(make_dit(kind))
        one, other = stage.sessions
        stage.forward([one], [stage.row(one, 1)])
        draft, clean = stage.row(one, 2, 500, draft=True), stage.row(other, 1)
        if together:
            empty, output = stage.forward([other, one], [clean, draft])
            assert empty is None or empty == RowOutput(None, None), "a clean pass reads out nothing"
        else:
            (output,) = stage.forward([one], [draft])
        outputs.append(parts(output))
    for ours, expected in zip(*outputs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)


def parts(output: Any) -> list[Any]:
    return [output.video_velocity, output.action_velocity] if isinstance(output, RowOutput) else [output]


# --- text only, against the definition


class PlainWan:
    """One branch of a text-to-video model from its definition: no packing, no pages, no batches."""

    def __init__(self, dit: Any, prompt: Any) -> None:
        self.w, self.config = dit.state_dict(), dit.config
        self.text = self.linear(F.gelu(self.linear(prompt, "text_embedding.0"), approximate="tanh"), "text_embedding.2")
        self.history: list[list[tuple[Any, Any]]] = [[] for _ in range(dit.config.num_layers)]

    def linear(self, x: Any, name: str) -> Any:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def heads(self, x: Any) -> Any:
        return x.view(len(x), self.config.num_heads, -1)

    def normed(self, x: Any, attention: str, which: str) -> Any:
        """q or k by heads, after its norm over the full width."""
        x = self.linear(x, f"{attention}.{which}")
        scale = (x.square().mean(-1, keepdim=True) + self.config.eps).sqrt()
        return self.heads(x / scale * self.w[f"{attention}.norm_{which}.weight"])

    def norm(self, x: Any) -> Any:
        return F.layer_norm(x, x.shape[-1:], eps=self.config.eps)

    def turned(self, x: Any, positions: list[tuple[int, int, int]]) -> Any:
        pairs = self.config.head_dim // 2
        shares = (pairs - 2 * (pairs // 3), pairs // 3, pairs // 3)
        out = x.clone()
        for token, place in enumerate(positions):
            angles = [at * 10000.0 ** (-i / n) for at, n in zip(place, shares, strict=True) for i in range(n)]
            for pair, angle in enumerate(angles):
                even, odd = x[token, :, 2 * pair], x[token, :, 2 * pair + 1]
                out[token, :, 2 * pair] = even * math.cos(angle) - odd * math.sin(angle)
                out[token, :, 2 * pair + 1] = even * math.sin(angle) + odd * math.cos(angle)
        return out

    def attend(self, q: Any, k: Any, v: Any) -> Any:
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)

    def forward(self, latents: Any, first_frame: int, timestep: float, commit: bool) -> Any:
        _, frames, height, width = latents.shape
        places = [(f, h, w) for f in range(frames) for h in range(height // 2) for w in range(width // 2)]
        cut = [latents[:, f, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2].flatten() for f, h, w in places]
        x = torch.stack(cut) @ self.w["patch_embedding.weight"].flatten(1).T + self.w["patch_embedding.bias"]
        half = self.config.freq_dim // 2
        angles = [timestep * 10000.0 ** (-i / half) for i in range(half)]
        wave = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=torch.float64).float()
        e = self.linear(F.silu(self.linear(wave, "time_embedding.0")), "time_embedding.2")
        projected = self.linear(F.silu(e), "time_projection.1").view(6, -1)
        positions = [(first_frame + f, h, w) for f, h, w in places]
        for layer in range(self.config.num_layers):
            b = f"blocks.{layer}"
            shift1, scale1, gate1, shift2, scale2, gate2 = self.w[f"{b}.modulation"][0] + projected
            y = self.norm(x) * (1 + scale1) + shift1
            q = self.turned(self.normed(y, f"{b}.self_attn", "q"), positions)
            k = self.turned(self.normed(y, f"{b}.self_attn", "k"), positions)
            v = self.heads(self.linear(y, f"{b}.self_attn.v"))
            seen = [*self.history[layer], (k, v)]
            attended = self.attend(q, torch.cat([k for k, _ in seen]), torch.cat([v for _, v in seen]))
            x = x + self.linear(attended, f"{b}.self_attn.o") * gate1
            if commit:
                self.history[layer] = seen
            y = self.norm(x) * self.w[f"{b}.norm3.weight"] + self.w[f"{b}.norm3.bias"]
            q = self.normed(y, f"{b}.cross_attn", "q")
            k = self.normed(self.text, f"{b}.cross_attn", "k")
            v = self.heads(self.linear(self.text, f"{b}.cross_attn.v"))
            x = x + self.linear(self.attend(q, k, v), f"{b}.cross_attn.o")
            y = self.norm(x) * (1 + scale2) + shift2
            x = x + self.linear(F.gelu(self.linear(y, f"{b}.ffn.0"), approximate="tanh"), f"{b}.ffn.2") * gate2
        shift, scale = self.w["head.modulation"][0] + e
        patches = self.linear(self.norm(x) * (1 + scale) + shift, "head.head").view(len(x), 2, 2, -1)
        velocity = torch.empty_like(latents)
        for (f, h, w), patch in zip(places, patches, strict=True):
            velocity[:, f, 2 * h : 2 * h + 2, 2 * w : 2 * w + 2] = patch.permute(2, 0, 1)
        return velocity


def test_a_model_that_reads_text_only_equals_its_definition() -> None:
    dit = make_dit("t2v")
    assert not [name for name in dit.state_dict() if "img" in name]
    stage = Stage(dit)
    plain = [PlainWan(dit, prompt) for prompt in stage.prompts]
    for num_frames, timestep, draft in ((1, 0, False), (3, 937.5, True), (3, 0, False), (2, 625, True)):
        rows = [stage.row(session, num_frames, timestep, draft=draft) for session in stage.sessions]
        outputs = stage.forward(stage.sessions, rows)
        for own, row, output in zip(plain, rows, outputs, strict=True):
            expected = own.forward(row.latents, row.first_frame, timestep, commit=not draft)
            assert (output is None) == (not draft)
            if draft:
                torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    k, v = stage.sessions[1].layer_kv("a", 2)
    assert len(k) == 4 * FRAME_TOKENS
    torch.testing.assert_close(k, torch.cat([k for k, _ in plain[1].history[2]]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(v, torch.cat([v for _, v in plain[1].history[2]]), rtol=1e-4, atol=1e-5)


def test_phases_have_no_end_and_agree_with_a_table() -> None:
    rotary = Rotary(32, "cpu")
    frames = torch.arange(5000, 5002, dtype=torch.float64)
    frequencies = 10000.0 ** -(torch.arange(0, 12, 2, dtype=torch.float64) / 12)
    cos, sin = rotary.phases(5000, 2, 3, 4)
    expected = (frames[:, None] * frequencies).repeat_interleave(12, 0)
    torch.testing.assert_close(cos[:, 0, :6], expected.cos().float())
    torch.testing.assert_close(sin[:, 0, :6], expected.sin().float())
    assert cos.shape == (24, 1, 16)


def test_tokens_behind_the_video_turn_on_one_axis_from_their_groups_first_position() -> None:
    cos, sin = Rotary(32, "cpu").phases(7, 1, 1, 2, ((12, 3), (2, 1)))
    angles = torch.tensor([12.0, 13.0, 14.0, 2.0])[:, None] * 10000.0 ** -(torch.arange(0, 32, 2) / 32)
    torch.testing.assert_close(cos[2:, 0], angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(sin[2:, 0], angles.sin(), rtol=0, atol=1e-5)


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

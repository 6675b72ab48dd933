"""The fused VAE computes what the plain one computes: against the recordings, piece by piece, both ways."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from worldkv.models.dreamzero.checkpoint import Checkpoint, load_encoders  # noqa: E402
from worldkv.models.wan.encoders import WanVAE  # noqa: E402
from worldkv.models.wan.fused_vae import fuse_vae, norm_activate_pad, twice_as_large  # noqa: E402


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    assert ours.shape == expected.shape
    return float((ours.float() - expected.float()).norm() / expected.float().norm())


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> dict[str, torch.Tensor]:
    return load_file(golden_folder / "golden.safetensors")


@pytest.fixture(scope="module")
def fused(golden_folder: Path) -> WanVAE:
    vae = load_encoders(Checkpoint.open(golden_folder), device="cpu", dtype=torch.float32).vae
    fuse_vae(vae.module)
    vae.frames_at_once, vae.latents_at_once = 8, 3  # as `accelerate` has them on a GPU
    return vae


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_observed_latents_equal_the_recorded_ones(fused: WanVAE, golden: dict[str, torch.Tensor], call: int) -> None:
    frames = golden[f"call{call}.frames"].permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    frames = frames.repeat_interleave(2, dim=2)
    video = torch.cat([frames[:, :, :1], frames], dim=2)
    assert error(fused.encode(video), golden[f"call{call}.observed_latents"]) < 1e-5


def test_the_decoded_video_equals_the_recorded_one(fused: WanVAE, golden: dict[str, torch.Tensor]) -> None:
    assert error(fused.decode(golden["call0.video_latents"]), golden["call0.decoded_video"]) < 1e-5


@pytest.mark.parametrize("lengths", [[1, 4, 4, 4, 4], [1, 8, 8], [5, 12], [17]])
def test_a_stream_s_pieces_are_the_whole(fused: WanVAE, golden: dict[str, torch.Tensor], lengths: list[int]) -> None:
    frames = torch.cat([golden[f"call{call}.frames"] for call in (0, 1, 2, 3, 4)])[:, :32, :48]
    video = frames.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
    state = fused.new_encode_state()
    latents = [fused.encode_stream(state, piece) for piece in torch.split(video, lengths, dim=2)]
    assert state.num_latent_frames == 5
    assert error(torch.cat(latents, dim=2), fused.encode(video)) < 1e-5


@pytest.mark.parametrize("lengths", [[3, 3, 1], [1, 6], [7], [2, 5]])
def test_latents_that_are_decoded_together_are_those_decoded_one_by_one(fused: WanVAE, lengths: list[int]) -> None:
    torch.manual_seed(0)
    latents = torch.randn(1, fused.sizes.z_dim, 7, 4, 6)
    fused.latents_at_once = 1
    expected = fused.decode(latents)
    fused.latents_at_once, state = 3, fused.new_decode_state()
    video = [fused.decode_stream(state, piece) for piece in torch.split(latents, lengths, dim=2)]
    assert state.num_latent_frames == 7
    assert error(torch.cat(video, dim=2), expected) < 1e-5


def test_of_a_batch_each_video_is_encoded_for_itself(fused: WanVAE) -> None:
    torch.manual_seed(0)
    videos = torch.rand(3, 3, 9, 32, 48) * 2 - 1
    alone = torch.cat([fused.encode(video[None]) for video in videos])
    assert error(fused.encode(videos), alone) < 1e-5


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 2),
    st.tuples(st.just(2), st.integers(0, 1), st.integers(0, 1)),
    st.booleans(),
    st.booleans(),
)
def test_one_step_before_a_convolution_is_the_steps_it_replaces(
    batch: int, channels: int, frames: int, tail_frames: int, sides: tuple[int, int, int], norms: bool, biased: bool
) -> None:
    x, tail = torch.randn(batch, channels, frames, 3, 4), torch.randn(batch, channels, tail_frames, 3, 4)
    gamma = torch.randn(channels) if norms else None
    bias = torch.randn(channels) if biased else None

    def stepwise(part: torch.Tensor) -> torch.Tensor:
        if bias is not None:
            part = part + bias[:, None, None, None]
        if gamma is None:
            return part
        return F.silu(F.normalize(part, dim=1) * channels**0.5 * gamma[:, None, None, None])

    joined = torch.cat([stepwise(tail), stepwise(x)], dim=2)
    expected = F.pad(joined, (sides[2],) * 2 + (sides[1],) * 2 + (sides[0] - tail_frames, 0))
    torch.testing.assert_close(norm_activate_pad(x, tail if tail_frames else None, gamma, sides, bias), expected)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 2), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_enlarging_is_the_steps_that_it_replaces(batch: int, channels: int, frames: int, interleaved: bool) -> None:
    x = torch.randn(batch, (2 if interleaved else 1) * channels, frames, 3, 4)
    video = x if not interleaved else torch.stack(x.chunk(2, dim=1), dim=3).flatten(2, 3)
    expected = video.repeat_interleave(2, dim=3).repeat_interleave(2, dim=4).transpose(1, 2).flatten(0, 1)
    torch.testing.assert_close(twice_as_large(x, interleaved=interleaved), expected)

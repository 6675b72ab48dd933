"""The encoders against the recorded ones, streams against whole videos, and the key tables against the libraries."""

from __future__ import annotations

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from worldkv.errors import CheckpointError
from worldkv.models.dreamzero.checkpoint import Checkpoint, load_encoders, read_sizes
from worldkv.models.dreamzero.folder import IMAGE_PREFIX, PREFIXES
from worldkv.models.wan import libraries as encoder_sizes
from worldkv.models.wan import names as encoder_keys
from worldkv.models.wan.encoders import WanEncoders, WanVAE
from worldkv.models.wan.layout import encoder_shapes
from worldkv.models.wan.sizes import EncoderSizes, ImageSizes, TextSizes, VAESizes

Golden = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def golden(golden_folder: Path) -> Golden:
    return load_file(golden_folder / "golden.safetensors")


@pytest.fixture(scope="module")
def checkpoint(golden_folder: Path) -> Checkpoint:
    return Checkpoint.open(golden_folder)


@pytest.fixture(scope="module")
def encoders(checkpoint: Checkpoint) -> WanEncoders:
    return load_encoders(checkpoint, device="cpu", dtype=torch.float32)


def error(ours: torch.Tensor, recorded: torch.Tensor) -> float:
    assert ours.shape == recorded.shape
    return float((ours - recorded).norm() / recorded.norm())


def frames_to_video(frames: torch.Tensor) -> torch.Tensor:
    """uint8 frames [T, H, W, 3] to a float32 video [1, 3, T, H, W] in [-1, 1]."""
    return ((frames.permute(3, 0, 1, 2)[None].float() / 255) - 0.5) / 0.5


def window_image(golden: Golden, call: int) -> torch.Tensor:
    """[1, 3, H, W]: the frame a window starts from, the last one of a request."""
    return frames_to_video(golden[f"call{call}.frames"])[:, :, -1]


# --- against the recordings


@pytest.mark.parametrize("branch", ["conditional", "unconditional"])
def test_text_embeddings_equal_the_recorded_ones(encoders: WanEncoders, golden: Golden, branch: str) -> None:
    prompt = f"prompt.{branch}"
    ours = encoders.text.encode(golden[f"{prompt}.token_ids"], golden[f"{prompt}.attention_mask"])
    assert error(ours, golden[f"{prompt}.embedding"]) < 1e-5


@pytest.mark.parametrize("call", [0, 4])
def test_image_features_equal_the_recorded_ones(encoders: WanEncoders, golden: Golden, call: int) -> None:
    ours = encoders.image.encode(window_image(golden, call))
    assert error(ours, golden[f"call{call}.clip_feature"]) < 1e-5


@pytest.mark.parametrize("call", [0, 4])
def test_first_frame_conditions_equal_the_recorded_ones(encoders: WanEncoders, golden: Golden, call: int) -> None:
    image = window_image(golden, call)
    video = torch.cat([image[:, :, None], torch.zeros(1, 3, 32, *image.shape[2:])], dim=2)
    latents = encoders.vae.encode(video)
    mask = torch.zeros(1, 4, *latents.shape[2:])
    mask[:, :, 0] = 1
    assert error(torch.cat([mask, latents], dim=1), golden[f"call{call}.first_frame_condition"]) < 1e-5


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_observed_latents_equal_the_recorded_ones(encoders: WanEncoders, golden: Golden, call: int) -> None:
    frames = frames_to_video(golden[f"call{call}.frames"]).repeat_interleave(2, dim=2)
    video = torch.cat([frames[:, :, :1], frames], dim=2)  # 4 frames -> 8 -> 9
    assert error(encoders.vae.encode(video), golden[f"call{call}.observed_latents"]) < 1e-5


def test_the_decoded_video_equals_the_recorded_one(encoders: WanEncoders, golden: Golden) -> None:
    assert error(encoders.vae.decode(golden["call0.video_latents"]), golden["call0.decoded_video"]) < 1e-5


def test_the_latent_statistics_are_the_recorded_ones(golden: Golden) -> None:
    z_dim = golden["latent_mean"].numel()
    assert torch.equal(torch.tensor(encoder_keys.LATENT_MEAN[z_dim]), golden["latent_mean"])
    assert torch.equal(torch.tensor(encoder_keys.LATENT_STD[z_dim]), golden["latent_std"])


def plain_image_tower(weights: dict[str, torch.Tensor], image: torch.Tensor, heads: int) -> torch.Tensor:
    """The tower from its definition, straight from the checkpoint's tensors."""
    mean = torch.tensor((0.48145466, 0.4578275, 0.40821073)).view(3, 1, 1)
    std = torch.tensor((0.26862954, 0.26130258, 0.27577711)).view(3, 1, 1)
    x = F.interpolate(image, size=(224, 224), mode="bicubic", align_corners=False)
    x = F.conv2d((x * 0.5 + 0.5 - mean) / std, weights["patch_embedding.weight"], stride=14).flatten(2).mT
    x = torch.cat([weights["cls_embedding"].expand(len(x), -1, -1), x], dim=1) + weights["pos_embedding"]

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    x = norm(x, "pre_norm")
    for block in ("transformer.0", "transformer.1"):  # of 3; the last is never run
        qkv = linear(norm(x, f"{block}.norm1"), f"{block}.attn.to_qkv")
        q, k, v = (t.unflatten(2, (heads, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=-1))
        attended = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), dim=-1) @ v
        x = x + linear(attended.transpose(1, 2).flatten(2), f"{block}.attn.proj")
        x = x + linear(F.gelu(linear(norm(x, f"{block}.norm2"), f"{block}.mlp.0")), f"{block}.mlp.2")
    return x


def test_the_image_tower_attends_over_tokens_unless_told_otherwise(checkpoint: Checkpoint, golden: Golden) -> None:
    encoders = load_encoders(checkpoint, device="cpu", dtype=torch.float32)
    prefix = IMAGE_PREFIX
    weights = {
        name.removeprefix(prefix): checkpoint.tensor(name).float()
        for name in checkpoint.shapes
        if name.startswith(prefix)
    }
    image = window_image(golden, 0)
    assert error(encoders.image.encode(image), plain_image_tower(weights, image, heads=4)) < 1e-5


# --- streams


def pieces(video: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    return list(torch.split(video, lengths, dim=2))


@pytest.fixture(scope="module")
def video(golden: Golden) -> torch.Tensor:
    """[1, 3, 17, 32, 48], a corner of different frames."""
    frames = torch.cat([golden[f"call{call}.frames"] for call in (0, 1, 2, 3, 4)])
    return frames_to_video(frames)[..., :32, :48]


@pytest.fixture(scope="module")
def latents(golden: Golden) -> torch.Tensor:
    """[1, C, 3, 2, 3] of one request, a corner."""
    return golden["call1.observed_latents"][..., :2, :3]


@pytest.mark.parametrize("lengths", [[1, 4, 4, 4, 4], [1, 8, 8], [5, 12], [17]])
def test_encoding_a_stream_equals_encoding_the_whole_video(
    encoders: WanEncoders, video: torch.Tensor, lengths: list[int]
) -> None:
    state = encoders.vae.new_encode_state()
    latents = [encoders.vae.encode_stream(state, piece) for piece in pieces(video, lengths)]
    assert torch.equal(torch.cat(latents, dim=2), encoders.vae.encode(video))
    assert state.num_latent_frames == 5


@pytest.mark.parametrize("lengths", [[1, 1, 1], [1, 2], [2, 1], [3]])
def test_decoding_a_stream_equals_decoding_the_whole(
    encoders: WanEncoders, latents: torch.Tensor, lengths: list[int]
) -> None:
    state = encoders.vae.new_decode_state()
    video = [encoders.vae.decode_stream(state, piece) for piece in pieces(latents, lengths)]
    whole = encoders.vae.decode(latents)
    assert torch.equal(torch.cat(video, dim=2), whole)
    assert whole.shape[2] == 9
    assert whole.abs().max() <= 1


def test_streaming_equals_diffusers_own_whole_video_passes(encoders: WanEncoders, video: torch.Tensor) -> None:
    vae, module = encoders.vae, encoders.vae.module
    with torch.no_grad():
        mu = module.encode(video[:, :, :9]).latent_dist.mode()
        decoded = module.decode(mu).sample
    mean = torch.tensor(module.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(module.config.latents_std).view(1, -1, 1, 1, 1)
    latents = vae.encode(video[:, :, :9])
    assert error(latents, (mu - mean) / std) < 1e-5
    assert error(vae.decode(latents), decoded) < 1e-5


def test_a_copied_stream_goes_on_by_itself(encoders: WanEncoders, video: torch.Tensor) -> None:
    vae, state = encoders.vae, encoders.vae.new_encode_state()
    first, second, third = pieces(video[:, :, :9], [1, 4, 4])
    vae.encode_stream(state, first)
    vae.encode_stream(state, second)
    fork = state.copy()
    ahead = vae.encode_stream(state, third)
    elsewhere = vae.encode_stream(fork, third.flip(3))
    again = vae.encode_stream(fork_back := state.copy(), third)  # one chunk further on
    assert fork_back.num_latent_frames == 4
    assert not torch.equal(ahead, elsewhere)
    assert not torch.equal(ahead, again)
    assert torch.equal(ahead, vae.encode(video[:, :, :9])[:, :, 2:])


def test_streams_share_nothing_but_weights(encoders: WanEncoders, video: torch.Tensor) -> None:
    vae = encoders.vae
    videos = [video[:, :, :9], video[:, :, 8:].flip(4)]
    states = [vae.new_encode_state() for _ in videos]
    latents: list[list[torch.Tensor]] = [[], []]
    for start, stop in ((0, 1), (1, 5), (5, 9)):
        for which, whole in enumerate(videos):
            latents[which].append(vae.encode_stream(states[which], whole[:, :, start:stop]))
    for mine, whole in zip(latents, videos, strict=True):
        assert torch.equal(torch.cat(mine, dim=2), vae.encode(whole))


def test_one_encoder_serves_several_threads(encoders: WanEncoders, video: torch.Tensor) -> None:
    vae = encoders.vae
    videos = [video[:, :, :5], video[:, :, 4:9], video[:, :, 8:13], video[:, :, 12:17]]
    alone = [vae.encode(one) for one in videos]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(vae.encode, videos))
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def plain_attributes(module: torch.nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}": copy.copy(value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if not isinstance(value, torch.nn.Module) and key not in ("_parameters", "_buffers", "_modules")
    }


def test_a_call_leaves_nothing_on_the_modules(
    encoders: WanEncoders, golden: Golden, video: torch.Tensor, latents: torch.Tensor
) -> None:
    modules = (encoders.vae.module, encoders.text.module, encoders.image.module)
    before = [plain_attributes(module) for module in modules]
    state = encoders.vae.new_encode_state()
    encoders.vae.encode_stream(state, video[:, :, :1])
    encoders.vae.decode(latents)
    encoders.text.encode(golden["prompt.conditional.token_ids"], golden["prompt.conditional.attention_mask"])
    encoders.image.encode(video[:, :, 0])
    for module, attributes in zip(modules, before, strict=True):
        assert str(plain_attributes(module)) == str(attributes)


def test_a_failed_call_leaves_the_stream_where_it_was(
    encoders: WanEncoders, video: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae, state = encoders.vae, encoders.vae.new_encode_state()
    vae.encode_stream(state, video[:, :, :1])
    right = vae.encode_stream(state.copy(), video[:, :, 1:9])
    calls = 0
    forward = vae.module.quant_conv.forward

    def failing(x: torch.Tensor, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("out of memory")
        return forward(x, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(vae.module.quant_conv, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            vae.encode_stream(state, video[:, :, 1:9])
    assert state.num_latent_frames == 1
    assert torch.equal(vae.encode_stream(state, video[:, :, 1:9]), right)


def test_videos_of_a_wrong_shape_are_refused(encoders: WanEncoders, video: torch.Tensor) -> None:
    vae: WanVAE = encoders.vae
    with pytest.raises(ValueError, match="one more than a multiple of 4, got 4"):
        vae.encode(video[:, :, :4])
    state = vae.new_encode_state()
    vae.encode_stream(state, video[:, :, :1])
    with pytest.raises(ValueError, match="positive multiple of 4, got 5"):
        vae.encode_stream(state, video[:, :, :5])
    with pytest.raises(ValueError, match="multiples of"):
        vae.encode(video[:, :, :1, :-1])
    with pytest.raises(ValueError, match="latents must be"):
        vae.decode(torch.zeros(1, 4, 1, 2, 2))


# --- text and image


def test_padding_is_zeroed_row_by_row(encoders: WanEncoders, golden: Golden) -> None:
    ids = torch.cat([golden[f"prompt.{branch}.token_ids"] for branch in ("conditional", "unconditional")])
    mask = torch.cat([golden[f"prompt.{branch}.attention_mask"] for branch in ("conditional", "unconditional")])
    both = encoders.text.encode(ids.numpy(), mask.numpy())
    assert (both[mask == 0] == 0).all()
    for row, branch in enumerate(("conditional", "unconditional")):
        assert error(both[row : row + 1], golden[f"prompt.{branch}.embedding"]) < 1e-5


def test_bad_text_and_image_inputs_are_refused(encoders: WanEncoders) -> None:
    ones = torch.ones(1, 16, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"token_ids must lie in \[0, 320\)"):
        encoders.text.encode(ones * 320, ones)
    with pytest.raises(ValueError, match=r"must both be \[B, L\]"):
        encoders.text.encode(ones, ones[:, :3])
    with pytest.raises(ValueError, match="image must be"):
        encoders.image.encode(torch.zeros(3, 8, 8))


def test_encoders_run_in_bfloat16(checkpoint: Checkpoint, golden: Golden) -> None:
    encoders = load_encoders(checkpoint, device="cpu", dtype=torch.bfloat16)
    ours = encoders.vae.encode(frames_to_video(golden["call0.frames"]))
    assert ours.dtype == torch.bfloat16
    assert error(ours.float(), golden["call0.first_frame_condition"][:, 4:, :1]) < 0.05
    assert error(encoders.image.encode(window_image(golden, 0)).float(), golden["call0.clip_feature"]) < 0.1
    embedding = encoders.text.encode(
        golden["prompt.conditional.token_ids"], golden["prompt.conditional.attention_mask"]
    )
    assert error(embedding.float(), golden["prompt.conditional.embedding"]) < 0.05


# --- sizes and names

TRUE_TEXT = TextSizes(256384, 4096, 4096, 10240, 24, 64, 32)
TRUE_IMAGE = ImageSizes(1280, 5120, 32, 16)
TRUE_SIZES = {
    "14B": EncoderSizes(VAESizes(16, 96, 96, residual=False), TRUE_TEXT, TRUE_IMAGE),
    "5B": EncoderSizes(VAESizes(48, 160, 256, residual=True), TRUE_TEXT, TRUE_IMAGE),
}


@pytest.mark.parametrize("model", ["14B", "5B"])
def test_the_true_encoders_can_be_built_named_and_read_back(model: str, checkpoint: Checkpoint) -> None:
    sizes = TRUE_SIZES[model]
    shapes = encoder_shapes(sizes, PREFIXES)
    last_layer = {f"{IMAGE_PREFIX}transformer.31.norm1.bias": (1280,)}
    config = replace(checkpoint.config, text_num_heads=64, image_num_heads=16)
    released = replace(checkpoint, config=config, shapes=shapes | last_layer)
    assert read_sizes(released) == sizes
    parameters = sum(torch.Size(shape).numel() for name, shape in shapes.items() if ".text_encoder." in name)
    assert parameters == pytest.approx(5.68e9, rel=0.01)
    tower = sum(torch.Size(shape).numel() for name, shape in shapes.items() if ".image_encoder." in name)
    assert tower == pytest.approx(0.612e9, rel=0.01)
    assert sum(".vae." in name for name in shapes) == (194 if model == "14B" else 196)


@pytest.mark.parametrize("model", ["14B", "5B"])
def test_no_two_tensors_of_a_module_claim_the_same_source(model: str) -> None:
    sizes = TRUE_SIZES[model]
    for built, shared in (
        (encoder_sizes.build_vae(sizes.vae), 0),
        (encoder_sizes.build_text_encoder(sizes.text), 1),  # the tied embedding has two names
        (encoder_sizes.build_image_encoder(sizes.image), 0),
    ):
        module, names = built
        assert names.keys() == module.state_dict().keys()
        assert len(set(names.values())) == len(names) - shared


def test_a_tensor_name_of_an_unknown_library_version_is_reported() -> None:
    with pytest.raises(NotImplementedError, match=r"no single rule for tensor 'decoder\.novelty\.weight'"):
        encoder_keys.sources(["decoder.novelty.weight"], encoder_keys.VAE21_RULES, "vae.")


def test_head_counts_that_contradict_the_tensors_are_refused(checkpoint: Checkpoint) -> None:
    wrong = replace(checkpoint, config=replace(checkpoint.config, text_num_heads=8))
    with pytest.raises(CheckpointError, match=r"text_encoder_cfg\.num_heads 8 contradicts"):
        read_sizes(wrong)


def test_a_missing_library_is_reported_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(encoder_sizes.importlib, "import_module", refuse)
    with pytest.raises(CheckpointError, match=r"need diffusers.*pip install 'worldkv\[dreamzero\]'"):
        encoder_sizes.build_vae(TRUE_SIZES["14B"].vae)


def test_loading_reports_progress_and_prints_nothing(
    checkpoint: Checkpoint, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[int, int]] = []
    load_encoders(
        checkpoint, device="cpu", dtype=torch.float32, progress=lambda done, total: seen.append((done, total))
    )
    assert sum(done == total for done, total in seen) == 3
    assert all(0 < done <= total for done, total in seen)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records

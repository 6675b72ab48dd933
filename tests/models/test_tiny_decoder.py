"""The tiny decoder: as its layers are described, piece by piece as at once, and files that are none refused."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from safetensors.torch import save_file  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from worldkv.errors import BadRequest, CheckpointError  # noqa: E402
from worldkv.models.wan.tiny_decoder import TinyDecoder, tiny_layers  # noqa: E402

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    """As a released file has them, beside the encoder's, which are not read."""
    torch.manual_seed(0)
    made = {
        f"decoder.{name}": torch.randn(each.shape) / (each[0].numel() ** 0.5 if each.dim() > 1 else 2)
        for name, each in tiny_layers().state_dict().items()
    }
    return {**made, "encoder.0.weight": torch.zeros(64, 3, 3, 3)}


@pytest.fixture(scope="module")
def decoder(tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> TinyDecoder:
    path = tmp_path_factory.mktemp("tiny") / "taew2_1.pth"
    torch.save(tensors, path)
    return TinyDecoder.load(path, "cpu", torch.float32)


def frame_by_frame(tensors: Tensors, latents: torch.Tensor) -> torch.Tensor:
    """The published description, without any batch: each frame goes through all layers before the next one comes."""
    before: dict[int, torch.Tensor] = {}

    def conv(x: torch.Tensor, name: str, padding: int = 1) -> torch.Tensor:
        return F.conv2d(x, tensors[f"decoder.{name}.weight"], tensors.get(f"decoder.{name}.bias"), padding=padding)

    def seeing(x: torch.Tensor, layer: int) -> torch.Tensor:
        past = before.get(layer, torch.zeros_like(x))
        before[layer] = x
        y = F.relu(conv(torch.cat([x, past], 1), f"{layer}.conv.0"))
        return F.relu(conv(F.relu(conv(y, f"{layer}.conv.2")), f"{layer}.conv.4") + x)

    def level(frames: list[torch.Tensor], first: int, count: int) -> list[torch.Tensor]:
        made = []
        for frame in frames:
            for layer in range(first, first + 3):
                frame = seeing(frame, layer)
            large = F.interpolate(frame, scale_factor=2, mode="nearest")
            for part in conv(large, f"{first + 4}.conv", padding=0).chunk(count, dim=1):
                made.append(conv(part, str(first + 5)))
        return made

    video = []
    for latent in latents[0].transpose(0, 1):
        frames = [F.relu(conv(torch.tanh(latent[None] / 3) * 3, "1"))]
        for first, count in ((3, 1), (9, 2), (15, 2)):
            frames = level(frames, first, count)
        video += [conv(F.relu(frame), "22").clamp(0, 1) * 2 - 1 for frame in frames]
    return torch.stack(video[3:], dim=2)


@pytest.mark.parametrize("lengths", [[4], [3, 1], [1, 1, 2]])
def test_pieces_are_the_whole_and_the_whole_is_what_is_described(
    decoder: TinyDecoder, tensors: Tensors, lengths: list[int]
) -> None:
    torch.manual_seed(1)
    latents = torch.randn(1, 16, 4, 3, 4)
    state = decoder.new_decode_state()
    pieces = [decoder.decode_stream(state, piece) for piece in torch.split(latents, lengths, dim=2)]
    video = torch.cat(pieces, dim=2)
    assert video.shape == (1, 3, 13, 24, 32)
    assert video.std() > 0.05, "a picture"
    torch.testing.assert_close(video, frame_by_frame(tensors, latents), rtol=1e-4, atol=1e-5)
    assert state.num_bytes == 4 * decoder.state_size(3, 4)
    decoder.check_decode_state(state, (3, 4))


def test_the_layers_have_the_names_and_shapes_of_the_released_file(tensors: Tensors) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name, shape in {
        "decoder.1.weight": (256, 16, 3, 3),
        "decoder.3.conv.0.weight": (256, 512, 3, 3),
        "decoder.7.conv.weight": (256, 256, 1, 1),
        "decoder.8.weight": (128, 256, 3, 3),
        "decoder.13.conv.weight": (256, 128, 1, 1),
        "decoder.19.conv.weight": (128, 64, 1, 1),
        "decoder.22.weight": (3, 64, 3, 3),
        "decoder.22.bias": (3,),
    }.items():
        assert shapes[name] == shape
    assert not any(f"decoder.{number}.bias" in shapes for number in (8, 14, 20))


def test_other_files_are_refused_in_words(tensors: Tensors, tmp_path: Path) -> None:
    other = {name: tensor.contiguous() for name, tensor in tensors.items()}
    other["decoder.1.weight"] = torch.zeros(256, 48, 3, 3)
    save_file(other, tmp_path / "taew2_2.safetensors")
    with pytest.raises(CheckpointError, match=r"decoder.1.weight: expected \(256, 16, 3, 3\), got \(256, 48, 3, 3\)"):
        TinyDecoder.load(tmp_path / "taew2_2.safetensors", "cpu", torch.float32)
    (tmp_path / "rubbish.pth").write_bytes(b"no weights")
    for name in ("rubbish.pth", "none.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            TinyDecoder.load(tmp_path / name, "cpu", torch.float32)


def test_a_state_of_another_decoder_is_refused(decoder: TinyDecoder) -> None:
    state = decoder.new_decode_state()
    with pytest.raises(BadRequest, match="that has begun"):
        decoder.check_decode_state(state, (3, 4))
    decoder.decode_stream(state, torch.randn(1, 16, 1, 3, 4))
    with pytest.raises(BadRequest, match="tensors of the tiny decoder"):
        decoder.check_decode_state(state, (4, 4))
    with pytest.raises(ValueError, match="latents must be"):
        decoder.decode_stream(state, torch.randn(1, 48, 1, 3, 4))

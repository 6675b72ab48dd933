"""`worldkv generate`: what a user types, sees and gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("av")

from causal import random_folder  # noqa: E402
from engines import random_checkpoint  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.models.wan.tiny_decoder import tiny_layers  # noqa: E402
from worldkv.show.video import read_video  # noqa: E402

SIZE = ("--height", "32", "--width", "48", "--block-size", "16")


def generate(output: Path, *options: str, folder: Path | None = None) -> int:
    return main(["generate", str(folder or random_folder()), "-o", str(output), *SIZE, *options])


def test_words_become_an_mp4_with_other_words_from_a_second_on(tmp_path: Path, capsys: Any) -> None:
    output = tmp_path / "new folder" / "lake.mp4"
    assert generate(output, "--prompt", "a lake", "--prompt-at", "1", "a  storm", "--seconds", "2") == 0
    said = capsys.readouterr().out
    frames = read_video(output)
    assert frames.shape == (33, 32, 48, 3), "2 s end within the third block"
    assert "random weights" in said
    assert f"{output}: 33 frames, 2.06 s of video in" in said
    assert "from 1.31 s on (block 2, made in" in said, "the block that begins at second 1 or next after it"
    assert "a storm" in said


def test_the_same_words_and_seed_make_the_same_video_and_another_seed_another(tmp_path: Path, capsys: Any) -> None:
    videos = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert generate(tmp_path / f"{name}.mp4", "--prompt", "a lake", "--seconds", "0.5", "--seed", seed) == 0
        videos.append(read_video(tmp_path / f"{name}.mp4"))
    assert np.array_equal(videos[0], videos[1])
    assert not np.array_equal(videos[0], videos[2])


def test_a_tiny_decoder_makes_other_pixels_of_the_same_world_and_is_named(tmp_path: Path, capsys: Any) -> None:
    weights = tmp_path / "taew2_1.pth"
    torch.manual_seed(0)
    torch.save(
        {f"decoder.{name}": torch.randn(each.shape) for name, each in tiny_layers().state_dict().items()}, weights
    )
    videos = []
    for name, options in (("own", ()), ("tiny", ("--tiny-decoder", str(weights)))):
        assert generate(tmp_path / f"{name}.mp4", "--prompt", "a lake", "--seconds", "1", *options) == 0
        videos.append(read_video(tmp_path / f"{name}.mp4"))
    said = capsys.readouterr().out
    assert "decoder    the model's own" in said
    assert "decoder    tiny (TAEHV), other pixels than the model's own" in said
    assert videos[0].shape == videos[1].shape
    assert not np.array_equal(*videos)
    weights.write_bytes(b"")
    assert generate(tmp_path / "none.mp4", "--prompt", "a lake", "--tiny-decoder", str(weights)) == 2
    assert "taew2_1.pth" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--prompt", "a", "--prompt-at", "9", "b", "--seconds", "2"),
            "--prompt-at: expected more than 0 and",
        ),
        (("--prompt", "a", "--prompt-at", "soon", "b"), "--prompt-at: "),
        (("--prompt", " "), "--prompt: expected words"),
        (("--prompt", "a", "--switch", "fade"), "--switch: expected one of 'recache'"),
        (("--prompt", "a", "--seconds", "6", "--preset", "self-forcing"), "ends with 5.06 s; ask for no more, or let"),
        (("--prompt", "a", "--preset", "wan"), "--preset: expected one of self-forcing"),
        (("--prompt", "a", "--steps", "8"), "has no option --steps"),
    ],
)
def test_what_cannot_be_made_is_told_in_a_line_and_nothing_is_written(
    tmp_path: Path, capsys: Any, options: tuple[str, ...], words: str
) -> None:
    assert generate(tmp_path / "v.mp4", *options) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("error: ")
    assert words in said
    assert not (tmp_path / "v.mp4").exists()


def test_a_robot_s_checkpoint_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert main(["generate", str(random_checkpoint()), "--prompt", "a lake", "-o", str(tmp_path / "v.mp4")]) == 2
    assert "expected a model of causal_wan" in capsys.readouterr().err
    assert main(["serve", str(random_folder()), "--embodiment", "oxe_droid", "--port", "0"]) == 2
    assert "is a model of video, which has no such choice" in capsys.readouterr().err

"""`worldkv verify` of causal video agrees with the recordings, in company, and notices whatever is wrong."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from causal import SHARED, make_request, random_folder, run  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.load import load_engine  # noqa: E402
from worldkv.models.base import Forward  # noqa: E402
from worldkv.models.causal_wan.config import BRANCH, CausalSettings  # noqa: E402
from worldkv.models.causal_wan.random import TINY  # noqa: E402


def verify(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, float], str]:
    """Exit code, the largest relative error by quantity, and what was told on standard error."""
    code = main(["verify", *options])
    told = capsys.readouterr()
    errors: dict[str, float] = {}
    for name, value, *_ in (line.split() for line in told.out.splitlines() if not line.startswith("blocks of")):
        errors[name] = max(errors.get(name, 0.0), float(value))
    return code, errors, told.err


@pytest.mark.parametrize("name", ["tiny_causal_chunk", "tiny_causal_recache"])
def test_recordings_are_reproduced_in_company(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = SHARED / "golden" / name
    if not folder.is_dir():
        pytest.skip(f"golden/{name} is not beside this checkout")
    code, errors, _ = verify(
        capsys, str(folder), "--tolerance", "1e-4", "--interleave", "1", "--block-size", "16", "64"
    )
    assert code == 0
    assert errors["max_relative_error"] < 5e-6, errors
    assert len(errors) > 100


def record(folder: Path, settings: CausalSettings, image: bool) -> Path:
    """A session of three blocks, recorded by this engine itself: what is tested is how recordings are run."""
    shutil.copytree(random_folder(settings), folder)
    golden: dict[str, Any] = {}
    place = {"block": "block0", "step": 0}

    def observe(kv: Any, request: Any, result: Any) -> None:
        if not isinstance(request, Forward):
            return
        if request.stage == "denoise":
            golden[f"{place['block']}.step{place['step']}.velocity"] = result[0][None].clone()
            place["step"] += 1
            return
        where = place["block"] if place["step"] else "start"
        golden[f"{where}.cache.layer1"] = torch.stack(kv.layer_kv(BRANCH, 1))[:, None].clone()

    engine = load_engine(folder, EngineConfig(max_sessions=1), height=32, width=48, observer=observe)
    session, generator, calls = engine.open_session(), torch.Generator().manual_seed(0), []
    start: dict[str, Any] = {}
    if image:
        golden["start.image"] = torch.rand((1, 3, 1, 32, 48), generator=generator) * 2 - 1
        golden["start.latents"] = engine.model.encoders.vae.encode(golden["start.image"])
        start = {"given": golden["start.latents"]}
    num_frames, per_block = int(image), settings.frames_per_block
    for number in range(3):
        place |= {"block": f"block{number}", "step": 0}
        schedule = engine.model.schedule if number else engine.model.first_schedule
        noise = torch.randn((len(schedule), 1, 16, per_block, 4, 6), generator=generator)
        request = make_request(noise=noise[0], epsilons=tuple(noise[1:]), **(start if number == 0 else {}))
        block = run(engine, session, request)
        golden |= {f"block{number}.noise": noise[0], f"block{number}.latents": block.latents[None]}
        golden |= {f"block{number}.step{i}.epsilon": noise[i + 1] for i in range(len(schedule) - 1)}
        num_pictures = 1 if image and number == 0 else 0
        golden[f"block{number}.decoded_video"] = block.video[None, :, num_pictures:]
        if num_pictures:
            golden["start.decoded_video"] = block.video[None, :, :1]
        visible = 6 * min(num_frames, settings.held_frames - per_block)
        calls.append(
            {"prompt": "only", "start_frame": num_frames, "visible_history_tokens": visible, "steps": len(schedule)}
        )
        num_frames += per_block
    golden["prompt.only.token_ids"] = torch.from_numpy(request.token_ids)
    golden["prompt.only.attention_mask"] = torch.from_numpy(request.attention_mask)
    golden["schedule.first_block_sigmas"] = torch.tensor(engine.model.first_schedule.sigmas)
    engine.shutdown()
    save_file({name: tensor.contiguous() for name, tensor in golden.items()}, folder / "golden.safetensors")
    (folder / "calls.json").write_text(json.dumps({"pixel_size": [32, 48], "blocks": calls}))
    return folder


FRAMEWISE = replace(
    TINY, frames_per_block=1, window_frames=3, sink_frames=1, steps=(1000, 500), first_block_steps=(1000, 750, 500)
)


@pytest.mark.parametrize(
    ("settings", "image"),
    [(FRAMEWISE, False), (FRAMEWISE, True), (replace(FRAMEWISE, rope="relative"), True), (TINY, False)],
)
def test_other_beginnings_steps_and_positions_are_run_as_recorded(
    settings: CausalSettings, image: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record(tmp_path / "recorded", settings, image)
    code, errors, _ = verify(capsys, "--checkpoint", str(folder), "--tolerance", "1e-6")
    assert code == 0, errors
    assert ("start.decoded_video" in errors) == ("start.latents" in errors) == ("start.cache.layer1" in errors) == image


def test_what_is_wrong_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = record(tmp_path / "recorded", FRAMEWISE, True)
    model = Path(shutil.copytree(folder, tmp_path / "other"))
    for name in ("golden.safetensors", "calls.json"):
        (model / name).unlink()
    options = (str(model), "--recording", str(folder), "--tolerance", "1e-4")
    assert verify(capsys, *options)[0] == 0
    code, errors, _ = verify(capsys, *options, "--sink-frames", "0")
    assert code == 1
    assert errors["block2.latents"] > 1e-4
    code, errors, _ = verify(capsys, *options, "--window-frames", "4")
    assert code == 1
    assert errors["block2.start_recached_visible_steps"] > 0
    for broken, words in (
        ({"blocks": []}, "pixel_size"),
        ({"pixel_size": [32, 48], "blocks": [{"prompt": "only"}]}, "start_frame"),
        ([], "calls.json is no recording of causal video"),
        ({"pixel_size": [32, 48], "blocks": [7]}, "calls.json is no recording of causal video"),
    ):
        (folder / "calls.json").write_text(json.dumps(broken))
        assert main(["verify", *options]) == 2
        assert words in capsys.readouterr().err


def test_options_of_other_families_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = SHARED / "golden" / "tiny_i2v"
    if not golden.is_dir():
        pytest.skip("golden/tiny_i2v is not beside this checkout")
    assert main(["verify", str(golden), "--preset", "longlive"]) == 2
    assert "--preset" in capsys.readouterr().err

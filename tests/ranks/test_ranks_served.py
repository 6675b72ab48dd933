"""`worldkv serve` on two ranks: a robot is served, and served again after a rank was killed."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("uvicorn")

from engines import droid_observation, random_checkpoint  # noqa: E402
from server_fakes import eventually, http_get  # noqa: E402

from worldkv.cli.main import main  # noqa: E402
from worldkv.client import PolicyClient  # noqa: E402
from worldkv.demo.server_process import ServerProcess  # noqa: E402

OPTIONS = ["--device", "cpu", "--block-size", "16", "--guidance-parallel", "2", "--rank-timeout", "10"]


def processes_of(pid: int) -> dict[int, str]:
    """Those below a process, and their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, (task / "children").read_text().split()):
            found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
            found |= processes_of(child)
    return found


def followers_of(pid: int) -> list[int]:
    """Forks of the fork server."""
    forked = {
        child for parent, line in processes_of(pid).items() if "forkserver" in line for child in processes_of(parent)
    }
    return sorted(forked)


def infer(port: int) -> None:
    import numpy as np

    with PolicyClient(port=port) as robot:
        assert np.isfinite(robot.infer(droid_observation(np.random.default_rng(0), 1))).all()


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="finds processes as Linux tells them")
def test_a_server_on_ranks_begins_anew_when_a_rank_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with ServerProcess(random_checkpoint("ti2v"), log, OPTIONS) as server:
        server.wait_until_ready()
        infer(server.port)
        (follower,) = followers_of(server.pid)
        os.kill(follower, signal.SIGKILL)
        told: list[str] = []

        def is_unready() -> bool:
            status, text = http_get(server.port, "/healthz")
            told.append(text)
            return status == 503

        eventually(is_unready)
        assert "rank 1" in told[-1]
        assert "SIGKILL" in told[-1]
        first_port = server.port
        eventually(lambda: log.read_text().count("listening on ws://") == 2, 60)
        server.port = int(re.findall(r"listening on ws://.*:(\d+) ", log.read_text())[-1])
        server.wait_until_ready()
        infer(server.port)
        (again,) = followers_of(server.pid)
        assert again != follower
    assert server.exit_code == 0, (first_port, log.read_text())
    assert "ranks were lost: all of them are started anew" in log.read_text()
    assert "Traceback" not in log.read_text().split("are started anew")[-1]
    assert not any(Path(f"/proc/{pid}").exists() for pid in (follower, again))


def test_what_cannot_be_on_ranks_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(random_checkpoint("ti2v"))
    for options, expected in (
        (["--device", "cuda:1"], "--device: each rank takes a GPU of its own"),
        (["--also", folder], "--also: expected one model on several ranks"),
    ):
        assert main(["serve", folder, "--tensor-parallel", "2", *options]) == 2
        assert expected in capsys.readouterr().err
    assert main(["plan", "--guidance-parallel", "3"]) == 2
    assert "--guidance-parallel: expected 1 or 2" in capsys.readouterr().err
    assert main(["plan", "--guidance-parallel", "2", "--tensor-parallel", "2"]) == 0
    assert "each of 4 ranks on a GPU of 141 GB" in capsys.readouterr().out

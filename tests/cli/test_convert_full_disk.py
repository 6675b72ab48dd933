"""A disk that is full, limited or not to be written to: `convert` says so in one line and leaves nothing that looks
complete. The limit is the process's own on the size of a file, which stops every byte after it as a full disk does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")

from engines import random_checkpoint

from worldkv.cli.main import main
from worldkv.errors import CheckpointError
from worldkv.models.checkpoints.writing import write_text
from worldkv.models.dreamzero.checkpoint import Checkpoint

LIMITED = """
import resource, sys
from worldkv.cli.main import main
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(main(sys.argv[2:]))
"""


def limited(limit: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`worldkv` with these arguments where no file may grow beyond `limit` bytes."""
    command = [sys.executable, "-c", LIMITED, str(limit), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(random_checkpoint("ti2v"), tmp_path_factory.mktemp("convert") / "source"))


# a shard of the weights; then worldkv.yaml or the index, which come last
@pytest.mark.parametrize(("limit", "file"), [(200_000, "model-00001-of-"), (1000, "model-00001-of-")])
def test_a_full_disk_is_one_line_and_nothing_looks_complete(
    source: Path, tmp_path: Path, limit: int, file: str
) -> None:
    before, output = contents(source), tmp_path / "clean"
    done = limited(limit, "convert", source, "--output", output)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    error = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(error) == 1, done.stderr
    assert file in error[0]
    assert "File too large" in error[0]
    assert "are needed for it" in error[0]
    assert "what was read is unchanged" in error[0]
    assert contents(source) == before
    assert not list(output.glob("*.partial")), "a half is left"
    with pytest.raises(CheckpointError):
        Checkpoint.open(output)
    assert main(["convert", str(source), "--output", str(output)]) == 0, "with room it goes on"
    Checkpoint.open(output)


def test_a_description_that_does_not_fit_is_not_left_half_written(source: Path, tmp_path: Path) -> None:
    """Its shards are whole by then, so half a worldkv.yaml would make a folder that looks complete."""
    output = tmp_path / "clean"
    assert main(["convert", str(source), "--output", str(output)]) == 0
    largest = (output / "worldkv.yaml").stat().st_size
    (output / "worldkv.yaml").unlink()
    index = (output / "model.safetensors.index.json").read_bytes()
    assert len(index) > largest
    write = output / "worldkv.yaml"
    script = (
        "import resource, sys\nfrom pathlib import Path\nfrom worldkv.models.checkpoints.writing import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\nwrite_text('x' * 1000, Path(sys.argv[1]))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(write)], capture_output=True, text=True, timeout=120)
    assert "CheckpointError" in done.stderr
    assert "worldkv.yaml could not be written" in done.stderr
    assert not write.exists()
    assert not list(output.glob("*.partial"))


def test_the_old_file_stays_where_the_new_one_does_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    (tmp_path / "a.partial").mkdir()  # nothing can be written there
    with pytest.raises(CheckpointError, match=r"a\.txt could not be written"):
        write_text("new", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "old"


def test_a_random_checkpoint_on_a_full_disk_is_an_error_too(tmp_path: Path) -> None:
    script = (
        "import resource, sys\nfrom worldkv import write_random_checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\nwrite_random_checkpoint(sys.argv[1])"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "tiny")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CheckpointError" in done.stderr.splitlines()[-1]
    assert not (tmp_path / "tiny" / "config.json").exists(), "it looks complete"


def test_what_is_written_may_be_read_by_whom_the_umask_lets(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "clean"
    assert main(["convert", str(source), "--output", str(output)]) == 0
    modes = {path.stat().st_mode for path in output.iterdir()}
    assert len(modes) == 1, "shards that only their owner may read"

"""A repository's id where a folder is expected: the whole path against a small hub on loopback.

The library reads its address and its cache's place when it is imported, so every look is a process of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytest.importorskip("huggingface_hub")

from damaged import make
from engines import random_checkpoint
from hub_server import COMMIT, Hub, hub
from test_tokenizer import write_word_tokenizer

from worldkv.models.hub import checkpoint_folder, is_repository

SHARD = "lab/tiny/model-00002-of-00003.safetensors"
MAIN = "import sys; from worldkv.cli.main import main; sys.exit(main())"
# one line of JSON for every name: the folder, or the error
RESOLVE = """
import json, sys, warnings
warnings.simplefilter("ignore")
from worldkv.errors import CheckpointError
from worldkv.models.hub import checkpoint_folder
for name in sys.argv[1:]:
    try:
        print(json.dumps({"folder": str(checkpoint_folder(name))}))
    except CheckpointError as error:
        print(json.dumps({"error": str(error)}))
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the repository `lab/tiny` holds: a sharded checkpoint, and much that nobody reads."""
    place = tmp_path_factory.mktemp("published")
    folder = make(place / "tiny", "sharded")
    (folder / "README.md").write_text("# tiny")
    (folder / "optimizer.pt").write_bytes(bytes(1000))
    (folder / "tensorrt").mkdir()
    (folder / "tensorrt" / "engine.trt").write_bytes(bytes(1000))
    return folder


@pytest.fixture
def served(published: Path) -> Iterator[Hub]:
    with hub(lab__tiny=published) as running:
        yield running


def environment(place: Path, url: str, **more: str) -> dict[str, str]:
    plain = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS"))
    }
    plain |= {"HF_HOME": str(place / "hf"), "HF_ENDPOINT": url, "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    return plain | {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"} | more


def run(place: Path, url: str, *words: str, code: str = MAIN, **more: str) -> subprocess.CompletedProcess[str]:
    place.mkdir(exist_ok=True)
    command = [sys.executable, "-c", code, *words]
    env = environment(place, url, **more)
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=240)


def resolve(place: Path, url: str, *names: str, **more: str) -> list[dict[str, str]]:
    done = run(place, url, *names, code=RESOLVE, **more)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def error_of(place: Path, url: str, name: str, **more: str) -> str:
    (found,) = resolve(place, url, name, **more)
    assert "\n" not in found["error"]
    return found["error"]


def test_a_folder_wins_and_what_is_no_id_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab" / "tiny").mkdir(parents=True)
    assert checkpoint_folder("lab/tiny") == Path("lab/tiny")
    for name in (
        "tiny",
        "/lab/tiny",
        "../lab/tony",
        "a/b/c",
        "",
        "~/x",
        "lab/",
        "lab/ti ny",
        "lab/ti\nny",
        ".hidden/x",
    ):
        assert not is_repository(name), name
        assert checkpoint_folder(name) == Path(name)
    for name in ("lab/tony", "lab/tiny@main", "GEAR-Dreams/DreamZero-DROID", "o/n@refs/pr/1"):
        assert is_repository(name), name


def test_inspect_and_serving_take_an_id_and_only_what_is_read_is_fetched(served: Hub, tmp_path: Path) -> None:
    done = run(tmp_path, served.url, "inspect", "lab/tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is missing" in done.stdout
    assert f"lab/tiny@{COMMIT[:12]}" in done.stdout
    assert "fetching lab/tiny: " in done.stderr
    fetched = {path for path, _, _ in served.sent}
    assert SHARD in fetched
    assert not [path for path in fetched if path.endswith((".md", ".pt", ".trt"))]

    before = len(served.sent)
    load = (
        "import argparse, sys\nfrom pathlib import Path\nfrom worldkv.cli import serve\n"
        "from worldkv.cli.common import describe_model, fetch_repositories, load_policy_for\n"
        "parser = argparse.ArgumentParser(); serve.add_options(parser)\n"
        "arguments = parser.parse_args(sys.argv[1:])\nfetch_repositories(arguments)\n"
        "policy = load_policy_for(arguments, max_sessions=1)\n"
        "print(describe_model(policy, arguments.checkpoint)[0], policy.random_weights)\n"
        "policy.close(); policy.engine.shutdown()"
    )
    done = run(tmp_path, served.url, "--checkpoint", "lab/tiny@v1", "--device", "cpu", code=load)
    assert done.returncode == 0, done.stderr
    assert f"model      tiny@{COMMIT[:12]}: " in done.stdout
    assert "True" in done.stdout
    assert len(served.sent) == before, "fetched again, though it was there"

    # and without a network
    done = run(tmp_path, served.url, "download", "lab/tiny", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert "serve it with" in done.stdout


def test_a_connection_that_breaks_is_gone_on_with_from_where_it_broke(served: Hub, tmp_path: Path) -> None:
    served.cuts[SHARD] = [100_000, 300_000]
    small = "import huggingface_hub.constants as c\nc.DOWNLOAD_CHUNK_SIZE = 4096\n"  # it keeps whole pieces, of 10 MB
    done = run(tmp_path, served.url, "lab/tiny", code=small + RESOLVE)
    found = json.loads(done.stdout)
    assert "folder" in found, found
    size = (served.repositories["lab/tiny"] / SHARD.rpartition("/")[2]).stat().st_size
    first, *later = served.asked("00002-of-00003.safetensors")
    assert first == 0
    assert len(later) == 2, served.sent
    assert 0 < later[0] <= 100_000 < later[1] <= 300_000, f"began again: {served.sent}"
    assert served.num_sent("00002-of-00003.safetensors") < 1.1 * size
    assert (Path(found["folder"]) / "model-00002-of-00003.safetensors").stat().st_size == size


def test_a_run_that_was_killed_keeps_every_whole_file(served: Hub, tmp_path: Path) -> None:
    served.stops[SHARD] = 200_000
    command = [sys.executable, "-c", RESOLVE, "lab/tiny"]
    env = environment(tmp_path, served.url, HF_HUB_DOWNLOAD_TIMEOUT="60")
    process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    others = ("00001-of-00003.safetensors", "00003-of-00003.safetensors", "conf.yaml")
    deadline = time.monotonic() + 120
    while not all(served.asked(name) for name in (*others, "00002-of-00003.safetensors")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)  # the last bytes are on their way to the disk
    process.kill()
    process.communicate()
    error = error_of(tmp_path, served.url, "lab/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in error
    assert "some of its files" in error
    served.stops.clear()
    before = {name: len(served.asked(name)) for name in others}
    (found,) = resolve(tmp_path, served.url, "lab/tiny")
    assert "folder" in found, found
    assert {name: len(served.asked(name)) for name in others} == before, "whole files were fetched again"


def test_what_cannot_be_had_is_told_with_what_to_do(served: Hub, published: Path, tmp_path: Path) -> None:
    served.repositories |= {"lab/gated": published, "lab/empty": tmp_path / "empty"}
    served.gated.add("lab/gated")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("nothing")
    (tmp_path / "lab" / "DreamZero-DROID").mkdir(parents=True)
    names = ("lab/absent", "lab/DreamZero-DROYD", "lab/gated", "lab/tiny@v9", "lab/empty", "lab/a--b")
    absent, mistyped, gated, revision, empty, no_id = (
        found["error"] for found in resolve(tmp_path, served.url, *names)
    )
    assert "there is no folder lab/absent, and no repository lab/absent at" in absent
    assert "hf auth login" in absent
    assert "did you mean lab/DreamZero-DROID?" in mistyped
    assert f"accept its licence at {served.url}/lab/gated" in gated
    assert "HF_TOKEN; no token is set" in gated
    assert revision.startswith(f"lab/tiny has no revision 'v9' at {served.url}")
    assert empty == "lab/empty holds nothing that worldkv reads; it has notes.txt"
    assert "can be no repository's id" in no_id
    assert "has no access to it yet" in error_of(tmp_path, served.url, "lab/gated", HF_TOKEN="hf_other")
    assert "folder" in resolve(tmp_path, served.url, "lab/gated", HF_TOKEN="hf_admitted")[0]

    done = run(tmp_path, served.url, "inspect", "lab/absent")
    assert done.returncode == 2
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == done.stderr.splitlines()[-1:]
    assert "Traceback" not in done.stderr


def test_without_a_network_it_says_what_the_cache_has(served: Hub, tmp_path: Path) -> None:
    nobody = "http://127.0.0.1:9"
    error = error_of(tmp_path, nobody, "lab/tiny")
    assert f"could not be fetched from {nobody}" in error
    assert "has nothing of it" in error
    assert "HF_ENDPOINT" in error
    error = error_of(tmp_path, nobody, "lab/tiny", HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in error
    assert "there is no folder lab/tiny" in error
    assert "folder" in resolve(tmp_path, served.url, "lab/tiny")[0]
    assert "folder" in resolve(tmp_path, nobody, "lab/tiny")[0], "all of it is in the cache"
    assert "(but of lab/tiny)" in error_of(tmp_path, nobody, "lab/tinny", HF_HUB_OFFLINE="1")


def test_a_disk_that_is_too_small_is_told(served: Hub, tmp_path: Path) -> None:
    small = "import shutil\nshutil.disk_usage = lambda path: type('U', (), {'total': 9, 'used': 0, 'free': 5000})()\n"
    done = run(tmp_path, served.url, "lab/tiny", code=small + RESOLVE)
    error = json.loads(done.stdout)["error"]
    assert error.startswith("lab/tiny needs 8.")
    assert "5000" not in error
    assert "set HF_HOME to a larger disk" in error
    assert not served.sent, "refused before anything is fetched"
    limited = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    done = run(tmp_path, served.url, "lab/tiny", code=limited + RESOLVE)
    error = json.loads(done.stdout.splitlines()[-1])["error"]
    assert "File too large" in error
    assert "set HF_HOME" in error


def test_a_tokenizer_of_another_repository_is_put_beside_trained_weights(
    served: Hub, published: Path, tmp_path: Path
) -> None:
    trained = Path(shutil.copytree(published, tmp_path / "trained"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (trained / name).unlink()
    config = json.loads((trained / "config.json").read_text())
    del config["worldkv_random_weights"]
    (trained / "config.json").write_text(json.dumps(config))
    write_word_tokenizer(tmp_path / "umt5")
    served.repositories |= {"lab/trained": trained, "google/umt5-xxl": tmp_path / "umt5"}
    done = run(tmp_path / "a", served.url, "inspect", "lab/trained")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tokenizer  in google/umt5-xxl" in done.stdout
    del served.repositories["google/umt5-xxl"]
    done = run(tmp_path / "b", served.url, "inspect", "lab/trained")
    assert "lab/trained needs google/umt5-xxl of google/umt5-xxl beside it" in done.stderr
    assert "tokenizer  none" in done.stdout


def test_where_the_library_is_not_installed_the_line_is_told(tmp_path: Path) -> None:
    absent = "import sys\nsys.modules['huggingface_hub'] = None\n"
    done = run(tmp_path, "http://127.0.0.1:9", "lab/tiny", code=absent + RESOLVE)
    error = json.loads(done.stdout)["error"]
    assert "pip install 'worldkv[hub]'" in error
    assert error.startswith("there is no folder lab/tiny")


def test_random_weights_need_no_tokenizer_of_others(tmp_path: Path) -> None:
    from worldkv.models.dreamzero.checkpoint import from_elsewhere

    assert from_elsewhere(random_checkpoint("i2v")) == {}

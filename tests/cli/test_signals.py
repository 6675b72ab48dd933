"""`worldkv serve` ends when it is told to, from its first moments on, as the first process of a container as well."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A checkpoint that is never read to its end: the process says where it is, and waits there.
WAITING = """
import sys, time
import worldkv.cli.main as cli
import worldkv.cli.serve_also as serve_also
def load(*arguments, **options):
    print("loading", flush=True)
    {waits}
serve_also.load_app_for = load
sys.exit(cli.main(["serve", "--checkpoint", ".", "--port", "0"]))
"""
SLEEPS = "time.sleep(60)"
SWALLOWS = """
    while True:
        try:
            time.sleep(60)
        except BaseException:
            print("swallowed", flush=True)
"""


def started(waits: str, *prefix: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", WAITING.format(waits=waits)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "loading\n"
    return process


def test_it_ends_at_once_while_it_loads() -> None:
    process = started(SLEEPS)
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said == "stopped by SIGTERM\n"
    assert time.monotonic() - start < 10


def test_a_second_signal_does_not_wait_for_what_swallowed_the_first() -> None:
    process = started(SWALLOWS)
    assert process.stdout is not None
    time.sleep(0.5)  # from its word to its first sleep
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "swallowed\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 143


def test_it_is_handled_before_anything_heavy_is_imported() -> None:
    told = (
        "import signal, sys; from worldkv.cli.signals import end_at_sigterm; end_at_sigterm(['serve']); "
        "assert callable(signal.getsignal(signal.SIGTERM)); "
        "assert not {'torch', 'numpy', 'argparse', 'uvicorn'} & set(sys.modules); "
        "import worldkv.cli.main; assert not {'torch', 'uvicorn'} & set(sys.modules)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "client")])
    subprocess.run([sys.executable, "-c", told], check=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, as root")
def test_it_ends_as_the_first_process_of_a_container() -> None:
    """There, the kernel drops what is not handled."""
    prefix = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    process = started(SLEEPS, *prefix)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 0
    assert said == "stopped by SIGTERM\n"

"""The files of deploy/: what they start exists, and systemd can read its own."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from worldkv.cli.main import build_parser
from worldkv.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def test_the_image_s_command_is_one_and_its_health_check_asks_where_it_answers() -> None:
    command = json.loads(re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)[-1])
    options = build_parser().parse_args(command)
    assert options.command == "serve"
    config = ServerConfig(host=options.host, port=options.port, health_port=options.health_port, api_key="k")
    assert f"EXPOSE {config.port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{config.health_port}/healthz" in DOCKERFILE
    assert re.search(r"^USER worldkv$", DOCKERFILE, re.MULTILINE), "it would run as root"


def test_the_image_copies_what_exists_and_is_not_ignored() -> None:
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    allowed = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert set(copied) == set(allowed)
    assert all((ROOT / name).exists() for name in copied)


def started() -> list[str]:
    unit = (DEPLOY / "worldkv.service").read_text().replace("\\\n", " ")
    found = re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    assert found is not None
    return found.group(1).split()


def test_the_unit_s_command_is_one() -> None:
    program, *words = started()
    assert program == "/opt/worldkv/bin/worldkv"
    assert words.pop() == "$OPTIONS"
    options = build_parser().parse_args(words)
    assert options.host == "::"
    assert str(options.tls_key).endswith("tls.key")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "worldkv.service"
    unit.write_text((DEPLOY / "worldkv.service").read_text().replace(started()[0], shutil.which("true") or "true"))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    assert "worldkv.service" not in said.stderr, said.stderr

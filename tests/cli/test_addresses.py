"""Every command that dials reads an address in one way; `test_doctor.py` has the addresses that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_address import REFUSED

from worldkv.cli.main import main

COMMANDS = {
    "top": ["top", "--once"],
    "doctor": ["doctor"],
    "film": ["film", "--session", "arm"],
    "sessions": ["sessions", "list"],
    "replay": ["replay", "--clip", "clip"],
    "bench": ["bench"],
}


@pytest.mark.parametrize("given", REFUSED, ids=[given[:20] for given in REFUSED])
def test_the_commands_refuse_the_same_addresses_with_the_same_words(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    said = {}
    for name, command in COMMANDS.items():
        code = main([*command, f"--url={given}"])
        said[name] = (code, capsys.readouterr().err)
    assert len(set(said.values())) == 1, said
    code, words = said["top"]
    assert code == 2
    assert re.search(REFUSED[given].replace("address: ", "--url: "), words)
    assert list(tmp_path.iterdir()) == [], "nothing is begun with a bad address"

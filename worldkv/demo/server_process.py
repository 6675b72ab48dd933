"""`worldkv serve` in a process of its own: started on a free port, watched until it is warm, always stopped."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from worldkv.errors import EngineStopped
from worldkv.server.logs import LISTENING
from worldkv_client.address import ServerAddress
from worldkv_client.dialling import Route

_READY_WITHIN_S = 180.0
_STOP_WITHIN_S = 15.0
_POLL_S = 0.1
_LAST_LINES = 8


class ServerProcess:
    """Use as a context manager. `options`: more of `worldkv serve`. Its output goes to `log`."""

    def __init__(self, checkpoint: Path, log: Path, options: Sequence[str] = ()) -> None:
        self._command = [sys.executable, "-m", "worldkv.cli.main", "serve", "--checkpoint", str(checkpoint)]
        self._command += ["--port", "0", *options]
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "not started"
        return self._process.poll()

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if name != "WORLDKV_API_KEY"}
        with self._log.open("wb") as file:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Until /healthz answers 200; sets `port`. Raises EngineStopped with the log's last lines if it ends first."""
        assert self._process is not None
        deadline = time.monotonic() + _READY_WITHIN_S
        while not self._is_ready():
            code = self._process.poll()
            if code is not None or time.monotonic() > deadline:
                how = f"ended with exit code {code}" if code is not None else f"was not ready in {_READY_WITHIN_S:g} s"
                lines = self._log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
                raise EngineStopped("\n  ".join([f"the server {how}; its last words in {self._log}:", *lines]))
            time.sleep(_POLL_S)

    def _is_ready(self) -> bool:
        if not self.port:
            said = re.search(rf"^{LISTENING}wss?://.*:(\d+) ", self._log.read_text(errors="replace"), re.MULTILINE)
            if said is None:
                return False
            self.port = int(said[1])
        try:
            return Route(ServerAddress("127.0.0.1", self.port)).http("/healthz", timeout=5)[0] == 200
        except OSError:
            return False

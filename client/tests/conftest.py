"""No proxy of this machine's surroundings comes between the tests; and one patch of PyPy 3.9.

There two threads that wait for a third may raise (pypy/pypy issue 5079, mended in later releases); a socket's thread is
waited for that way. PyPy only stands in for an old CPython here: the package has no such patch.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import threading

for variable in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[variable]

if platform.python_implementation() == "PyPy" and sys.version_info < (3, 11):
    wait_once = threading.Thread._wait_for_tstate_lock  # type: ignore[attr-defined]

    def wait(self: threading.Thread, block: bool = True, timeout: float = -1) -> None:
        for _ in range(100):
            with contextlib.suppress(RuntimeError, AssertionError):  # another thread has just done the same
                wait_once(self, block, timeout)
                return
        wait_once(self, block, timeout)

    threading.Thread._wait_for_tstate_lock = wait  # type: ignore[attr-defined]

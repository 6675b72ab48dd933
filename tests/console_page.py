"""What the browser tests of the console share: a server, robots, and questions about what is displayed."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from engines import droid_observation
from server_fakes import eventually, http_get

from worldkv.client import PolicyClient
from worldkv.robots.policy import Policy
from worldkv.server.server import PolicyServer, ServerConfig

PATIENCE_S = 20


@contextmanager
def serving(policy: Policy, **config: Any) -> Iterator[PolicyServer]:
    with PolicyServer(policy, ServerConfig(**{"port": 0} | config)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        yield server


@contextmanager
def robot(server: PolicyServer, name: str = "arm", pause_s: float = 0.15) -> Iterator[None]:
    """One that ticks all the time, from its first reply on."""
    stop, began = threading.Event(), threading.Event()

    def drive() -> None:
        with PolicyClient(port=server.port, session_id=name) as client:
            while not stop.wait(pause_s if began.is_set() else 0.0):
                client.infer(observation(int(began.is_set())))
                began.set()

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    assert began.wait(PATIENCE_S)
    try:
        yield
    finally:
        stop.set()
        thread.join(10)


def observation(tick: int) -> dict[str, Any]:
    return droid_observation(np.random.default_rng(tick), 1 if tick == 0 else 4)


def call(server: PolicyServer, method: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}/v1/{path}", data, headers, method=method)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def visit(browser: Any, server: PolicyServer, address: str = "#/") -> None:
    browser.get("about:blank")  # or another address after the # would not load the page anew
    browser.get(f"http://127.0.0.1:{server.port}/{address}")


def resize(browser: Any, width: int, height: int) -> None:
    """Of what is shown; a window cannot be as narrow as a telephone."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def theme(browser: Any, name: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": name}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def shown(browser: Any, selector: str = "body") -> str:
    """The text that is displayed there; "" where nothing is."""
    return "\n".join(displayed(browser, selector))


def wait_for(browser: Any, words: str, selector: str = "body") -> None:
    def there() -> bool:
        return words in shown(browser, selector)

    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline, (
            f"{words!r} is not displayed in {selector}: {shown(browser, selector)[:2000]}"
        )
        time.sleep(0.02)


def panel(name: str) -> str:
    return f"article[data-id='{name}']"


def row(name: str, column: str = "") -> str:
    return f"tr[data-id='{name}']" + (f" td[data-column='{column}']" if column else "")


def displayed(browser: Any, selector: str) -> list[str]:
    """The texts of what is displayed, from top to bottom."""
    script = (
        "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).map((e) => e.innerText)"
    )
    return [str(text) for text in browser.execute_script(script, selector)]


def click(browser: Any, words: str, within: str = "body") -> None:
    """The displayed button of that name, once it can be clicked."""

    def button() -> Any:
        found = [b for b in browser.find_elements("css selector", f"{within} button") if b.text == words]
        return found[0] if found and found[0].is_enabled() else None

    eventually(lambda: button() is not None, PATIENCE_S)
    button().click()


def press(browser: Any, keys: str) -> None:
    """To whatever has the focus."""
    from selenium.webdriver import ActionChains

    ActionChains(browser).send_keys(keys).perform()


def num_colours(browser: Any, selector: str) -> int:
    """How many different colours a canvas shows."""
    script = """const c = document.querySelector(arguments[0]); if (!c || !c.width) return 0;
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();
        for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) + (d[i + 1] << 8) + d[i + 2]); return s.size;"""
    return int(browser.execute_script(script, selector))


def image_of(browser: Any, selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).toDataURL()", selector))


def record_labels(browser: Any) -> Callable[[str], set[str]]:
    """From now on, what is written into canvases: a function from a canvas's label to the words in it."""
    browser.execute_script(
        """window.written = {}; const write = CanvasRenderingContext2D.prototype.fillText;
        CanvasRenderingContext2D.prototype.fillText = function (words, ...rest) {
          (window.written[this.canvas.getAttribute('aria-label')] ??= new Set()).add(words);
          return write.call(this, words, ...rest); };"""
    )
    script = "return [...(window.written[arguments[0]] ?? [])]"
    return lambda label: set(browser.execute_script(script, label))

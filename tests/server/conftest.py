"""Fixtures of the tests that look at the console in headless Chromium: one browser and one policy for all of them.

Without Chromium, chromedriver or selenium they are skipped, unless WORLDKV_REQUIRE_BROWSER=1 says that all are here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from worldkv.robots.policy import Policy
    from worldkv.server.server import PolicyServer


BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def _program(*names: str) -> str:
    """Where the first of them is; "" where none is."""
    return next((path for name in names if (path := shutil.which(name)) is not None), "")


def _missing() -> str | None:
    if importlib.util.find_spec("selenium") is None:
        return "selenium is not installed: pip install 'worldkv[browser]'"
    if not _program(*BROWSERS) or not _program("chromedriver"):
        return "Chromium or chromedriver is not here: apt-get install chromium chromium-driver"
    return None


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    missing = _missing()
    if missing is not None and os.environ.get("WORLDKV_REQUIRE_BROWSER") == "1":
        pytest.fail(f"WORLDKV_REQUIRE_BROWSER is set, but {missing}")
    if missing is not None:
        pytest.skip(missing)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = _program(*BROWSERS)
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(_program("chromedriver")))
    yield driver
    driver.quit()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """At its usual size, in the light theme, without a key; a page that logs an error fails its test."""
    from console_page import PATIENCE_S, resize, theme

    chromium.implicitly_wait(PATIENCE_S)  # a page that has just been opened has drawn nothing yet
    resize(chromium, 1280, 1400)
    theme(chromium, "light")
    yield chromium
    severe = [entry["message"] for entry in chromium.get_log("browser") if entry["level"] == "SEVERE"]
    chromium.get("about:blank")
    known = ("WebSocket", "ERR_CONNECTION")  # a server that went away
    unexpected = [text for text in severe if not any(words in text for words in known)]
    assert not unexpected, "the page logged errors"


@pytest.fixture(scope="session")
def console_policy() -> Iterator[Policy]:
    from engines import random_checkpoint

    from worldkv.engine.engine import EngineConfig
    from worldkv.load import load_policy

    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=6))
    yield policy
    policy.close()
    policy.engine.shutdown()


@pytest.fixture
def console_server(console_policy: Policy) -> Iterator[PolicyServer]:
    from console_page import serving

    with serving(console_policy) as server:
        yield server

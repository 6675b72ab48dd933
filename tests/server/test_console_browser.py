"""The console in headless Chromium, with a robot ticking; skipped where no Chromium or selenium is."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("fastapi")
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
if CHROMIUM is None or DRIVER is None:
    pytest.skip("no chromium and chromedriver here", allow_module_level=True)

from engines import random_checkpoint  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from server_fakes import eventually, http_get  # noqa: E402

from worldkv.client import PolicyClient  # noqa: E402
from worldkv.engine.engine import EngineConfig  # noqa: E402
from worldkv.load import load_policy  # noqa: E402
from worldkv.robots.policy import Policy  # noqa: E402
from worldkv.server.server import PolicyServer, ServerConfig  # noqa: E402
from worldkv.server.sessions import Entry  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1280,1400"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    severe = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    driver.quit()
    unexpected = [text for text in severe if "WebSocket" not in text and "ERR_CONNECTION" not in text]
    assert not unexpected, "the page logged errors"


@pytest.fixture(scope="module")
def policy() -> Iterator[Policy]:
    policy = load_policy(random_checkpoint("ti2v"), EngineConfig(block_size=16, max_sessions=6))
    yield policy
    policy.close()
    policy.engine.shutdown()


@pytest.fixture
def server(policy: Policy) -> Iterator[PolicyServer]:
    with PolicyServer(policy, ServerConfig(port=0)) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        yield server


@pytest.fixture
def robot(server: PolicyServer) -> Iterator[None]:
    """One that ticks all the time; a closed session does not stop it."""
    stop = threading.Event()

    def drive() -> None:
        rng = np.random.default_rng(0)
        with PolicyClient(port=server.port, session_id="arm") as client:
            number = 0
            while not stop.wait(0.15):
                frames = rng.integers(0, 256, (3, 1 if number == 0 else 4, 180, 320, 3), dtype=np.uint8)
                observation = {f"observation/exterior_image_{n}_left": frames[n] for n in (0, 1)}
                observation |= {"observation/wrist_image_left": frames[2], "prompt": "stack the cups"}
                observation |= {"observation/joint_position": np.zeros(7), "observation/gripper_position": np.zeros(1)}
                client.infer(observation)
                number += 1

    thread = threading.Thread(target=drive, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join(10)


def seen(browser: Any, text: str) -> Callable[[], bool]:
    return lambda: text in browser.find_element(By.TAG_NAME, "body").text


def click(browser: Any, words: str, number: int = 0) -> None:
    browser.find_elements(By.XPATH, f"//button[text()='{words}']")[number].click()


def pixels(browser: Any, selector: str) -> int:
    """How many different colours a canvas shows."""
    script = """const c = document.querySelector(arguments[0]); if (!c || !c.width) return 0;
        const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const s = new Set();
        for (let i = 0; i < d.length; i += 4) s.add((d[i] << 16) + (d[i + 1] << 8) + d[i + 2]); return s.size;"""
    return int(browser.execute_script(script, selector))


def test_from_the_overview_to_two_futures_side_by_side(browser: Any, server: PolicyServer, robot: None) -> None:
    browser.get(f"http://127.0.0.1:{server.port}/")
    eventually(seen(browser, "1 open"), 20)
    assert seen(browser, "random weights")()
    eventually(lambda: pixels(browser, "canvas[aria-label='blocks of the pool']") > 3, 20)
    first = int(browser.find_element(By.CSS_SELECTOR, "tr[data-id=arm] td:nth-child(8)").text)
    eventually(lambda: int(browser.find_element(By.CSS_SELECTOR, "tr[data-id=arm] td:nth-child(8)").text) > first, 20)
    browser.find_element(By.LINK_TEXT, "arm").click()
    eventually(seen(browser, "stack the cups"), 20)
    eventually(lambda: pixels(browser, "canvas[aria-label='wrist_image_left']") > 100, 20)
    eventually(lambda: pixels(browser, "canvas[aria-label='imagined video']") > 100, 20)
    assert pixels(browser, "canvas[aria-label='actions of the chunk']") > 2
    click(browser, "Fork")
    eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "article.session")) == 2, 20)
    eventually(seen(browser, "goes on from arm"), 20)
    click(browser, "Imagine", 1)
    eventually(lambda: pixels(browser, "article[data-id='arm-fork1'] canvas[aria-label='imagined video']") > 100, 20)
    click(browser, "Snapshot", 1)
    eventually(seen(browser, "a snapshot was taken"), 20)
    click(browser, "Park", 1)
    eventually(seen(browser, "parked ·"), 20)
    click(browser, "Imagine", 1)  # resumes
    eventually(seen(browser, "2 ticks"), 20)
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    eventually(seen(browser, "2 open"), 20)


def test_what_is_lost_is_asked_about_first(browser: Any, server: PolicyServer, robot: None) -> None:
    eventually(lambda: "arm" in server._service.app.engine.core.names, 20)
    browser.get(f"http://127.0.0.1:{server.port}/#/s/arm")
    eventually(seen(browser, "stack the cups"), 20)
    browser.find_element(By.TAG_NAME, "body").send_keys("r")
    eventually(seen(browser, "Reset arm?"), 10)
    click(browser, "Keep it")
    assert not seen(browser, "was reset")()
    click(browser, "Reset")
    click(browser, "Reset it")
    eventually(seen(browser, "was reset"), 20)


def test_a_server_that_goes_away_comes_back_by_itself(browser: Any, policy: Policy) -> None:
    with PolicyServer(policy, ServerConfig(port=0)) as first:
        port = first.port
        eventually(lambda: http_get(port, "/healthz")[0] == 200, 30)
        browser.get(f"http://127.0.0.1:{port}/")
        eventually(seen(browser, "No session is open"), 20)
    eventually(seen(browser, "The server does not answer"), 20)
    with PolicyServer(policy, ServerConfig(port=port)):
        eventually(seen(browser, "live"), 30)
        assert not seen(browser, "does not answer")()


def test_a_wrong_key_is_refused_and_the_right_one_opens(browser: Any, policy: Policy) -> None:
    with PolicyServer(policy, ServerConfig(port=0, api_key="right")) as server:
        eventually(lambda: http_get(server.port, "/healthz")[0] == 200, 30)
        browser.get(f"http://127.0.0.1:{server.port}/")
        for key, told in (("wrong", "not one of this server's"), ("right", "No session is open")):
            eventually(lambda: browser.find_element(By.ID, "key").is_displayed(), 20)
            browser.find_element(By.ID, "key").send_keys(key)
            click(browser, "Open")
            eventually(seen(browser, told), 20)


def test_it_fits_a_narrow_screen_and_shows_a_hundred_sessions(browser: Any, server: PolicyServer) -> None:
    table, session = server._service.sessions, server._service.app.open_session("one")
    for number in range(100):  # of one engine session: the page does not know
        table._entries[f"s{number}"] = Entry(f"s{number}", session, True, last_used=time.monotonic() + 1e9)
    browser.set_window_size(390, 844)
    try:
        browser.get(f"http://127.0.0.1:{server.port}/")
        eventually(lambda: len(browser.find_elements(By.CSS_SELECTOR, "tr[data-id]")) == 100, 30)
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert browser.execute_script(wide) <= 1, "the page scrolls sideways"
    finally:
        browser.set_window_size(1280, 1400)
        for number in range(100):
            del table._entries[f"s{number}"]
        session.close("done")

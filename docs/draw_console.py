"""Makes docs/img/console.png and console-session.png: a server with three drawn arms, seen through headless Chromium.

    python docs/draw_console.py      needs worldkv[all,browser], chromium and chromedriver

The weights are random, and the page says so.
"""

from __future__ import annotations

import base64
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import numpy as np
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from worldkv.client import PolicyClient
from worldkv.demo.synthetic import SyntheticArm
from worldkv.engine.engine import EngineConfig
from worldkv.load import load_policy
from worldkv.models.dreamzero.random import write_random_checkpoint
from worldkv.server.server import PolicyServer, ServerConfig

IMAGES = Path(__file__).parent / "img"
WIDTH = 1280
PATIENCE_S = 120


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)
    folder = Path(tempfile.mkdtemp()) / "random"
    write_random_checkpoint(folder, kind="ti2v", view_height=16, view_width=48, action_horizon=24)
    policy = load_policy(folder, EngineConfig(max_sessions=6, block_size=16))
    stop = threading.Event()
    with PolicyServer(policy, ServerConfig(port=0)) as server:
        robots = [threading.Thread(target=drive, args=(server.port, f"arm-{n}", stop)) for n in range(3)]
        for robot in robots:
            robot.start()
        browser = open_browser()
        try:
            browser.get(f"http://127.0.0.1:{server.port}/#/s/arm-0")
            until(browser, "tick 20,")
            browser.find_element(By.XPATH, "//button[text()='Fork']").click()
            until(browser, "goes on from arm-0")
            browser.get(f"http://127.0.0.1:{server.port}/#/s/arm-0")
            until(browser, "tick 45,")
            picture(browser, "console-session.png")
            browser.get(f"http://127.0.0.1:{server.port}/#/")
            time.sleep(60)  # for a chart of two minutes
            picture(browser, "console.png")
        finally:
            browser.quit()
            stop.set()
            for robot in robots:
                robot.join()
    policy.close()
    policy.engine.shutdown()


def drive(port: int, name: str, stop: threading.Event) -> None:
    arm = SyntheticArm()
    with PolicyClient(port=port, session_id=name) as client:
        while not stop.wait(0.6):
            arm.execute(np.array(client.infer(arm.observe())))


def open_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={WIDTH},1000",
    ):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    light = {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", light)
    return browser


def until(browser: webdriver.Chrome, words: str) -> None:
    body = lambda: browser.find_element(By.TAG_NAME, "body").text  # noqa: E731
    deadline = time.monotonic() + PATIENCE_S
    while words not in body():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{words!r} is not displayed: {body()}")
        time.sleep(0.1)


def picture(browser: webdriver.Chrome, name: str) -> None:
    """Of the whole page."""
    height = browser.execute_script("return Math.ceil(document.body.getBoundingClientRect().height)")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height, "scale": 1}
    size = {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    time.sleep(2)  # for charts of the new size
    png = browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})
    (IMAGES / name).write_bytes(base64.b64decode(png["data"]))


if __name__ == "__main__":
    main()

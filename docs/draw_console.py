"""Makes docs/img/console.png and console-session.png: a server with three drawn arms, seen through headless Chromium.

    python docs/draw_console.py      needs worldkv[all,browser], chromium and chromedriver

The weights are random, and the page says so.
"""

from __future__ import annotations

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


def main() -> None:
    warnings.simplefilter("ignore", UserWarning)
    folder = write_random_checkpoint(Path(tempfile.mkdtemp()) / "random", action_horizon=24)
    policy = load_policy(folder, EngineConfig(max_sessions=6, block_size=16))
    stop = threading.Event()
    with PolicyServer(policy, ServerConfig(port=0)) as server:
        robots = [threading.Thread(target=drive, args=(server.port, f"arm-{n}", stop)) for n in range(3)]
        for robot in robots:
            robot.start()
        browser = open_browser()
        try:
            browser.get(f"http://127.0.0.1:{server.port}/#/s/arm-0")
            time.sleep(12)
            browser.find_element(By.XPATH, "//button[text()='Fork']").click()
            time.sleep(3)
            browser.get(f"http://127.0.0.1:{server.port}/#/s/arm-0")
            time.sleep(6)
            picture(browser, "console-session.png", 1560)
            browser.get(f"http://127.0.0.1:{server.port}/#/")
            time.sleep(20)
            picture(browser, "console.png", 800)
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
        while not stop.wait(0.3):
            arm.execute(np.array(client.infer(arm.observe())))


def open_browser() -> webdriver.Chrome:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def picture(browser: webdriver.Chrome, name: str, height: int) -> None:
    browser.set_window_size(1280, height)
    time.sleep(2)
    browser.save_screenshot(str(IMAGES / name))


if __name__ == "__main__":
    main()

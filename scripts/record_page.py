"""Record the web page in a real browser: an animation of some fifteen seconds, docs/images/page.webp.

    python scripts/record_page.py [--out docs/images] [--model demo]

A server is started for it. What a person does is done by chromedriver; time in which the page computes is left out.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from vitreous.models.demo import TWO_PHOTO

ROOT = Path(__file__).parents[1]
SIZE = (1280, 800)
SHOWN = (960, 600)  # of the animation
PATIENCE = 240  # seconds
LARGEST = 3 * 2**20  # bytes of the animation
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"),
    *("--disable-component-update", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars"),
)
UPLOAD, PREDICTION, MAP = "#vitreous-upload input[type=file]", "#v-predictions button", "#v-stage canvas, #v-stage img"


@contextmanager
def served(model: str) -> Iterator[str]:
    """Run the page and give its address."""
    with tempfile.TemporaryFile("w+") as log:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "vitreous", "serve", "--model", model, "--port", str(port)]
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603
        try:
            for _ in range(PATIENCE * 2):
                log.seek(0)
                if found := re.search(r"the page is at (http://\S+)", log.read()):
                    yield found[1]
                    return
                if server.poll() is not None:
                    break
                time.sleep(0.5)
            log.seek(0)
            sys.exit(f"the page did not start: {log.read()}")
        finally:
            server.terminate()
            server.wait()


@contextmanager
def browser() -> Iterator[webdriver.Chrome]:
    """Run a browser with an empty profile."""
    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--window-size={SIZE[0]},{SIZE[1]}"):
        options.add_argument(flag)
    found = [shutil.which(name) for name in ("chromium", "chromedriver")]
    if None in found:
        sys.exit("chromium and chromedriver are needed to record the page")
    options.binary_location = str(found[0])
    driver = webdriver.Chrome(options=options, service=Service(str(found[1])))
    try:
        # The window is as high as asked for, without what a window has besides.
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False},
        )
        yield driver
    finally:
        driver.quit()


class Recorder:
    """What happens on the page, as pictures with durations."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.frames: list[tuple[Image.Image, int]] = []

    def take(self, seconds: float) -> None:
        """Keep what is shown, for some seconds of the animation."""
        picture = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
        self.frames.append((picture.resize(SHOWN, Image.Resampling.LANCZOS), round(1000 * seconds)))

    def until(self, happened: Callable[[], Any]) -> Any:
        """Wait without recording."""
        return WebDriverWait(self.driver, PATIENCE, 0.2).until(lambda _: happened())

    def all(self, selector: str) -> list[Any]:
        """Find elements."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def settled(self) -> None:
        """Wait until maps are there and nothing on the stage changes any more."""
        self.until(lambda: self.all(MAP))
        before, same = "", 0
        while same < 5:
            time.sleep(0.4)
            now = self.driver.execute_script("return document.querySelector('#v-stage').innerHTML")
            before, same = now, same + 1 if now == before else 0

    def save(self, file: Path) -> None:
        """Write the animation, smaller until it fits."""
        pictures, durations = [frame for frame, _ in self.frames], [duration for _, duration in self.frames]
        for quality in (80, 60, 40, 25):
            first, *others = pictures
            first.save(file, save_all=True, append_images=others, duration=durations, loop=0, quality=quality, method=6)
            if file.stat().st_size < LARGEST:
                break
        print(f"{file}: {len(pictures)} pictures, {sum(durations) / 1000:.0f} s, {file.stat().st_size / 2**20:.1f} MB")


def record(recorder: Recorder, address: str) -> None:
    """Do what a person does: open the page, drop a photo, add a class, look at the maps, enlarge one."""
    driver = recorder.driver
    driver.get(address)
    recorder.until(lambda: recorder.all(UPLOAD))
    recorder.settled()
    recorder.take(2)
    recorder.all(UPLOAD)[0].send_keys(str(TWO_PHOTO.resolve()))
    recorder.take(0.6)
    recorder.until(lambda: "Shiba" in driver.find_element(By.ID, "v-predictions").text)
    recorder.settled()
    recorder.take(2)
    wanted = [button for button in recorder.all(PREDICTION) if "Bengal" in button.text]
    if wanted:
        driver.execute_script("arguments[0].style.outline = '3px solid #e8590c'", wanted[0])
        recorder.take(1)
        wanted[0].click()
        recorder.until(lambda: "Bengal" in driver.find_element(By.ID, "v-stage").text)
        recorder.settled()
    recorder.take(3)
    maps = recorder.all(MAP)
    for right, down in ((-20, -60), (10, -30), (30, 0), (10, 40)):  # one cursor over all maps
        ActionChains(driver).move_to_element_with_offset(maps[1], right, down).perform()
        time.sleep(0.3)
        recorder.take(0.7)
    if len(maps) > 1:
        maps[1].click()
        time.sleep(1)
        recorder.take(2.5)


def main() -> None:
    """Record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--model", default="demo")
    arguments = parser.parse_args()
    with served(arguments.model) as address, browser() as driver:
        recorder = Recorder(driver)
        record(recorder, address)
    recorder.save(arguments.out / "page.webp")


if __name__ == "__main__":
    main()

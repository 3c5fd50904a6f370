"""Take the pictures of the page that the documentation shows, in a real browser.

Needs Chromium with its driver, the extras web, demo and demo-clip, and selenium.
"""

from __future__ import annotations

import argparse
import importlib
import io
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

import vitreous
from vitreous.auditing.report import write_reports

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"
_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--disable-dev-shm-usage"),
)
_PATIENCE = 180  # seconds
_MAPS = (
    "return Boolean(window.vitreous && window.vitreous.state.view) && !document.querySelector('#vitreous-stop:enabled')"
)
_TRUST = "return Boolean(document.querySelector('#v-trust .v-verdict'))"


@dataclass(frozen=True)
class Shot:
    """A picture of the page.

    Attributes:
        name: Of the file.
        size: Of the window.
        act: What is done before.
        dark: Whether in dark mode.
        phone: Whether as a phone.
    """

    name: str
    size: tuple[int, int]
    act: Callable[[Page], None]
    dark: bool = False
    phone: bool = False


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any, address: str) -> None:
        self._driver, self._address = driver, address

    def open(self) -> None:
        """Open the page and wait for its first maps."""
        self._driver.get(self._address)
        self.until(_MAPS)

    def run(self, script: str) -> None:
        """Run a script in the page."""
        self._driver.execute_script(script)

    def until(self, script: str) -> None:
        """Wait until a script returns true, and what it waits for is drawn."""
        deadline = time.monotonic() + _PATIENCE
        while not self._driver.execute_script(script):
            if time.monotonic() > deadline:
                raise TimeoutError(script)
            time.sleep(0.2)
        time.sleep(0.7)

    def tab(self, name: str) -> None:
        """Open a tab."""
        tabs = "[...document.querySelectorAll('#vitreous-tabs button[role=tab]')]"
        self.run(f"{tabs}.find((one) => one.textContent.trim() === '{name}').click()")

    def press(self, selector: str) -> None:
        """Press something, and wait until the answer is shown."""
        number = self._driver.execute_script("return window.vitreous.state.number")
        self.run(f"document.querySelector(`{selector}`).click()")
        self.until(f"return window.vitreous.state.number !== {number} && ({_MAPS.removeprefix('return ')})")


def opening(page: Page) -> None:
    """Show the opening example with trust."""
    page.until(_TRUST)


def contrast(page: Page) -> None:
    """Show a class and its contrast with another one by signed methods."""
    page.press("[data-preset=Signed]")
    page.press("#v-contrast")
    page.press(".v-row:nth-of-type(2) .v-remove")
    page.until(_TRUST)
    page.run("window.scrollTo(0, 0)")


def prompts(page: Page) -> None:
    """Show two prompts of the model of images and texts."""
    page.press("[data-example='2']")
    page.press("#v-use-clip")
    for text in ("a cat", "a cup of coffee"):
        page.run(f"document.querySelector('#v-prompt').value = '{text}'")
        page.press("#v-prompt-add")
    page.press(".v-remove")
    page.run("window.scrollTo(0, 0)")


def phone(page: Page) -> None:
    """Show the predictions and the first maps."""
    page.run("window.scrollTo(0, 330)")


def drawer(page: Page) -> None:
    """Show the drawer with the settings."""
    page.run("document.querySelector('.v-row .v-tile:nth-child(2)').scrollIntoView()")
    page.run("document.querySelector('#v-drawer-open').click()")
    page.until("return true")  # it comes up


def texts(page: Page) -> None:
    """Show an example of the text tab for both classes."""
    page.tab("Texts")
    page.run("document.querySelector('#vitreous-text-examples button').click()")
    page.until("return document.querySelectorAll('#vitreous-text-words figure').length >= 2")


def audit(page: Page) -> None:
    """Show the findings of an audit."""
    page.tab("Audit")
    page.until("return Boolean(document.querySelector('#vitreous-audit-shown article img'))")


SHOTS = (
    Shot("web", (1440, 1150), opening),
    Shot("web-contrast", (1440, 1150), contrast),
    Shot("web-prompts", (1440, 1000), prompts),
    Shot("web-texts", (1440, 900), texts),
    Shot("web-audit", (1440, 640), audit),
    Shot("web-wide-dark", (1920, 1080), opening, dark=True),
    Shot("web-phone", (390, 844), phone, phone=True),
    Shot("web-phone-dark", (390, 844), drawer, dark=True, phone=True),
)


def write_audit(folder: Path) -> Path:
    """Audit a model of the tests that is known to read a stamp in a corner, and return the folder."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    audited = importlib.import_module("audited")
    data = audited.Squares(90)
    data.path = Path("squares")
    found = vitreous.audit(audited.reader(), data, method="gae", out=folder, threads=1, photos=12)
    write_reports(found)
    return folder


@contextmanager
def served(audits: Path) -> Iterator[str]:
    """Run the page on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "vitreous",
        "serve",
        "--model",
        "demo",
        "--audit",
        str(audits),
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if "the page is at" in line)
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.terminate()


@contextmanager
def browser(shot: Shot) -> Iterator[Any]:
    """Start a browser with the window of a shot."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
        width, height = shot.size
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": shot.phone}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if shot.dark else "light"}]
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        try:
            yield driver
        finally:
            driver.quit()


def main() -> None:
    """Take all pictures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *(shot.name for shot in SHOTS)])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--png", action="store_true", help="write PNG files, to look at them closely")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as audits, served(write_audit(Path(audits))) as address:
        for shot in SHOTS:
            if arguments.names and shot.name not in arguments.names:
                continue
            with browser(shot) as driver:
                page = Page(driver, address)
                page.open()
                shot.act(page)
                picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
            file = arguments.folder / f"{shot.name}.{'png' if arguments.png else 'jpg'}"
            picture.save(file, quality=82, optimize=True)
            print(file, f"{file.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()

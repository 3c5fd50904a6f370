"""The page in a real browser: a person drops a photo, looks around, takes something home, makes mistakes, stops."""

import base64
import json
import os
import shutil
import time
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
webdriver = pytest.importorskip("selenium.webdriver", reason="the browser tests need selenium")

from selenium.common.exceptions import StaleElementReferenceException, WebDriverException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from running_server import running_server  # noqa: E402  # after what it needs is known to be there

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine"),
    pytest.mark.skipif(DRIVER is None, reason="there is no chromedriver on this machine"),
]

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-dev-shm-usage",
    "--window-size=1280,1000",
)
PATIENCE = 60  # seconds; a quiet machine needs one or two


class Page:
    """What a person sees of the page and does with it."""

    def __init__(self, driver, address):
        self.driver, self.address = driver, address

    def open(self):
        self.driver.get(self.address)
        self.until(lambda: self.all("#vitreous-upload input[type=file]"))

    def all(self, selector):
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def until(self, happened, seconds=PATIENCE):
        ignored = (StaleElementReferenceException,)
        return WebDriverWait(self.driver, seconds, 0.05, ignored_exceptions=ignored).until(lambda _: happened())

    def press(self, selector):
        element = self.one(selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def upload(self, file):
        if not self.all("#vitreous-upload input[type=file]"):
            self.press("#vitreous-upload button[aria-label='Clear'], #vitreous-upload button[title='Clear']")
            self.until(lambda: self.all("#vitreous-upload input[type=file]"))
        self.one("#vitreous-upload input[type=file]").send_keys(str(file))

    @property
    def status(self):
        return self.one("#vitreous-status").text

    @property
    def maps(self):
        return [image.get_attribute("src") for image in self.all("#vitreous-maps figure img")]

    def texts(self, selector):
        return [element.text for element in self.all(selector)]

    def tick(self, family, method):
        boxes = f"#vitreous-{family} label"
        if not any(box.is_displayed() for box in self.all(boxes)):
            self.press(f"#vitreous-family-{family} button")
            self.until(lambda: any(box.is_displayed() for box in self.all(boxes)))
        box = next(box for box in self.all(boxes) if box.text.startswith(f"{method} "))
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
        box.click()

    def slide(self, name, key, times=1):
        slider = self.one(f"#vitreous-{name} input[type=range]")
        for _ in range(times):
            slider.send_keys(key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def server(folder):
    with running_server(folder) as running:
        yield running


@pytest.fixture(scope="module")
def driver(folder):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    options.add_experimental_option("prefs", {"download.default_directory": str(folder / "downloads")})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    try:
        started = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    except WebDriverException as error:
        pytest.skip(f"the browser does not start here: {error.msg}")
    started.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder / "downloads")}
    )
    yield started
    started.quit()


@pytest.fixture(scope="module")
def photo_file(folder):
    rows, columns = np.mgrid[0:180, 0:240]
    pixels = np.stack([rows, columns, (rows * columns) % 255], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(folder / "leaf.png")
    return folder / "leaf.png"


@pytest.fixture(scope="module")
def opened(driver, server, photo_file):
    """The page with a photo and its first maps; the tests below go on from each other's state."""
    page = Page(driver, server.address)
    page.open()
    page.upload(photo_file)
    page.until(lambda: len(page.maps) == 3)
    return page


def test_upload_shows_predictions_and_maps(opened):
    opened.until(lambda: "Done" in opened.status)
    assert len(opened.all("#vitreous-predictions .bar")) == 5
    assert opened.texts("#vitreous-predictions .bars > span")[0].startswith("class ")
    assert opened.texts("#vitreous-maps figcaption") == ["gradtoken", "tokentm", "decompx.skipplus"]
    assert len(set(opened.maps)) == 3


def test_two_classes_and_three_methods(opened):
    box = opened.one("#vitreous-classes input")
    box.send_keys("class 123")
    opened.until(lambda: any("class 123" in text for text in opened.texts("ul[role=listbox] li, .options li")))
    box.send_keys(Keys.ENTER)
    opened.until(lambda: len(opened.maps) == 6)
    headings = opened.texts("#vitreous-maps h3")
    assert len(headings) == 2
    assert any("class 123 ·" in heading for heading in headings)
    box.send_keys(Keys.ESCAPE)


def test_sliders_change_the_picture_at_once(opened, server):
    before = opened.maps
    opened.slide("opacity", Keys.LEFT, 3)
    opened.until(lambda: opened.maps != before and len(opened.maps) == 6)
    opacity = opened.maps
    opened.slide("threshold", Keys.RIGHT, 12)
    opened.until(lambda: opened.maps != opacity)
    opened.until(lambda: "from memory" in opened.status)
    threshold = opened.maps
    opened.all("#vitreous-sign input[type=radio]")[2].click()
    opened.until(lambda: opened.maps != threshold)
    signed = opened.maps
    opened.one("#vitreous-smooth input").click()
    opened.until(lambda: opened.maps != signed)
    assert "from memory" in opened.status  # nothing was worked out again


def test_depth_slider(opened):
    before = opened.maps
    opened.slide("depth", Keys.LEFT, 2)
    opened.until(lambda: "tokentm:depth=4" in opened.texts("#vitreous-maps figcaption"))
    assert opened.maps != before
    opened.slide("depth", Keys.RIGHT, 2)
    opened.until(lambda: "tokentm" in opened.texts("#vitreous-maps figcaption"))
    assert "from memory" in opened.status


def test_methods_are_ticked_by_family(opened):
    opened.tick("gradient", "ixg")
    opened.until(lambda: len(opened.maps) == 8)
    assert "ixg" in opened.texts("#vitreous-maps figcaption")
    link = opened.one("#vitreous-family-gradient a")
    assert link.get_attribute("href").startswith("https://arxiv.org/abs/")
    opened.tick("gradient", "ixg")
    opened.until(lambda: len(opened.maps) == 6)


def test_pressed_patch_shows_what_it_draws_on(opened):
    opened.press("#vitreous-photo img")
    opened.until(lambda: len(opened.all("#vitreous-rows figure img")) == 2)
    heading = opened.one("#vitreous-rows h3").text
    assert "Block 5" in heading
    before = [image.get_attribute("src") for image in opened.all("#vitreous-rows figure img")]
    opened.slide("block", Keys.LEFT)
    opened.until(lambda: "Block 4" in opened.one("#vitreous-rows h3").text)
    assert before != [image.get_attribute("src") for image in opened.all("#vitreous-rows figure img")]
    row = opened.one("#vitreous-row input")
    row.send_keys(Keys.BACKSPACE * 3, "0")
    opened.press("#vitreous-look")
    opened.until(lambda: "row 0" in opened.one("#vitreous-rows h3").text)


def test_curves(opened):
    opened.press("#vitreous-measure")
    opened.until(lambda: len(opened.all("#vitreous-curves figure > svg")) == 4)  # deletion and insertion of two classes
    assert "Done" in opened.status


@pytest.mark.parametrize(("button", "kind"), [("png", "png"), ("npz", "npz"), ("report", "html")])
def test_download(opened, folder, button, kind):
    opened.press(f"#vitreous-{button}")
    place = folder / "downloads" / f"vitreous-leaf.{kind}"
    opened.until(place.is_file)
    content = place.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "npz": b"PK", "html": b"<!DOCTYPE html>"}[kind])


def test_wrong_file_types_are_refused_with_a_sentence(opened, folder):
    (folder / "letter.png").write_text("not a picture at all")
    opened.upload(folder / "letter.png")
    opened.until(lambda: "letter.png: this is not an image in a supported format" in opened.status)
    assert opened.all("#vitreous-status [role=alert]")
    (folder / "letter.txt").write_text("not a picture at all")
    opened.upload(folder / "letter.txt")
    opened.until(
        lambda: any("file type" in text.lower() for text in opened.texts(".toast-body, [data-testid=toast-body]"))
    )


def test_30_mb_are_refused_with_a_sentence(opened, folder):
    large = folder / "large.png"
    with large.open("wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n" + os.urandom(1024))
        file.truncate(30 * 2**20)
    opened.upload(large)
    opened.until(lambda: any("size" in text.lower() for text in opened.texts(".toast-body, [data-testid=toast-body]")))
    sentence = next(text for text in opened.texts(".toast-body, [data-testid=toast-body]") if "size" in text.lower())
    assert "20" in sentence
    assert "Traceback" not in opened.driver.page_source


def test_slow_work_tells_how_far_it_is_and_can_be_stopped(opened, photo_file):
    opened.open()
    opened.upload(photo_file)
    opened.until(lambda: len(opened.maps) == 3)
    box = opened.one("#vitreous-spelled textarea, #vitreous-spelled input")
    box.send_keys(Keys.END, ", rise:budget=200000", Keys.ENTER)
    opened.until(lambda: "images asked" in opened.status)
    opened.until(lambda: opened.one("#vitreous-stop").is_enabled())
    opened.press("#vitreous-stop")
    pressed = time.monotonic()
    opened.until(lambda: opened.status == "Stopped.")
    assert time.monotonic() - pressed < 20  # all of it would take minutes
    # The model is free again, and what was there before is there still.
    opened.slide("opacity", Keys.LEFT)
    opened.press("#vitreous-look")
    opened.until(lambda: len(opened.all("#vitreous-rows figure img")) == 2)


def test_example_and_second_visit(opened):
    opened.open()
    opened.press("#vitreous-examples button")
    opened.until(lambda: len(opened.maps) == 3)
    opened.open()
    opened.press("#vitreous-examples button")
    opened.until(lambda: len(opened.maps) == 3)
    assert "from memory" in opened.status


def test_keyboard_reaches_everything_that_counts(opened):
    opened.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    body = opened.one("body")
    for _ in range(60):
        (body if not reached else opened.driver.switch_to.active_element).send_keys(Keys.TAB)
        reached.add(
            opened.driver.execute_script(
                "const part = document.activeElement.closest('[id^=vitreous-]'); "
                "return part ? part.id : document.activeElement.tagName"
            )
        )
    wanted = {
        "opacity",
        "threshold",
        "depth",
        "sign",
        "smooth",
        "classes",
        "model",
        "spelled",
        "block",
        "look",
        "measure",
    }
    assert {f"vitreous-{name}" for name in wanted | {"png", "report"}} <= reached


def test_phone_width_needs_no_sideways_scrolling(opened):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened.until(lambda: opened.driver.execute_script("return window.innerWidth") == 390)
        width = opened.driver.execute_script("return document.documentElement.scrollWidth")
        assert width <= 390
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        tops = [opened.driver.execute_script(place, f"#vitreous-{name}") for name in ("maps", "choices", "more")]
        assert tops == sorted(tops)
    finally:
        opened.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_dark_mode_is_dark(opened):
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        opened.open()
        shot = base64.b64decode(opened.driver.get_screenshot_as_base64())
        (Path(opened.driver.capabilities["chrome"]["userDataDir"]) / "dark.png").write_bytes(shot)
        colour = opened.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        red, green, blue = (int(part) for part in colour.strip("rgba()").split(",")[:3])
        assert max(red, green, blue) < 60
    finally:
        opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_talks_to_nobody_else(opened):
    """Last: all requests of all tests above."""
    places = set()
    for entry in opened.driver.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.requestWillBeSent":
            address = urlparse(message["params"]["request"]["url"])
            places.add((address.scheme, address.netloc))
    outside = {place for place in places if place[0] not in {"data", "blob", "chrome", "about"}}
    assert outside == {("http", urlparse(opened.address).netloc)}
    errors = [entry["message"] for entry in opened.driver.get_log("browser") if entry["level"] == "SEVERE"]
    assert [error for error in errors if "Content Security Policy" in error] == []

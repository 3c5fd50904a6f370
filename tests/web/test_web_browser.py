"""The page in a real browser: a person drops a photo, looks around, takes something home, makes mistakes, stops."""

import base64
import json
import os
import re
import shutil
import time
from pathlib import Path
from urllib.parse import urlparse

import numpy as np
import pytest
from PIL import Image

pytest.importorskip("gradio", reason="the web page needs Gradio (extra vitreous[web])")
pytest.importorskip("transformers", reason="transformers is not installed")
webdriver = pytest.importorskip("selenium.webdriver", reason="the browser tests need selenium")

from selenium.common.exceptions import StaleElementReferenceException, WebDriverException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

from running_server import running_server  # noqa: E402  # after what it needs is known to be there
from small_text_models import LONGEST, save_classifier  # noqa: E402

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

    def open_tab(self, name):
        tab = next(tab for tab in self.all("#vitreous-tabs button[role=tab]") if tab.text == name)
        tab.click()

    def write(self, text):
        box = self.one("#vitreous-text textarea")
        box.clear()
        box.send_keys(text)
        self.press("#vitreous-text-explain")

    @property
    def text_status(self):
        return self.one("#vitreous-text-status").text

    def slide(self, name, key, times=1):
        slider = self.one(f"#vitreous-{name} input[type=range]")
        for _ in range(times):
            slider.send_keys(key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def server(folder):
    model = save_classifier(folder / "classifier", ("negative", "positive", "neither"))
    with running_server(folder, "--text-model", model, "--max-seconds", "600") as running:
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
    opened.until(lambda: "from cache" in opened.status)
    threshold = opened.maps
    opened.all("#vitreous-sign input[type=radio]")[2].click()
    opened.until(lambda: opened.maps != threshold)
    signed = opened.maps
    opened.one("#vitreous-smooth input").click()
    opened.until(lambda: opened.maps != signed)
    assert "from cache" in opened.status  # nothing was worked out again


def test_depth_slider(opened):
    before = opened.maps
    opened.slide("depth", Keys.LEFT, 2)
    opened.until(lambda: "tokentm:depth=4" in opened.texts("#vitreous-maps figcaption"))
    assert opened.maps != before
    opened.slide("depth", Keys.RIGHT, 2)
    opened.until(lambda: "tokentm" in opened.texts("#vitreous-maps figcaption"))
    assert "from cache" in opened.status


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
    box.send_keys(Keys.END, ", smoothgrad:samples=10000", Keys.ENTER)
    shown = "#vitreous-maps"
    opened.until(lambda: "/10k images" in opened.one(shown).text and "Running smoothgrad" in opened.one(shown).text)
    opened.until(lambda: re.search(r"about \d+ (s|min|h) left", opened.one(shown).text))
    opened.until(lambda: opened.one("#vitreous-stop").is_enabled())
    opened.press("#vitreous-stop")
    pressed = time.monotonic()
    opened.until(lambda: opened.status == "Stopped.")
    assert time.monotonic() - pressed < 20  # all of it would take minutes
    opened.until(lambda: "left" not in opened.one(shown).text)
    assert len(opened.maps) == 3
    # The model is free again, and what was there before is there still.
    opened.slide("opacity", Keys.LEFT)
    opened.press("#vitreous-look")
    opened.until(lambda: len(opened.all("#vitreous-rows figure img")) == 2)


def choose_model(page, prefix, name):
    box = page.one(f"#vitreous-{prefix}model input")
    page.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
    box.click()
    box.send_keys(Keys.CONTROL, "a")
    box.send_keys(name, Keys.ENTER)


def model_of(page, prefix=""):
    return page.one(f"#vitreous-{prefix}model input").get_attribute("value")


@pytest.mark.parametrize("name", ["timm/no_such_model", "py/no.py:model"])
def test_a_failed_model_change_puts_the_old_choice_back(opened, photo_file, name):
    opened.open()
    opened.upload(photo_file)
    opened.until(lambda: len(opened.maps) == 3)
    before, maps = model_of(opened), opened.maps
    choose_model(opened, "", name)
    opened.until(lambda: opened.all("#vitreous-status [role=alert]"))
    opened.until(lambda: model_of(opened) == before)
    message = opened.status
    toast = ".toast-body, [data-testid=toast-body]"  # also where the page is scrolled down
    opened.until(lambda: any(message in text for text in opened.texts(toast)))
    time.sleep(1)  # the choice that is put back is a change as well, which must not hide the error
    assert opened.all("#vitreous-status [role=alert]")
    assert opened.maps == maps


def test_example_and_second_visit(opened):
    opened.open()
    opened.press("#vitreous-examples button")
    opened.until(lambda: len(opened.maps) == 3)
    opened.open()
    opened.press("#vitreous-examples button")
    opened.until(lambda: len(opened.maps) == 3)
    assert "from cache" in opened.status


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


@pytest.fixture(scope="module")
def texts(driver, server):
    """The text tab with a text and its words; the tests below go on from each other's state."""
    page = Page(driver, server.address)
    page.open()
    page.open_tab("Texts")
    page.until(lambda: page.one("#vitreous-text textarea").is_displayed())
    page.press("#vitreous-text-explain")
    page.until(lambda: page.text_status == "Write or paste a text first.")
    page.write("not a good film, unbelievably bad")
    page.until(lambda: len(page.all("#vitreous-text-words figure")) == 2)
    return page


def test_words_have_signed_colours_and_tell_their_scores(texts):
    texts.until(lambda: "Done" in texts.text_status)
    assert set(texts.texts("#vitreous-text-words h3")) == {"decompx", "gae"}
    assert len(texts.all("#vitreous-text-predictions .bar")) == 3
    words = texts.all("#vitreous-text-words figure p span")
    assert [word.text for word in words] == 2 * ["not", "a", "good", "film,", "unbelievably", "bad"]
    scores = [float(word.get_attribute("title")) for word in words]
    colours = [word.value_of_css_property("background-color") for word in words]
    signed = scores[len(scores) // 2 :]  # decomposition comes behind attention
    assert min(signed) < 0 < max(signed)
    strongest = max(range(len(signed)), key=lambda number: abs(signed[number]))
    expected = "226, 74, 51" if signed[strongest] > 0 else "52, 120, 214"
    assert expected in colours[len(scores) // 2 + strongest].replace("rgba(", "rgb(")
    assert "against it" in texts.one("#vitreous-text-words").text
    assert len(texts.all("#vitreous-text-words .vitreous-strongest")) == 2


def test_two_classes_of_a_text_side_by_side(texts):
    box = texts.one("#vitreous-text-classes input")
    for name in ("positive", "neither"):
        box.send_keys(name)
        texts.until(lambda name=name: any(name in text for text in texts.texts("ul[role=listbox] li, .options li")))
        box.send_keys(Keys.ENTER)
        texts.until(lambda name=name: any(name in text for text in texts.texts("#vitreous-text-words figcaption")))
    box.send_keys(Keys.ESCAPE)
    texts.until(lambda: len(texts.all("#vitreous-text-words figure")) == 4)
    first, second = (figure.rect for figure in texts.all("#vitreous-text-words figure")[:2])
    assert first["y"] == second["y"]
    assert first["x"] + first["width"] < second["x"]


def test_sum_of_pieces_needs_no_run(texts):
    before = texts.one("#vitreous-text-words").text
    texts.all("#vitreous-text-by input[type=radio]")[1].click()
    texts.until(lambda: texts.one("#vitreous-text-words").text != before)
    assert "from cache" in texts.text_status


def test_long_texts_are_cut_with_a_note_or_explained_in_windows(texts):
    texts.write("good film " * 30)
    texts.until(lambda: f"reads the first {LONGEST - 2}" in texts.one("#vitreous-text-words").text)
    texts.all("#vitreous-text-long input[type=radio]")[1].click()
    texts.until(lambda: "reads the first" not in texts.one("#vitreous-text-words").text)
    assert len(texts.all("#vitreous-text-words figure p span")) == 4 * 60


def test_texts_that_cannot_be_explained_get_a_sentence(texts):
    texts.write("[CLS] [SEP]")
    texts.until(lambda: "holds nothing but special tokens" in texts.text_status)
    assert texts.all("#vitreous-text-status [role=alert]")
    box = texts.one("#vitreous-text textarea")
    texts.driver.execute_script(
        "arguments[0].value = 'x '.repeat(20000); arguments[0].dispatchEvent(new Event('input', {bubbles: true}))", box
    )
    texts.press("#vitreous-text-explain")
    texts.until(lambda: "the limit is 20,000" in texts.text_status)


def test_a_failed_change_of_the_text_model_puts_the_old_choice_back(texts):
    before = model_of(texts, "text-")
    choose_model(texts, "text-", "hf/..")
    texts.until(lambda: "does not load checkpoints from that path" in texts.text_status)
    texts.until(lambda: model_of(texts, "text-") == before)


def test_the_page_of_a_text_is_downloaded(texts, folder):
    texts.press("#vitreous-text-examples button")
    texts.until(lambda: "wonderful" in texts.one("#vitreous-text-words").text and "Done" in texts.text_status)
    texts.press("#vitreous-text-save")
    place = folder / "downloads" / "vitreous-text.html"
    texts.until(place.is_file)
    assert "wonderful</span>" in place.read_text(encoding="utf-8")


def test_text_tab_on_a_phone_needs_no_sideways_scrolling(texts):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    texts.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        texts.until(lambda: texts.driver.execute_script("return window.innerWidth") == 390)
        assert texts.driver.execute_script("return document.documentElement.scrollWidth") <= 390
    finally:
        texts.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


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

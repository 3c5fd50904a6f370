"""The page in a real browser: a person drops a photo, looks around, takes something home, makes mistakes, stops."""

import base64
import itertools
import json
import os
import re
import shutil
import time
import tomllib
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

import vitreous  # noqa: E402  # after what it needs is known to be there
from audited import Squares, reader  # noqa: E402
from running_server import running_server  # noqa: E402
from small_text_models import LONGEST, save_classifier  # noqa: E402
from vitreous.auditing.report import write_reports  # noqa: E402

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
ROOT = Path(__file__).parents[2]
PATIENCE = 120  # seconds; a quiet machine needs one or two


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
        return WebDriverWait(self.driver, seconds, 0.1, ignored_exceptions=ignored).until(lambda _: happened())

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
    def view(self):
        """Questions and methods of the maps that are shown, and the photo's name."""
        return self.driver.execute_script(
            "const view = window.vitreous && window.vitreous.state.view; if (!view) return null; "
            "return {photo: view.photo.name, number: view.number, questions: view.questions.map((one) => one.title), "
            "methods: view.methods.map((one) => one.shown)}"
        )

    @property
    def maps(self):
        """What is drawn on the tiles of the maps, without the photo."""
        return self.driver.execute_script(
            "return [...document.querySelectorAll('.v-tile:not(.v-photo) canvas')].map((one) => one.toDataURL())"
        )

    def texts(self, selector):
        return [element.text for element in self.all(selector)]

    def pick(self, method):
        """Choose a method in the picker, or write a recipe."""
        box = self.one("#v-method-search")
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", box)
        box.clear()
        box.send_keys(method, Keys.ENTER)

    def shows(self, *, rows=None, methods=None, photo=None):
        view = self.view
        return (
            view is not None
            and (rows is None or len(view["questions"]) == rows)
            and (methods is None or list(methods) == view["methods"])
            and (photo is None or view["photo"] == photo)
        )

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

    def expand(self, name):
        """Open a part of the page that is closed at first."""
        if not self.one(f"#vitreous-{name}-box button").get_attribute("class").split().count("open"):
            self.press(f"#vitreous-{name}-box button")

    def slide(self, name, key, times=1):
        slider = self.one(f"#vitreous-{name} input[type=range]")
        for _ in range(times):
            slider.send_keys(key)

    def set_slider(self, name, value):
        """Move a slider of the page's own scripts."""
        script = "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('input'));"
        self.driver.execute_script(script, self.one(f"#v-{name}"), value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("browser")


@pytest.fixture(scope="module")
def server(folder):
    model = save_classifier(folder / "classifier", ("negative", "positive", "neither"))
    found = vitreous.audit(reader(), Squares(45), method="gae", out=folder / "audits", threads=1, photos=6)
    write_reports(found, examples=2)
    options = ("--text-model", model, "--audit", str(folder / "audits"), "--max-seconds", "600")
    with running_server(folder, *options) as running:
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


METHODS = ["twoscale", "tokentm", "decompx.skipplus"]
CHIPS = [f"{method}\N{MULTIPLICATION SIGN}" for method in METHODS]


@pytest.fixture(scope="module")
def opened(driver, server, photo_file):
    """The page with a photo and its first maps; the tests below go on from each other's state."""
    page = Page(driver, server.address)
    page.open()
    page.until(lambda: page.shows(rows=2, photo="cat-and-dog.jpg"))  # it opens with an example and two classes
    page.upload(photo_file)
    page.until(lambda: page.shows(rows=1, methods=METHODS, photo="leaf.png"))
    return page


def test_upload_shows_predictions_and_maps(opened):
    opened.until(lambda: "Done" in opened.status)
    bars = opened.all("#v-predictions .v-bar")
    assert len(bars) == 5
    shares = [float(bar.find_element(By.CSS_SELECTOR, ".v-number").text.rstrip("%")) for bar in bars]
    assert shares == sorted(shares, reverse=True)
    assert bars[0].text.startswith("class ")
    assert "1,000 classes" in opened.one("#v-head").text
    assert "No class fits" in opened.one("#v-head .v-warning").text  # a random model
    assert len(set(opened.maps)) == 3


def test_a_click_on_a_bar_adds_a_class_and_another_removes_it(opened):
    opened.press("#v-predictions .v-bar:nth-of-type(2)")
    opened.until(lambda: opened.shows(rows=2))
    assert len(opened.maps) == 6
    assert len(opened.all("#v-predictions .v-bar[aria-pressed=true]")) == 2
    opened.press("#v-predictions .v-bar:nth-of-type(2)")
    opened.until(lambda: opened.shows(rows=1))
    box = opened.one("#v-class-search")
    box.send_keys("class 123", Keys.ENTER)
    opened.until(lambda: opened.shows(rows=2))
    assert opened.view["questions"][1] == "Why class 123?"


def test_a_contrast_of_two_classes_takes_two_clicks(opened):
    opened.press("#vitreous-upload button[aria-label='Clear'], #v-examples [data-example='1']")
    opened.press("#v-examples [data-example='1']")
    opened.until(lambda: opened.shows(rows=1, photo="cat.jpg"))
    opened.press("#v-contrast")
    opened.until(lambda: opened.shows(rows=2))
    assert "rather than" in opened.view["questions"][1]
    assert "logits differ by" in opened.texts(".v-value")[1]
    opened.press(".v-row:nth-of-type(2) .v-remove")
    opened.until(lambda: opened.shows(rows=1))


def test_display_settings_redraw_at_once_and_ask_nobody(opened):
    number = opened.view["number"]
    seen = [opened.maps]
    for name, value in (("opacity", 0.3), ("threshold", 0.4), ("wipe", 0.5)):
        opened.set_slider(name, value)
        seen.append(opened.maps)  # no waiting
    opened.one("#v-smooth").click()
    seen.append(opened.maps)
    for before, after in itertools.pairwise(seen):
        assert all(one != other for one, other in zip(before, after, strict=True))
    for name, value in (("opacity", 0.85), ("threshold", 0), ("wipe", 0)):
        opened.set_slider(name, value)
    opened.one("#v-smooth").click()
    assert opened.maps == seen[0]
    assert opened.view["number"] == number


def test_against_greys_methods_without_a_negative_side_and_says_so(opened):
    opened.one("#v-sign input[value=against]").find_element(By.XPATH, "..").click()
    assert opened.texts(".v-silent")[1:3] == ["This method has no negative side."] * 2
    assert len(opened.all(".v-canvas.v-grey")) >= 2
    # A negative side that is too weak to be seen is told as well: the third map with its lowest score made small.
    ends = "const map = window.vitreous.state.view.maps[0][2]; const was = [map.low, map.high]; "
    change = ends + "[map.low, map.high] = arguments[0]; return was"
    before = opened.driver.execute_script(change, [-0.5, 1])
    for low, told in ((-0.5, ""), (-0.04, "Hardly anything speaks against: at most 4% of what speaks for.")):
        opened.driver.execute_script(change, [low, 1])
        opened.set_slider("opacity", 0.85)  # draws again
        assert opened.texts(".v-silent")[3] == told
    opened.driver.execute_script(change, before)
    opened.one("#v-sign input[value=both]").find_element(By.XPATH, "..").click()
    assert opened.all(".v-canvas.v-grey") == []


def test_one_cursor_over_all_maps(opened):
    from selenium.webdriver import ActionChains

    tile = opened.all(".v-tile:not(.v-photo) .v-canvas")[0]
    opened.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", tile)
    ActionChains(opened.driver).move_to_element_with_offset(tile, 5, 5).perform()
    opened.until(lambda: all("row 5, column 5" in text for text in opened.texts(".v-tile:not(.v-photo) .v-score")))
    assert len({text.split(" ")[0] for text in opened.texts(".v-tile:not(.v-photo) .v-score")}) == 3
    assert all(cross.is_displayed() for cross in opened.all(".v-cross"))


def test_a_click_enlarges_a_map(opened):
    tile = opened.all(".v-tile:not(.v-photo) .v-canvas")[0]
    width = tile.size["width"]
    tile.click()
    opened.until(lambda: opened.all("#v-large[open] canvas"))
    large = opened.one("#v-large canvas")
    assert large.size["width"] > 1.5 * width
    before = opened.driver.execute_script("return arguments[0].toDataURL()", large)
    opened.set_slider("large-wipe", 0.5)
    assert opened.driver.execute_script("return arguments[0].toDataURL()", large) != before
    opened.set_slider("large-wipe", 0)
    assert opened.one("#v-large a").get_attribute("href").startswith("https://")
    opened.one("#v-large footer button:last-child").click()
    opened.until(lambda: "tokentm" in opened.one("#v-large h3").text)
    opened.one("#v-large h3").find_element(By.XPATH, "/html/body").send_keys(Keys.ESCAPE)
    opened.until(lambda: not opened.all("#v-large"))


def test_methods_are_searched_picked_and_preset(opened):
    box = opened.one("#v-method-search")
    box.send_keys("abnar")
    assert [row.get_attribute("data-method") for row in opened.all(".v-method[data-method]")] == ["rollout"]
    assert "same for every class" in opened.one(".v-method").text
    opened.press(".v-method")
    opened.until(lambda: opened.shows(methods=[*METHODS, "rollout"]))
    assert "same for every class" in opened.texts(".v-tile figcaption")[4]
    opened.pick("decompx.skipplus.propagate")
    opened.until(lambda: opened.shows(methods=[*METHODS, "rollout", "decompx.skipplus.propagate"]))
    opened.press(".v-chip[aria-label='Remove rollout']")
    opened.until(lambda: opened.shows(methods=[*METHODS, "decompx.skipplus.propagate"]))
    opened.press("[data-preset='The papers']")
    opened.until(lambda: opened.shows(methods=["tokentm", "gradtoken", "decompx.skipplus"]))
    opened.press("[data-preset=Recommended]")
    opened.until(lambda: opened.shows(methods=METHODS))


def test_a_recipe_that_is_none_is_refused_and_taken_back(opened):
    opened.pick("nonsense:rule=none")
    opened.until(lambda: opened.all("#vitreous-status [role=alert]"))
    assert "no method 'nonsense'" in opened.status
    opened.until(lambda: opened.texts(".v-chip") == CHIPS)


def test_depth_slider(opened):
    opened.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", opened.one("#v-depth"))
    opened.set_slider("depth", 4)
    opened.driver.execute_script("document.querySelector('#v-depth').dispatchEvent(new Event('change'))")
    opened.until(lambda: "tokentm:depth=4" in opened.view["methods"])
    opened.set_slider("depth", 6)
    opened.driver.execute_script("document.querySelector('#v-depth').dispatchEvent(new Event('change'))")
    opened.until(lambda: "tokentm" in opened.view["methods"])


def test_a_second_photo_is_compared(opened, photo_file):
    opened.expand("second")
    opened.until(lambda: opened.all("#vitreous-second input[type=file]"))
    opened.one("#vitreous-second input[type=file]").send_keys(str(photo_file))
    opened.until(lambda: "Why similar to leaf.png?" in opened.view["questions"])
    assert "cosine" in opened.texts(".v-value")[1]
    opened.press(".v-row:nth-of-type(2) .v-remove")
    opened.until(lambda: opened.shows(rows=1))


def test_trust_is_measured_on_demand(opened):
    opened.press("#v-trust-run")
    opened.until(lambda: opened.all("#v-trust .v-verdict"))
    assert opened.one("#v-trust .v-verdict").text in ("good", "fair", "poor")
    assert "random orders" in opened.one("#v-trust p").text
    assert "Random orders beaten" in opened.one("#v-trust").text
    # What was measured comes with the next maps.
    opened.press("#v-predictions .v-bar:nth-of-type(2)")
    opened.until(lambda: opened.shows(rows=2))
    assert opened.all("#v-trust .v-verdict")
    opened.press("#v-predictions .v-bar:nth-of-type(2)")
    opened.until(lambda: opened.shows(rows=1))


def test_pressed_patch_shows_what_it_draws_on(opened):
    opened.expand("patch")
    opened.until(lambda: opened.one("#vitreous-photo img").is_displayed())
    opened.press("#vitreous-photo img")
    opened.until(lambda: len(opened.all("#vitreous-rows figure img")) == 2)
    assert "Block 5" in opened.one("#vitreous-rows h3").text
    before = [image.get_attribute("src") for image in opened.all("#vitreous-rows figure img")]
    opened.slide("block", Keys.LEFT)
    opened.until(lambda: "Block 4" in opened.one("#vitreous-rows h3").text)
    assert before != [image.get_attribute("src") for image in opened.all("#vitreous-rows figure img")]


def test_curves(opened):
    opened.expand("curves")
    opened.until(lambda: opened.one("#vitreous-measure").is_displayed())
    opened.press("#vitreous-measure")
    opened.until(lambda: len(opened.all("#vitreous-curves figure > svg")) == 2)
    assert "Done" in opened.status


@pytest.mark.parametrize(("button", "kind"), [("png", "png"), ("npz", "npz"), ("report", "html")])
def test_download(opened, folder, button, kind):
    opened.press(f"#vitreous-{button}")
    place = folder / "downloads" / f"vitreous-cat.{kind}"
    opened.until(place.is_file)
    content = place.read_bytes()
    assert content.startswith({"png": b"\x89PNG", "npz": b"PK", "html": b"<!DOCTYPE html>"}[kind])


def test_wrong_file_types_are_refused_with_a_sentence(opened, folder):
    (folder / "letter.png").write_text("not a picture at all")
    opened.upload(folder / "letter.png")
    opened.until(lambda: "letter.png: this is not an image in a supported format" in opened.status)
    assert opened.all("#vitreous-status [role=alert]")
    opened.until(lambda: "letter.png" not in opened.one("#vitreous-upload").text)  # the old maps are shown, not it
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
    opened.until(lambda: opened.shows(rows=1, photo="leaf.png"))
    opened.pick("smoothgrad:samples=10000")
    opened.until(lambda: re.search(r"Running smoothgrad.* of 10,000 images", opened.status))
    opened.until(lambda: re.search(r"about \d+ (s|min|h) left", opened.status))
    assert opened.all("#vitreous-status progress")
    opened.until(lambda: opened.one("#vitreous-stop").is_enabled())
    opened.press("#vitreous-stop")
    pressed = time.monotonic()
    opened.until(lambda: opened.status == "Stopped.")
    assert time.monotonic() - pressed < 20  # all of it would take minutes
    assert len(opened.maps) == 3
    # The model is free again, and the choice is that of the maps.
    opened.until(lambda: opened.texts(".v-chip") == CHIPS)
    opened.press("#v-predictions .v-bar:nth-of-type(2)")
    opened.until(lambda: opened.shows(rows=2))


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
    opened.until(lambda: opened.shows(photo="leaf.png"))
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


def test_a_second_visit_is_shown_from_the_cache(opened):
    opened.open()
    opened.until(lambda: opened.shows(rows=2, photo="cat-and-dog.jpg"))
    opened.until(lambda: "from cache" in opened.status)
    assert "Stefan van der Walt, CC0" in opened.one(".v-legend").text


def test_without_a_text_tower_prompts_name_the_model_that_has_one(opened):
    assert opened.one("#v-use-clip").text == "switch to demo-clip"


def test_keyboard_reaches_everything_that_counts(opened):
    opened.driver.execute_script("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    body = opened.one("body")
    for _ in range(40):
        (body if not reached else opened.driver.switch_to.active_element).send_keys(Keys.TAB)
        reached.add(
            opened.driver.execute_script(
                "const one = document.activeElement; return one.id || one.className || one.tagName"
            )
        )
    assert {
        "v-class-search",
        "v-contrast-a",
        "v-contrast",
        "v-method-search",
        "v-bar",
        "v-example",
        "v-chip",
    } <= reached
    script = "return [...document.querySelectorAll(arguments[0])].every((one) => one.tabIndex >= 0)"
    for selector in ("#v-toolbar input", ".v-canvas", ".v-method", "#v-trust button"):
        assert opened.driver.execute_script(script, selector)


def test_on_a_phone_maps_follow_the_predictions_and_settings_are_in_a_drawer(opened):
    size = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    opened.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened.until(lambda: opened.driver.execute_script("return window.innerWidth") == 390)
        assert opened.driver.execute_script("return document.documentElement.scrollWidth") <= 390
        place = "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        tops = [opened.driver.execute_script(place, name) for name in ("#v-predictions", "#v-stage", "#v-trust")]
        assert tops == sorted(tops)
        tiles = (".v-tile:not(.v-photo)", ".v-tile.v-photo")
        assert opened.driver.execute_script(place, tiles[0]) < opened.driver.execute_script(place, tiles[1])
        opened.until(lambda: opened.one(".v-tile:not(.v-photo) canvas").size["width"] > 350)
        opened.until(lambda: not opened.one("#v-picker").is_displayed())  # the drawer slides
        opened.driver.execute_script("document.querySelector('#v-drawer-open').click()")
        opened.until(lambda: opened.one("#v-picker").is_displayed())
        opened.driver.execute_script("document.querySelector('#v-drawer-open').click()")
        opened.until(lambda: not opened.one("#v-picker").is_displayed())
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


def test_an_audit_is_browsed_by_list_and_class_and_its_report_opens(texts):
    texts.open_tab("Audit")
    texts.until(lambda: len(texts.all("#vitreous-audit-shown article img")) == 2)
    assert "lower-left corner" in texts.one("#vitreous-audit-shown article h3").text
    texts.press("#vitreous-audit-list label:nth-of-type(4) input")  # not confirmed
    texts.until(lambda: "Findings" not in texts.texts("#vitreous-audit-list label.selected"))
    texts.until(lambda: len(texts.all("#vitreous-audit-shown article")) > 1)
    every = len(texts.all("#vitreous-audit-shown article"))
    box = texts.one("#vitreous-audit-class input")
    box.click()
    box.send_keys(Keys.CONTROL + "a")
    box.send_keys("left", Keys.ENTER)
    texts.until(lambda: 0 < len(texts.all("#vitreous-audit-shown article")) < every)
    assert all(text.split(". ")[1].startswith("left") for text in texts.texts("#vitreous-audit-shown article h3"))
    link = texts.one("#vitreous-audit-shown a").get_attribute("href")
    script = "const answer = await fetch(arguments[0]); return (await answer.text()).includes('Audit of reader')"
    assert texts.driver.execute_script(f"return (async (...arguments) => {{ {script} }})(...arguments)", link)


def test_katex_takes_every_formula_of_the_documentation(texts):
    assets = ROOT / "docs" / "assets" / "katex"
    texts.driver.execute_script((assets / "katex.min.js").read_text("utf-8"))
    formulas = tomllib.loads((ROOT / "scripts" / "formulas.toml").read_text("utf-8"))
    assert len(formulas) > 50
    broken = texts.driver.execute_script(
        "return Object.entries(arguments[0]).flatMap(([name, text]) => { try { window.katex.renderToString(text, "
        "{displayMode: true}); return [] } catch (error) { return [`${name}: ${error.message}`] } })",
        formulas,
    )
    assert broken == []


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

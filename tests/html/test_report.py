"""The report: complete, self-contained, safe against hostile names, and written whole or not at all."""

import json
import re
import sys
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from golden_figures import POSITIVE, SIGNED, explanation, photo
from vitreous._utils.storage import StorageError
from vitreous.cli import app, explain_images
from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation
from vitreous.html import page
from vitreous.html.page import Line, line_chart, percent_axis
from vitreous.html.report import meaning, photo_section, report_file

SMALL = ("--model", "timm/test_vit@random", "--image-size", "64x48")
HOSTILE = "<img src=x onerror=alert(1)>&\"'.png"
VOID = {"meta", "link", "img", "br", "line", "path", "polyline"}


class Checker(HTMLParser):
    """Collects elements, attributes and text, and fails where elements are not closed in order."""

    def __init__(self):
        super().__init__()
        self.open, self.elements, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def check(html):
    """Parse a page and fail where it is not well-formed or would fetch or run anything."""
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert not checker.open
    for tag, attributes in checker.elements:
        assert tag not in {"script", "iframe", "object", "embed", "form", "base"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(name, "data:").startswith(("data:", "#"))
    assert "url(" not in html
    assert "@import" not in html
    return checker


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    for seed, name in enumerate(("cat.png", HOSTILE)):
        pixels = np.random.default_rng(seed).integers(0, 256, (90, 120, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    (folder / "broken<b>.jpg").write_text("this is not a photo")
    return folder


class TestCommand:
    def test_a_folder_becomes_one_page(self, photos, tmp_path):
        file = tmp_path / "new" / "report.html"
        result = run(
            "explain", photos, *SMALL, "--out", tmp_path / "out", "--report", file, "--method", "tokentm,ixg.plus"
        )
        assert result.exit_code == 1  # one photo is broken
        assert f"report:    {file}" in result.stdout
        html = file.read_text(encoding="utf-8")
        found = check(html)
        titles = [text for text in ("cat.png", HOSTILE, "Not explained", "What the methods mean") if text in found.text]
        assert len(titles) == 4
        assert "broken<b>.jpg: this is not an image" in found.text
        assert meaning("ixg.plus") in found.text
        images = [attributes for tag, attributes in found.elements if tag == "img"]
        assert len(images) == 2 * 3 + 2  # photo and two maps of each, and what the colours mean
        assert all(attributes["alt"] for attributes in images)
        links = [attributes["href"][1:] for tag, attributes in found.elements if tag == "a"]
        assert links == [attributes["id"] for tag, attributes in found.elements if tag == "h2" and "id" in attributes]
        assert found.text.index("2 images explained by tokentm and ixg.plus, model timm/") < found.text.index(
            "deletion"
        )
        assert html.count("<polyline") == 2 * 2 * 2
        for part in ("sha256", "torch", "vitreous", "timm/test_vit@random"):
            assert part in found.text
        assert "Content-Security-Policy" in html
        assert "prefers-color-scheme: dark" in html
        assert 'name="viewport"' in html

    def test_numbers_are_those_of_the_explanation(self, photos, tmp_path):
        file = tmp_path / "report.html"
        arguments = ("--out", tmp_path / "out", "--report", file, "--method", "rollout", "--json")
        result = run("explain", photos / "cat.png", *SMALL, *arguments)
        assert json.loads(result.stdout)["report"] == str(file)
        saved = Explanation.load(tmp_path / "out" / "cat")
        shown = re.findall(r'width: ([\d.]+)%"></span></span>', file.read_text(encoding="utf-8"))
        assert [float(text) for text in shown] == [round(100 * one.probability, 2) for one in saved.top(5)]

    def test_the_command_is_told_as_it_was_typed(self, photos, tmp_path, monkeypatch):
        file = tmp_path / "a report.html"
        command = ["explain", str(photos / "cat.png"), *SMALL, "--method", "rollout"]
        command += ["--out", str(tmp_path / "out"), "--report", str(file)]
        monkeypatch.setattr(sys, "argv", ["/usr/bin/vitreous", *command])
        assert run(*command).exit_code == 0
        assert f"--report '{file}'" in check(file.read_text(encoding="utf-8")).text

    def test_a_value_has_no_curves_and_is_not_called_a_probability(self, photos, tmp_path, value_model):
        file = tmp_path / "report.html"
        result = run(
            *("explain", photos / "cat.png", "--model", value_model, "--method", "gae"),
            *("--out", tmp_path / "out", "--report", file),
        )
        assert result.exit_code == 0, result.output
        said = Explanation.load(tmp_path / "out" / "cat").format_output(0)
        assert result.stdout.splitlines()[1].split() == ["class", "value"]
        assert said in result.stdout
        html = file.read_text(encoding="utf-8")
        assert "<polyline" not in html
        text = check(html).text
        assert "probability of the class" not in text
        assert text.count("There are no curves: they follow a probability") == 1
        assert "Curves:" not in text

    def test_values_of_many_photos_are_not_called_probabilities(self, photos, tmp_path, value_model):
        for number in range(3):
            (photos / f"{number}.png").write_bytes((photos / "cat.png").read_bytes())
        result = run("explain", photos, "--model", value_model, "--method", "gae", "--out", tmp_path / "out")
        assert result.stdout.splitlines()[0].split() == ["image", "class", "value"]

    @pytest.mark.parametrize("size", [(1000, 1), (1, 1000)])
    def test_a_strip_of_a_photo_is_drawn_like_any_other(self, photos, tmp_path, size):
        Image.new("RGB", size, "red").save(photos / "strip.png")
        file = tmp_path / "report.html"
        options = ("--out", tmp_path / "out", "--report", file, "--method", "gae")
        result = run("explain", photos / "strip.png", photos / "cat.png", *SMALL, *options)
        assert result.exit_code == 0, result.output
        found = check(file.read_text(encoding="utf-8"))
        assert sum(tag == "img" for tag, _ in found.elements) == 2 * 2 + 1  # photo and map of each, and the colours

    @pytest.mark.parametrize(
        ("error", "said"),
        [(InputError("too odd"), "too odd"), (IndexError("amax()"), "unexpected IndexError: amax()")],
    )
    def test_a_photo_that_cannot_be_shown_is_one_failure(self, photos, tmp_path, monkeypatch, error, said):
        def fails_on_the_first(name, *arguments, **options):
            if name == "cat.png":
                raise error
            return photo_section(name, *arguments, **options)

        monkeypatch.setattr("vitreous.html.report.photo_section", fails_on_the_first)
        (photos / "dog.png").write_bytes((photos / "cat.png").read_bytes())
        file = tmp_path / "report.html"
        options = ("--out", tmp_path / "out", "--report", file, "--method", "gae", "--json")
        result = run("explain", photos / "cat.png", photos / "dog.png", *SMALL, *options)
        assert result.exit_code == 1, result.output
        told = json.loads(result.stdout)
        assert len(told["photos"]) == 2  # their folders are there
        assert told["failures"] == [
            {"photo": str(photos / "cat.png"), "error": f"cat.png is not in the report: {said}"}
        ]
        text = check(file.read_text(encoding="utf-8")).text
        assert "dog.png" in text
        assert f"cat.png is not in the report: {said}" in text

    def test_nothing_to_report_on_leaves_an_earlier_report_alone(self, photos, tmp_path):
        file = tmp_path / "report.html"
        options = ("--out", tmp_path / "out", "--report", file, "--json")
        for before in (None, "before"):
            if before is not None:
                file.write_text(before)
            result = run("explain", photos / "broken<b>.jpg", *SMALL, *options)
            assert result.exit_code == 2
            told = json.loads(result.stdout)
            assert told["report"] is None
            assert len(told["failures"]) == 1
            assert [entry.name for entry in tmp_path.iterdir() if "report" in entry.name] == [file.name] * bool(before)
        assert file.read_text() == "before"

    def test_a_place_that_cannot_be_written_is_one_line_before_any_work(self, photos, tmp_path):
        (tmp_path / "folder.html").mkdir()
        result = run(
            "explain", photos / "cat.png", *SMALL, "--out", tmp_path / "out", "--report", tmp_path / "folder.html"
        )
        assert result.exit_code == 2
        assert len(result.stderr.splitlines()) == 1
        assert not (tmp_path / "out").exists()

    def test_an_interrupt_leaves_no_half_report(self, photos, tmp_path, monkeypatch):
        def interrupted(*arguments, **options):
            raise KeyboardInterrupt

        monkeypatch.setattr(explain_images, "comparison", interrupted)
        file = tmp_path / "report.html"
        result = run("explain", photos / "cat.png", *SMALL, "--out", tmp_path / "out", "--report", file)
        assert result.exit_code == 130
        assert [entry.name for entry in tmp_path.iterdir() if "report" in entry.name] == []


class TestPage:
    @pytest.mark.parametrize("text", ["<script>alert(1)</script>", '" onload="x', "' & <", "\udcff surrogate", "猫"])
    def test_text_stays_text_everywhere(self, text):
        body = page.bars([(text, 0.5, text)]) + page.table((text,), [(text,)])
        body += page.figure(page.picture(Image.new("RGB", (2, 2)), text), page.escape(text))
        body += line_chart(
            [Line(text, [0, 100], [0, 50], {})], title=text, across=percent_axis(text), up=percent_axis(text)
        )
        found = check(page.document(text, body))
        found_text = text.encode("utf-8", "backslashreplace").decode("utf-8")
        assert found.text.count(found_text) >= 8
        found.text.encode("utf-8")

    def test_class_names_and_methods_stay_text(self):
        html = photo_section(HOSTILE, photo(), explanation(), [])
        found = check(page.document("title", html))
        assert "$100 & <b>" in found.text
        assert POSITIVE in found.text
        assert SIGNED in found.text

    def test_bars_stay_inside(self):
        assert "width: 100.00%" in page.bars([("a", 7.0, "")])
        assert "width: 0.00%" in page.bars([("a", -1.0, "")])

    def test_a_map_of_nan_is_told_and_the_rest_is_drawn(self):
        whole = explanation()
        scores = {**whole.scores, SIGNED: torch.full_like(whole.scores[SIGNED], float("nan"))}
        broken = Explanation(**{**vars(whole), "scores": scores})
        found = check(page.document("title", photo_section("a", photo(), broken, [])))
        assert found.text.count("NaN") == 2
        assert sum(tag == "img" for tag, _ in found.elements) == 3

    def test_a_missing_value_leaves_a_gap_in_the_line(self):
        line = Line("n", [0, 50, 75, 100], [0, float("nan"), 10, 20], {})
        chart = line_chart([line], title="t", across=percent_axis("a"), up=percent_axis("u"))
        assert chart.count("<polyline") == 2
        assert "nan" not in chart

    def test_the_chart_is_where_the_numbers_are(self):
        line = Line("n", [0, 100], [0, 100], {})
        chart = line_chart([line], title="t", across=percent_axis("a"), up=percent_axis("u"))
        (points,) = re.findall(r'points="([^"]+)"', chart)
        assert points == "46.0,208.0 368.0,12.0"  # the corners of the plot inside its margins

    def test_a_report_that_fails_is_not_there(self, tmp_path):
        file = tmp_path / "report.html"
        file.write_text("before")
        with pytest.raises(RuntimeError), report_file(file, "command", []):
            raise RuntimeError
        assert file.read_text() == "before"
        assert list(tmp_path.iterdir()) == [file]
        (tmp_path / "folder").mkdir()
        with pytest.raises(StorageError, match="folder"), report_file(tmp_path / "folder", "command", []):
            pass


class TestNotebook:
    def test_shows_maps_and_predictions(self):
        whole = explanation()
        shown = Explanation(**{**vars(whole), "images": (photo(48, 48),)})
        found = check(shown._repr_html_())
        assert sum(tag == "img" for tag, _ in found.elements) == 1
        assert "$100 & <b>" in found.text
        assert found.text.count("explained") == 2
        assert "66.5%" in found.text
        assert shown._repr_png_().startswith(b"\x89PNG")

    def test_shows_the_maps_that_there_are(self):
        whole = explanation()
        scores = {**whole.scores, SIGNED: torch.full_like(whole.scores[SIGNED], float("nan"))}
        shown = Explanation(**{**vars(whole), "scores": scores, "images": (photo(48, 48),)})
        assert shown._repr_html_().count("<img") == 1

    def test_shows_a_table_where_there_is_no_picture(self):
        assert explanation()._repr_png_() is None
        assert "<img" not in explanation()._repr_html_()
        assert "tabby cat" in explanation()._repr_html_()

    def test_is_short_for_large_batches(self):
        many = Explanation(
            scores={"m": torch.rand(30, 4)},
            grid=(2, 2),
            target=torch.zeros(30, dtype=torch.int64),
            logits=torch.zeros(30, 2),
            image_size=(8, 8),
            signed={"m": False},
            images=(Image.new("RGB", (8, 8)),) * 30,
        )
        html = many._repr_html_()
        assert html.count("<img") == 4
        assert "26 more images" in html

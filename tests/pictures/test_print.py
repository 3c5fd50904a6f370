"""Figures for print: exact widths, TrueType fonts, resolution of the pictures, the model's crop, scales and labels."""

import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image

from golden_figures import POSITIVE, SIGNED, explanation, photo, strip
from vitreous.errors import InputError
from vitreous.pictures import (
    Look,
    Shown,
    classes_figure,
    comparison_figure,
    overlay_figure,
    strips_figure,
)
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.style import PageStyle, font_file, inches, page_style
from vitreous.pictures.tiles import MapPainter, bar_marks, find_span, prepare, short_number


def images_of(content):
    """Width and height in pixels of every picture in a PDF that matplotlib wrote; colour bars are 4 pixels high."""
    found = re.findall(rb"/Subtype /Image\s+/Width (\d+)\s+/Height (\d+)", content)
    return [(int(width), int(height)) for width, height in found if int(height) > 4]


def page_width(content):
    """Width of the page in points."""
    return float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+) ", content)[1])


class TestFiles:
    @pytest.mark.parametrize(("width", "points"), [("3.25in", 234), ("6.9in", 496.8), ("8.6cm", 243.78), (2.5, 180)])
    def test_the_page_is_as_wide_as_asked(self, width, points, tmp_path):
        canvases = [overlay_figure(explanation(), photo=photo(), width=width, dpi=72)]
        if width == "3.25in":  # what is drawn on a page does not ask in which unit its width was given
            maps = strip(lambda maps: maps, signed=True)
            canvases.append(classes_figure(explanation(), photo=photo(), width=width, dpi=72))
            canvases.append(strips_figure([maps], photo=photo(), width=width, dpi=72))
        for canvas in canvases:
            content = canvas.save(tmp_path / "figure.pdf").read_bytes()
            assert page_width(content) == pytest.approx(points, abs=0.01)  # rounded in the file

    @pytest.mark.parametrize("dpi", [None, 600])
    def test_pictures_have_at_least_300_pixels_per_inch(self, dpi, tmp_path):
        canvas = comparison_figure([Shown(explanation(), 0, photo())], width="3.25in", dpi=dpi)
        sizes = images_of(canvas.save(tmp_path / "figure.pdf").read_bytes())
        tile = PageStyle(margin=1, gap=5, width=325).tile(0, 3) / 100  # inches
        assert len(sizes) == 2 * 3  # the photo and two methods, for two classes
        assert min(width for width, _ in sizes) >= (dpi or 300) * tile

    def test_large_photos_keep_their_own_pixels(self, tmp_path):
        large = photo(1500, 1000)
        content = (
            comparison_figure([Shown(explanation(), 0, large)], width="3.25in").save(tmp_path / "a.pdf").read_bytes()
        )
        seen = BaseImage.of(explanation(), 0, large).cropped().photo.size
        assert seen[0] > 900
        assert set(images_of(content)) == {seen}

    def test_a_png_has_the_resolution_asked_for(self, tmp_path):
        file = classes_figure(explanation(), photo=photo(), width="2in", dpi=150).save(tmp_path / "figure.png")
        with Image.open(file) as drawn:
            assert drawn.width == 300

    @pytest.mark.skipif(shutil.which("pdffonts") is None, reason="poppler-utils is not installed")
    def test_as_a_publishers_checker_reads_it(self, tmp_path):
        file = overlay_figure(explanation(), photo=photo(), width="6.9in").save(tmp_path / "figure.pdf")
        fonts = subprocess.run(["pdffonts", file], check=True, capture_output=True, text=True).stdout.splitlines()[2:]
        assert fonts
        assert all("TrueType" in line and " yes " in line for line in fonts)
        listed = subprocess.run(["pdfimages", "-list", file], check=True, capture_output=True, text=True).stdout
        rows = [line.split() for line in listed.splitlines()[2:]]
        resolutions = [(int(row[12]), int(row[13])) for row in rows if int(row[4]) > 4]
        assert resolutions
        assert min(min(pair) for pair in resolutions) >= 299  # printed as whole numbers

    def test_text_of_another_font(self, tmp_path):
        content = (
            overlay_figure(explanation(), photo=photo(), font="DejaVu Serif", dpi=72)
            .save(tmp_path / "a.pdf")
            .read_bytes()
        )
        assert b"DejaVuSerif" in content
        assert b"DejaVuSans" not in content
        path = str(font_file("DejaVu Sans Mono"))
        assert (
            b"DejaVuSansMono"
            in classes_figure(explanation(), photo=photo(), font=path, dpi=72).save(tmp_path / "b.pdf").read_bytes()
        )


class TestStyle:
    @pytest.mark.parametrize("bad", ["", "in", "3.25 feet", "-2in", "nan", "1e3in", True, "0.2cm", "4000in"])
    def test_lengths_that_are_none(self, bad):
        with pytest.raises(InputError, match=r"width|wide"):
            inches(bad)

    def test_lengths(self):
        assert inches("72.27pt") == pytest.approx(1)
        assert inches("25.4 mm") == pytest.approx(1)
        assert inches(" 2.54CM") == pytest.approx(1)
        assert inches("3.25") == inches(3.25) == 3.25

    def test_a_font_that_is_not_truetype_is_refused(self, tmp_path):
        (tmp_path / "other.otf").write_bytes(b"OTTO" + bytes(100))
        with pytest.raises(InputError, match="not a TrueType font"):
            page_style(Look(font=str(tmp_path / "other.otf")))

    def test_options_are_checked(self):
        with pytest.raises(InputError, match="did you mean width"):
            overlay_figure(explanation(), photo=photo(), widht="3in")
        with pytest.raises(InputError, match="columns"):
            Look(columns=0)
        with pytest.raises(InputError, match="list of names"):
            Look(labels="tokentm")
        with pytest.raises(InputError, match="2 are shown, and 1 labels"):
            explanation().figure("comparison", photo=photo(), labels=["ours"])


def texts(canvas):
    return [text.get_text() for text in canvas.figure.texts]


class TestLayout:
    def test_labels_stand_in_for_spellings(self):
        for name in ("overlay", "comparison", "classes"):
            written = " ".join(texts(explanation().figure(name, photo=photo(), labels=["TokenTM", "Ours"])))
            assert "TokenTM" in written
            assert "Ours" in written
            assert "gradtoken" not in written
            assert "gradtoken" not in " ".join(texts(explanation().figure(name, photo=photo(), labels=())))

    @pytest.mark.parametrize("columns", [1, 2, 3])
    def test_columns_fold_a_row(self, columns):
        canvas = comparison_figure([Shown(explanation(), 0, photo())], columns=columns, width="4in")
        pictures = [axes.get_position() for axes in canvas.figure.axes if axes.images]
        wide = [place for place in pictures if place.height > 0.02]
        assert len({round(place.x0, 4) for place in wide}) == columns
        assert {"photo", "tokentm"} <= set(texts(canvas))  # every column that is folded keeps its heading

    @pytest.mark.parametrize("name", ["overlay", "comparison", "classes"])
    @pytest.mark.parametrize("width", [None, "3.25in"])
    def test_nothing_overlaps_and_nothing_is_outside(self, name, width):
        canvas = explanation().figure(name, photo=photo(), width=width, dpi=72)
        renderer = FigureCanvasAgg(canvas.figure).get_renderer()
        page = canvas.figure.bbox
        boxes = [text.get_window_extent(renderer) for text in canvas.figure.texts]
        for box in boxes:
            assert box.x0 >= page.x0 - 1
            assert box.x1 <= page.x1 + 1
            assert box.y0 >= page.y0 - 1
            assert box.y1 <= page.y1 + 1
        for number, box in enumerate(boxes):
            for other in boxes[:number]:
                # Descenders of a line may reach into the line below.
                shared_height = min(box.y1, other.y1) - max(box.y0, other.y0)
                shared_width = min(box.x1, other.x1) - max(box.x0, other.x0)
                assert shared_width < 1 or shared_height < 0.35 * min(box.height, other.height)


class TestCrop:
    def test_the_models_crop_is_shown_and_the_rest_on_demand(self):
        wide = photo(96, 48)
        style, look = PageStyle(), Look()
        base = BaseImage.of(explanation(), 0, wide)
        seen = prepare(base, look, style, 100)
        assert seen.photo.width == seen.photo.height
        whole = prepare(base, Look(context=True), style, 100)
        assert whole.photo.width == pytest.approx(2 * whole.photo.height, abs=2)  # rounded to pixels
        scores = explanation().scores_of(POSITIVE)
        laid = np.asarray(whole.lay(scores, (6, 6), signed=False)).astype(int)
        original = np.asarray(whole.photo).astype(int)
        # Dimmed in its own colours, neither grey nor white.
        assert np.abs(laid[:, 0] - 0.4 * original[:, 0]).max() <= 1

    def test_a_crop_shows_the_same_map(self):
        base = BaseImage.of(explanation(), 0, photo(96, 48))
        rows, columns = base.frame.rows, base.frame.columns
        scores = explanation().scores_of(SIGNED)
        whole = np.asarray(base.lay(scores, (6, 6), signed=True, span=(-1.0, 1.0)))
        cropped = np.asarray(base.cropped().lay(scores, (6, 6), signed=True, span=(-1.0, 1.0)))
        assert np.array_equal(whole[rows, columns], cropped)


class TestScales:
    def test_unsigned_scales_start_at_zero(self):
        scores = torch.tensor([2.0, 3.0, 4.0])
        assert find_span(scores, signed=False) == (0.0, 4.0)
        assert find_span(scores, signed=False, from_zero=False) == (2.0, 4.0)
        assert find_span(torch.tensor([-1.0, 0.5]), signed=False) == (0.0, 0.5)
        assert find_span(torch.tensor([-1.0, -0.5]), signed=False) == (-1.0, -0.5)  # as the map is drawn
        assert find_span(torch.tensor([-1.0, 0.5]), signed=True) == (-1.0, 1.0)

    def test_bars_have_numbers(self):
        assert bar_marks((0.0, 0.0421), signed=False) == ("0", "0.042")
        assert bar_marks((-17.3, 17.3), signed=True) == ("-17", "0", "17")
        written = texts(overlay_figure(explanation(), photo=photo(), methods=[POSITIVE]))
        largest = float(explanation().scores_of(POSITIVE).max())
        assert {"0", short_number(largest)} <= set(written)

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0.0, "0"), (-0.0, "0"), (1.5e-4, "1.5e-4"), (123456, "1.2e5"), (2e-6, "2e-6"), (345.6, "346")],
    )
    def test_short_numbers(self, value, text):
        assert short_number(value) == text

    def test_one_scale_for_all_classes_and_methods(self):
        given = explanation()
        double = {name: scores * torch.tensor([1.0, 3.0])[None, :, None] for name, scores in given.scores.items()}
        scaled = type(given)(**{**vars(given), "scores": double})
        own, shared = (classes_figure(scaled, photo=photo(), shared_scale=one) for one in (False, True))
        assert sum(axes.images != [] for axes in own.figure.axes) > sum(
            axes.images != [] for axes in shared.figure.axes
        )
        largest = max(float(scores.abs().max()) for name, scores in double.items() if scaled.signed[name])
        assert f"{short_number(largest)} for" in texts(shared)
        painter = MapPainter(
            Look(shared_scale=True),
            PageStyle(),
            100,
            [(double[SIGNED][0, target], True) for target in range(2)],
        )
        base = BaseImage.of(scaled, 0, photo()).cropped()
        weak = painter.map_tile(double[SIGNED][0, 0], (6, 6), base, signed=True)
        alone = MapPainter(Look(), PageStyle(), 100).map_tile(double[SIGNED][0, 0], (6, 6), base, signed=True)
        strength = [
            np.abs(np.asarray(tile.image).astype(int) - np.asarray(base.photo)).mean() for tile in (weak, alone)
        ]
        assert strength[0] < 0.8 * strength[1]
        assert weak.bar is None
        assert alone.bar is not None

    def test_heads_share_a_scale_unless_asked_otherwise(self):
        heads = strip(lambda maps: maps, signed=True)
        shared = strips_figure([heads], photo=photo())
        own = strips_figure([heads], photo=photo(), shared_scale=False)
        count = [sum(bool(axes.images) for axes in canvas.figure.axes) for canvas in (shared, own)]
        assert count == [6 + 1, 6 + 5]  # the photo and five maps, with one bar or five


class TestOutline:
    def test_the_outline_of_a_mask_is_on_every_map(self):
        mask = np.zeros((64, 96), dtype=np.int16)
        mask[20:50, 40:70] = 1
        plain, outlined = (overlay_figure(explanation(), photo=photo(), mask=one) for one in (None, mask))
        for before, after in zip(plain.figure.axes, outlined.figure.axes, strict=True):
            first, second = (np.asarray(axes.images[0].get_array()) for axes in (before, after))
            if len(first) > 4:  # not a bar
                changed = (first != second).any(axis=-1)
                assert 0.005 < changed.mean() < 0.2
                assert {(255, 255, 255), (0, 0, 0)} <= {tuple(pixel) for pixel in second[changed].tolist()}

    def test_a_mask_may_be_that_of_the_crop(self):
        base = BaseImage.of(explanation(), 0, photo(96, 64))
        assert base.with_mask(np.ones((48, 48))).mask.size == (96, 64)

    @pytest.mark.parametrize("mask", [np.ones((10, 90)), np.ones(7), np.array([["a"]])])
    def test_a_mask_that_does_not_fit_is_refused(self, mask):
        with pytest.raises(InputError, match="mask"):
            overlay_figure(explanation(), photo=photo(), mask=mask)

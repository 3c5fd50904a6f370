"""What pictures show, measured in pixels, and that drawing them touches nothing global."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from vitreous.errors import InputError, MethodError
from vitreous.explanation.explanation import Explanation, ExplanationError
from vitreous.pictures.base_image import BaseImage, comparison
from vitreous.pictures.canvas import class_caption, font, short_names, wrap
from vitreous.pictures.style import colour, overlay

LONG = "gradtoken:propagation=rollout_elementwise,heads=average"


def make(classes_per_image=1, image=(28, 42), class_names=("cat", "dog")):
    generator = torch.Generator().manual_seed(1)
    shape = (1, classes_per_image, 6)
    return Explanation(
        scores={"tokentm": torch.rand(shape, generator=generator), LONG: torch.randn(shape, generator=generator)},
        grid=(2, 3),
        target=torch.arange(classes_per_image)[None] % 2,
        logits=torch.tensor([[2.0, 0.5]]),
        image_size=(28, 42),
        signed={"tokentm": False, LONG: True},
        class_names=class_names,
        images=(Image.new("RGB", image[::-1], "#406080"),) if image else None,
    )


class TestColour:
    def test_positive_maps_get_lighter_and_more_opaque_with_strength(self):
        colours = colour(np.linspace(0, 1, 101)[None], signed=False)[0].astype(int)
        luminance = colours[:, :3] @ (299, 587, 114)
        assert (np.diff(luminance) >= -1000).all()
        assert luminance[-1] - luminance[0] > 200_000
        assert (np.diff(colours[:, 3]) >= 0).all()

    def test_signed_maps_are_red_for_blue_against_and_transparent_at_zero(self):
        against, nothing, favour = colour(np.array([[-1.0, 0.0, 1.0]]), signed=True)[0].astype(int)
        assert against[2] > against[0] + 50
        assert favour[0] > favour[2] + 50
        assert nothing[3] == 0
        assert against[3] == favour[3] == 255

    def test_signed_maps_are_not_fainter_than_others(self):
        strength = np.linspace(0, 1, 101)[None]
        positive, signed = (colour(strength, signed=signed)[0, :, 3].astype(int) for signed in (False, True))
        assert (signed >= positive).all()

    @pytest.mark.parametrize(
        ("cmap", "changed"), [("viridis", [False]), ("RdBu_r", [True]), ("viridis, RdBu_r", [False, True])]
    )
    def test_a_colour_map_is_for_the_maps_it_suits(self, cmap, changed):
        values = np.linspace(0.1, 1, 10)[None]
        for signed in (False, True):
            same = np.array_equal(colour(values, signed=signed, cmap=cmap), colour(values, signed=signed))
            assert same == (signed not in changed)

    @pytest.mark.parametrize(
        ("cmap", "message"),
        [("virids", "did you mean viridis"), ("a,b", "no colour map 'a'"), ("jet,jet,jet", "not 3")],
    )
    def test_an_unknown_colour_map_is_one_sentence(self, cmap, message):
        with pytest.raises(InputError, match=message):
            colour(np.zeros((1, 1)), signed=False, cmap=cmap)

    def test_gives_bytes_with_alpha(self):
        colours = colour(np.zeros((3, 5), dtype=np.float32), signed=False)
        assert colours.shape == (3, 5, 4)
        assert colours.dtype == np.uint8


class TestOverlay:
    def test_without_opacity_the_photo_is_left(self):
        photo = Image.fromarray(np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8))
        result = np.asarray(overlay(photo, np.ones((6, 8)), signed=False, opacity=0))
        assert np.array_equal(result, np.asarray(photo))

    @pytest.mark.parametrize("signed", [False, True])
    def test_zero_leaves_the_photo_in_its_colours(self, signed):
        photo = Image.new("RGB", (4, 4), "#208060")
        assert np.array_equal(np.asarray(overlay(photo, np.zeros((4, 4)), signed=signed)), np.asarray(photo))

    def test_a_map_of_another_size_is_refused(self):
        with pytest.raises(InputError, match="does not fit"):
            overlay(Image.new("RGB", (4, 6)), np.zeros((4, 6)), signed=False)

    def test_the_photo_itself_is_not_changed(self):
        photo = Image.new("RGB", (4, 4), "#123456")
        overlay(photo, np.ones((4, 4)), signed=False)
        assert photo.getpixel((0, 0)) == (0x12, 0x34, 0x56)


class TestComparison:
    def test_has_a_column_for_the_photo_and_each_method_and_a_row_for_each_class(self):
        one, two = comparison(make(), tile=90), comparison(make(classes_per_image=2), tile=90)
        assert one.width == two.width > 3 * 90
        assert 60 < two.height - one.height < 120
        assert comparison(make(), methods=["tokentm"], tile=90).width < one.width

    def test_keeps_the_aspect_ratio(self):
        wide, tall = comparison(make(image=(20, 60)), tile=120), comparison(make(image=(60, 20)), tile=120)
        assert tall.width < wide.width
        assert tall.height > wide.height

    def test_shows_the_photo_in_its_own_colours(self):
        page = comparison(make(), tile=90)
        assert np.all(np.asarray(page) == (0x40, 0x60, 0x80), axis=-1).sum() > 0.95 * 90 * 60

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_a_map_that_is_not_finite_is_left_out_and_the_others_stay_as_they_were(self, bad):
        whole = make(classes_per_image=2)
        scores = {**whole.scores, LONG: whole.scores[LONG].clone()}
        scores[LONG][0, 1, 3] = bad  # the second class of the last column
        before, after = (
            np.asarray(comparison(one, tile=90)) for one in (whole, Explanation(**{**vars(whole), "scores": scores}))
        )
        assert before.shape == after.shape
        rows, columns = np.nonzero((before != after).any(axis=-1))
        left = 16 + 2 * (90 + 12)  # the margin, and two columns with their gaps
        assert columns.min() >= left
        assert columns.max() < left + 90
        assert np.ptp(rows) < 60  # as high as one tile
        assert (after[rows.min(), left] == 0xF0).all()

    def test_takes_a_picture_and_says_when_there_is_none(self):
        blind = make(image=None)
        with pytest.raises(InputError, match="image="):
            comparison(blind)
        assert comparison(blind, image=Image.new("L", (42, 28)), tile=64).mode == "RGB"

    def test_an_unknown_method_or_image_is_a_clear_error(self):
        with pytest.raises(MethodError):
            comparison(make(), methods=["nothing"])
        for draw in (comparison, BaseImage.of, Explanation.label):  # with one error
            with pytest.raises(ExplanationError, match="index 4 is out of range: this explanation has 1 images"):
                draw(make(), 4)

    @pytest.mark.parametrize("names", [("a" * 500, "b"), ("$x^2$ \n猫", "<b>"), None])
    def test_any_class_name_can_be_drawn(self, names):
        assert comparison(make(class_names=names), tile=64).width > 0


class TestCaptions:
    def test_spellings_are_broken_where_they_have_joints_and_fit(self):
        style = font(15)
        lines = wrap(LONG, style, 260, lines=3)
        assert 1 < len(lines) <= 3
        assert "".join(lines) == LONG
        assert all(style.getlength(line) <= 260 for line in lines)

    def test_what_does_not_fit_ends_in_an_ellipsis(self):
        style = font(15)
        for text in ("x" * 400, "many words " * 40):
            lines = wrap(text, style, 100, lines=2)
            assert len(lines) <= 2
            assert lines[-1].endswith("…")
            assert all(style.getlength(line) <= 100 for line in lines)

    def test_a_number_at_the_end_is_never_cut(self):
        style = font(13)
        for width in (60, 90, 150):
            lines = wrap("a class with quite a long name · 100.0%", style, width, lines=2)
            assert len(lines) <= 2
            assert lines[-1].endswith("100.0%")
        assert wrap("English Cocker Spaniel · 18.0%", style, 150, lines=3) == ["English Cocker Spaniel", "18.0%"]
        assert wrap("x · 100.0%", style, 44, lines=3)[-1] == "100%"  # without its decimals where they do not fit

    def test_class_names_are_short_where_that_is_clear(self):
        names = ("tabby, tabby cat", "crane", "crane, machine", "dog")
        assert short_names(names) == ("tabby", "crane", "crane, machine", "dog")
        assert class_caption(make(class_names=("tabby, tabby cat", "dog"))) == "tabby · 81.8%"

    def test_an_empty_caption_is_an_empty_line(self):
        assert wrap("  ", font(15), 100, lines=2) == [""]


def test_drawing_does_not_import_pyplot():
    program = (
        "import sys, numpy as np; from PIL import Image; from vitreous.pictures.style import overlay\n"
        "overlay(Image.new('RGB', (4, 4)), np.zeros((4, 4)), signed=True)\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)

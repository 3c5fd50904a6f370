"""Figures look as they did when people looked at them; the measure of that is shown to be able to fail."""

import matplotlib as mpl
import numpy as np
import pytest
from PIL import Image, ImageChops

from golden_figures import FIGURES, FOLDER, drawn
from vitreous.pictures import style as colours

# Root mean square over pixels and channels, of 255, after averaging 8 x 8 pixels: versions of matplotlib and FreeType
# place and shade the edges of letters differently, which averaging hides. Letters without hinting give up to 3.1, a
# page that is shifted by a whole pixel up to 4.6; a flipped map, other colours or a turned sign give 9.1 and more.
# All of that is tested below.
TOLERANCE = 6.0
HARMLESS = 5.0
WRONG = 8.0


def difference(first, second):
    """The root mean square difference of two pictures, coarsely."""
    assert first.size == second.size
    coarse = [np.asarray(image.convert("RGB").reduce(8), dtype=np.float64) for image in (first, second)]
    return float(np.sqrt(np.mean((coarse[0] - coarse[1]) ** 2)))


def golden(name):
    with Image.open(FOLDER / f"{name}.png") as image:
        return image.convert("RGB")


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_as_they_were(name):
    assert difference(drawn(name), golden(name)) < TOLERANCE


@pytest.mark.parametrize("name", FIGURES)
def test_other_text_rendering_is_tolerated(name):
    assert difference(ImageChops.offset(golden(name), 1, 0), golden(name)) < HARMLESS
    with mpl.rc_context({"text.hinting": "none", "font.family": "serif"}):
        assert difference(drawn(name), golden(name)) < HARMLESS


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_flipped_map_is_noticed(name, axis):
    assert difference(drawn(name, lambda maps: maps.flip(axis)), golden(name)) > WRONG


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "curves"])
def test_a_swapped_colour_map_is_noticed(name, monkeypatch):
    other = {False: mpl.colormaps["viridis"], True: mpl.colormaps["PiYG"]}
    monkeypatch.setattr(colours, "colour_map", lambda *, signed, cmap: other[signed])
    assert difference(drawn(name), golden(name)) > WRONG


@pytest.mark.parametrize("name", ["overlay", "comparison", "classes"])
def test_a_map_with_its_sign_turned_is_noticed(name):
    assert difference(drawn(name, lambda maps: -maps), golden(name)) > WRONG

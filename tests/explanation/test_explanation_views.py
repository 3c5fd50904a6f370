"""Explanations are data: drawing registers itself, and is imported when something is shown."""

from importlib import import_module
from pathlib import Path

import pytest

from fresh_imports import modules_after
from golden_figures import POSITIVE, explanation, photo
from vitreous.errors import InputError
from vitreous.explanation import views as explanation_views
from vitreous.explanation.explanation import Explanation
from vitreous.pictures import Canvas, overlay_figure, register_figure

SUPPORT = Path(__file__).parents[1] / "support"
HEAVY = ("vitreous.pictures", "vitreous.html", "matplotlib", "jinja2")


@pytest.fixture
def views(monkeypatch):
    """What a test registers is forgotten again."""
    for provider in explanation_views._PROVIDERS:  # what is first imported in a test would be forgotten with it
        import_module(provider)
    monkeypatch.setattr(explanation_views, "_views", dict(explanation_views._views))


def test_explanations_import_neither_pictures_nor_pages():
    modules = ("vitreous.explanation.explanation", "vitreous.text.explanation", "vitreous.explanation.folder")
    for module, loaded in zip(modules, modules_after([f"import {module}" for module in modules]), strict=True):
        assert module in loaded
        assert not loaded & set(HEAVY), module


def test_what_is_shown_imports_no_more_than_it_needs():
    code = (
        f"import sys; sys.path.insert(0, {str(SUPPORT)!r})\n"
        "from golden_figures import explanation, photo\n"
        "explanation().overlay('tokentm', photo=photo())"
    )
    (loaded,) = modules_after([code])
    assert "vitreous.pictures" in loaded
    assert "jinja2" not in loaded


def test_a_registered_figure_is_drawn_by_its_name(views):
    @register_figure(Explanation, "mine")
    def mine(given, index, *, methods, photo, look):
        assert look.opacity == 0.5
        return overlay_figure(given, index, methods=methods or [POSITIVE], photo=photo, look=look)

    drawn = explanation().figure("mine", photo=photo(), opacity=0.5)
    assert isinstance(drawn, Canvas)
    assert drawn.image().size == overlay_figure(explanation(), methods=[POSITIVE], photo=photo()).image().size


def test_figures_of_a_type_are_those_of_its_subtypes_too(views):
    class Mine(Explanation):
        pass

    register_figure(Mine, "only_mine")(lambda *_, **__: "drawn")
    mine = Mine(**vars(explanation()))
    assert mine.figure("only_mine", photo=photo()) == "drawn"
    assert isinstance(mine.figure("overlay", photo=photo()), Canvas)
    with pytest.raises(
        InputError, match=r"can be drawn as overlay, comparison, classes, slices or frames, not as 'only_mine'"
    ):
        explanation().figure("only_mine")


def test_a_figure_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(
        InputError, match=r"overlay, comparison, classes, slices or frames, not as 'overlays'; did you mean overlay\?"
    ):
        explanation().figure("overlays")
    with pytest.raises(InputError, match=r"not as 3$"):
        explanation().figure(3)

"""Figures: each draws what it is given and computes nothing; the numbers come from ``vitreous.pictures.data``."""

from __future__ import annotations

from collections.abc import Sequence

from vitreous.errors import InputError
from vitreous.explanation import Explanation
from vitreous.pictures.backdrop import Look, Photo
from vitreous.pictures.figures.classes import classes_figure
from vitreous.pictures.figures.comparison import Shown, comparison_figure
from vitreous.pictures.figures.curves import curves_figure
from vitreous.pictures.figures.overlay import overlay_figure
from vitreous.pictures.figures.strips import strips_figure
from vitreous.pictures.figures.transformation import transformation_figure
from vitreous.pictures.sheet import Sheet

__all__ = [
    "Shown",
    "classes_figure",
    "comparison_figure",
    "curves_figure",
    "draw",
    "overlay_figure",
    "strips_figure",
    "transformation_figure",
]


def draw(
    name: str,
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    photo: Photo | None = None,
    look: Look | None = None,
) -> Sheet:
    """Draw one of the figures that need nothing but an explanation."""
    if name == "overlay":
        return overlay_figure(explanation, index, methods=methods, photo=photo, look=look)
    if name == "comparison":
        return comparison_figure([Shown(explanation, index, photo)], methods=methods, look=look)
    if name == "classes":
        return classes_figure(explanation, index, methods=methods, photo=photo, look=look)
    raise InputError(f"an explanation alone can be drawn as overlay, comparison or classes, not as {name!r}")

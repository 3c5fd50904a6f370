"""Pictures of explanations: overlays, figures and the arrays behind them; without pyplot or other global state."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitreous.explanation.views import Look, register_figure
    from vitreous.pictures.canvas import Canvas
    from vitreous.pictures.charts import curves_figure, dataset_curves_figure, layer_curve_figure
    from vitreous.pictures.curves import Curves, perturbation_curves
    from vitreous.pictures.figures import (
        Shown,
        classes_figure,
        comparison_figure,
        overlay_figure,
        similar_figure,
        strips_figure,
        transformation_figure,
    )
    from vitreous.pictures.metric_charts import MetricValues, dots_figure, radar_figure
    from vitreous.pictures.perturbations import (
        Filmstrip,
        LayerCurve,
        MeanCurves,
        dataset_curves,
        filmstrip,
        filmstrip_figure,
        layer_curves,
    )
    from vitreous.pictures.strips import (
        Strip,
        Transformation,
        depth_strip,
        heads_strip,
        slices_figure,
        start_layer_strip,
        token_transformation,
    )

__all__ = [
    "Canvas",
    "Curves",
    "Filmstrip",
    "LayerCurve",
    "Look",
    "MeanCurves",
    "MetricValues",
    "Shown",
    "Strip",
    "Transformation",
    "classes_figure",
    "comparison_figure",
    "curves_figure",
    "dataset_curves",
    "dataset_curves_figure",
    "depth_strip",
    "dots_figure",
    "filmstrip",
    "filmstrip_figure",
    "heads_strip",
    "layer_curve_figure",
    "layer_curves",
    "overlay_figure",
    "perturbation_curves",
    "radar_figure",
    "register_figure",
    "similar_figure",
    "slices_figure",
    "start_layer_strip",
    "strips_figure",
    "token_transformation",
    "transformation_figure",
]

_HOMES = {
    "vitreous.explanation.views": ("Look", "register_figure"),
    "vitreous.pictures.canvas": ("Canvas",),
    "vitreous.pictures.charts": ("curves_figure", "dataset_curves_figure", "layer_curve_figure"),
    "vitreous.pictures.curves": ("Curves", "perturbation_curves"),
    "vitreous.pictures.figures": (
        *("Shown", "classes_figure", "comparison_figure"),
        *("overlay_figure", "similar_figure", "strips_figure", "transformation_figure"),
    ),
    "vitreous.pictures.metric_charts": ("MetricValues", "dots_figure", "radar_figure"),
    "vitreous.pictures.perturbations": (
        *("Filmstrip", "LayerCurve", "MeanCurves"),
        *("dataset_curves", "filmstrip", "filmstrip_figure", "layer_curves"),
    ),
    "vitreous.pictures.strips": (
        *("Strip", "depth_strip", "heads_strip", "slices_figure", "start_layer_strip"),
        *("Transformation", "token_transformation"),
    ),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: figures need matplotlib, strips and curves need models."""
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(import_module(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'vitreous.pictures' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List the public names, imported or not."""
    return sorted({*globals(), *__all__})

"""Views of explanations: pictures, pages and notebooks register here how they show one.

An explanation is data. ``explanation.figure("comparison")`` looks up the view ``figure:comparison`` of its type; the
modules that draw are imported on the first lookup that needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.messages import close_match
from vitreous.errors import InputError

if TYPE_CHECKING:
    import os

    from PIL import Image

View = Callable[..., Any]
ViewT = TypeVar("ViewT", bound=View)

_FIGURE = "figure:"
# Imported in this order until a view is found.
_PROVIDERS = (
    "vitreous.pictures.comparison",
    "vitreous.pictures.figures",
    "vitreous.html.notebook",
    "vitreous.html.report",
    "vitreous.html.words",
    "vitreous.api.trust",
)
_views: dict[tuple[type, str], View] = {}


@dataclass(frozen=True)
class Look:
    """How maps are drawn.

    Attributes:
        smooth: Interpolate between patches; otherwise patches are rectangles.
        opacity: Opacity of the heatmaps, from 0 to 1.

    Examples:
        >>> from vitreous.pictures import Look, overlay_figure
        >>> canvas = overlay_figure(explanation, look=Look(smooth=False, opacity=0.6))
    """

    smooth: bool = True
    opacity: float = DEFAULT_OPACITY


class Drawing(Protocol):
    """A figure: shown in a notebook, rendered as an image, or saved as PNG, SVG or PDF."""

    def image(self, scale: float | None = None) -> Image.Image:
        """Render it as an image."""

    def save(self, file: str | os.PathLike[str]) -> Path:
        """Write it as .png, .svg or .pdf."""

    def _repr_png_(self) -> bytes: ...


def register_view(kind: type, name: str) -> Callable[[ViewT], ViewT]:
    """Register a function that shows explanations of a type under a name."""

    def enter(view: ViewT) -> ViewT:
        _views[kind, name] = view
        return view

    return enter


def register_figure(kind: type, name: str) -> Callable[[ViewT], ViewT]:
    """Register a figure, so that ``explanation.figure(name)`` draws it.

    The function is called with the explanation, the index of the image, and the keyword arguments ``methods``,
    ``photo`` and ``look``; it returns a ``Canvas``, or anything else with ``image`` and ``save``.

    Args:
        kind: Type of the explanations, such as ``vitreous.Explanation``.
        name: Name of the figure.

    Examples:
        >>> import vitreous
        >>> from vitreous.pictures import overlay_figure, register_figure
        >>> @register_figure(vitreous.Explanation, "first_method")
        ... def first_method(explanation, index, *, methods, photo, look):
        ...     chosen = (methods or explanation.methods)[:1]
        ...     return overlay_figure(explanation, index, methods=chosen, photo=photo, look=look)
        >>> canvas = explanation.figure("first_method")
    """
    return register_view(kind, _FIGURE + name)


def find_view(explanation: object, name: str) -> View:
    """Find the view of an explanation by name.

    Raises:
        InputError: There is no such view.
    """
    for provider in (None, *_PROVIDERS):
        if provider is not None:
            import_module(provider)
        for kind in type(explanation).__mro__:
            if (kind, name) in _views:
                return _views[kind, name]
    raise InputError(f"there is no view {name!r} of {type(explanation).__name__}")


def find_figure(explanation: object, name: str) -> View:
    """Find a figure of an explanation by name.

    Raises:
        InputError: There is no such figure; the message lists those there are.
    """
    try:
        return find_view(explanation, f"{_FIGURE}{name}")
    except InputError:
        known = [
            view.removeprefix(_FIGURE)
            for kind, view in _views
            if isinstance(explanation, kind) and view.startswith(_FIGURE)
        ]
        hint = close_match(name, known) if isinstance(name, str) else ""
        raise InputError(
            f"an explanation alone can be drawn as {', '.join(known[:-1])} or {known[-1]}, not as {name!r}{hint}"
        ) from None

"""Views of explanations: pictures, pages and notebooks register here how they show one.

An explanation is data. ``explanation.figure("comparison")`` looks up the view ``figure:comparison`` of its type; the
modules that draw are imported on the first lookup that needs them.

Heatmaps: raw patch scores enlarged to pixels and scaled to a display range, each by itself or all together.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar

import torch
from PIL.Image import Transpose
from torch.nn import functional

from vitreous._utils.defaults import DEFAULT_OPACITY
from vitreous._utils.messages import close_match
from vitreous.errors import InputError
from vitreous.inputs.patch_geometry import INTERPOLATION, Frame, PatchGeometry, Size, enlarge, line_weights

if TYPE_CHECKING:
    import os

    from PIL import Image

    from vitreous.explanation.explanation import Explanation


View = Callable[..., Any]
ViewT = TypeVar("ViewT", bound=View)

_FIGURE = "figure:"
# Imported in this order until a view is found.
_PROVIDERS = (
    "vitreous.pictures.base_image",
    "vitreous.pictures.figures",
    "vitreous.pictures.strips",
    "vitreous.html.report",
    "vitreous.html.words",
    "vitreous.api.trust",
)
_views: dict[tuple[type, str], View] = {}


@dataclass(frozen=True)
class Look:
    """How figures are drawn.

    Attributes:
        smooth: Interpolate between patches; otherwise patches are rectangles.
        opacity: Opacity of the strongest score, from 0 to 1; weaker scores are more transparent.
        cmap: Name of a colour map of matplotlib. A diverging one such as ``RdBu_r`` is for signed maps, any other for
            unsigned maps; two names separated by a comma are for unsigned and signed maps.
        context: Show the whole photo, dimmed outside of the part that the model saw; otherwise that part alone.
        shared_scale: One scale for all maps of a figure that are signed, and one for all that are not; ``False`` for a
            scale of its own for every map; ``None`` leaves it to the figure.
        from_zero: Scales of unsigned maps start at zero; otherwise at the smallest score.
        mask: Regions of the photo, (height, width), as an array or an image; their outline is drawn on the maps.
        width: Width of the page, such as ``3.25in``, ``8.5cm`` or ``240pt``; a number is in inches. Fonts then have
            the size of print. By default the page is as wide as its content and made for the screen.
        dpi: Pixels per inch of PNG files, and the least of pictures in PDF and SVG files; 300 by default.
        font: Font family, or a .ttf file; DejaVu Sans by default.
        columns: How many maps or charts stand side by side.
        labels: Names in place of the method spellings, in their order; an empty sequence leaves them out.

    Examples:
        >>> from vitreous.pictures import Look, overlay_figure
        >>> canvas = overlay_figure(explanation, look=Look(smooth=False, opacity=0.6))
        >>> canvas = overlay_figure(explanation, width="3.25in", font="DejaVu Serif")
    """

    smooth: bool = True
    opacity: float = DEFAULT_OPACITY
    cmap: str | None = None
    context: bool = False
    shared_scale: bool | None = None
    from_zero: bool = True
    mask: Any = None
    width: str | float | None = None
    dpi: int | None = None
    font: str | None = None
    columns: int | None = None
    labels: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.columns is not None and (isinstance(self.columns, bool) or self.columns < 1):
            raise InputError(f"columns must be a whole number above 0, not {self.columns!r}")
        if isinstance(self.labels, str):
            raise InputError("labels are a list of names, one for each method")

    def labelled(self, methods: Sequence[str]) -> tuple[str, ...]:
        """Give the names under which methods are shown: their labels, or their spellings.

        Raises:
            InputError: There are more or fewer labels than methods.
        """
        if self.labels is None:
            return tuple(methods)
        if not self.labels:
            return ("",) * len(methods)
        if len(self.labels) != len(methods):
            raise InputError(
                f"labels must name every method: {len(methods)} are shown, and {len(self.labels)} labels were given"
            )
        return tuple(map(str, self.labels))


class FigureOptions(TypedDict, total=False):
    """The fields of ``Look`` as keyword arguments of figures."""

    smooth: bool
    opacity: float
    cmap: str | None
    context: bool
    shared_scale: bool | None
    from_zero: bool
    mask: Any
    width: str | float | None
    dpi: int | None
    font: str | None
    columns: int | None
    labels: Sequence[str] | None


def look_with(look: Look | None, options: FigureOptions) -> Look:
    """Change some fields of a look.

    Raises:
        InputError: There is no such field.
    """
    known = [one.name for one in fields(Look)]
    for name in options:
        if name not in known:
            hint = close_match(name, known) or f"; they have {', '.join(known)}"
            raise InputError(f"figures have no option {name!r}{hint}")
    return replace(look or Look(), **options)


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


def display_maps(
    scores: torch.Tensor,
    grid: Size,
    size: Size,
    *,
    signed: bool,
    smooth: bool,
    geometry: PatchGeometry | None = None,
    from_zero: bool = True,
) -> torch.Tensor:
    """Scale every map for display and enlarge it.

    Args:
        scores: Raw scores (..., patches), any floating dtype.
        grid: Rows and columns of patches, behind the depth of a volume.
        size: Height and width of the result, behind its depth.
        signed: Divide by the largest absolute value, into [-1, 1], so that zero stays zero; otherwise divide by the
            largest value, into [0, 1]; scores below zero are shown as zero, unless none is above.
        smooth: Interpolate bilinearly between patch centres, trilinearly in volumes; otherwise every patch is a
            rectangle of one value.
        geometry: Where patches are centred; equal cells by default.
        from_zero: Scales of unsigned maps start at zero; otherwise at the smallest score.

    Returns:
        Maps (..., height, width) in float32, or float64 for float64 scores. A constant map becomes all zeros.
    """
    maps = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).reshape(-1, 1, *grid)
    axes = len(grid)
    maps = _fill_range(maps, signed=signed, from_zero=from_zero, axes=axes)
    if geometry is not None and geometry.applies_to(grid):
        maps = enlarge(maps, size, geometry, smooth=smooth)
        maps = _fill_range(maps, signed=signed, from_zero=from_zero, axes=axes) if smooth else maps
    elif smooth:
        # Interpolation can miss a patch's centre and so its peak; the range is filled again afterwards. It is filled
        # before as well because rounding in the interpolation of a constant map would be stretched into a pattern.
        enlarged = functional.interpolate(maps, size=size, mode=INTERPOLATION[axes], align_corners=False)
        maps = _fill_range(enlarged, signed=signed, from_zero=from_zero, axes=axes)
    else:
        maps = functional.interpolate(maps, size=size, mode="nearest-exact")
    return maps.reshape(*scores.shape[:-1], *size)


def sliced(explanation: Explanation, number: int | None, axis: int, *, smooth: bool) -> Explanation:
    """Give the explanation of one slice of volumes or one frame of clips, see ``Explanation.slice``."""
    if len(explanation.grid) != 3:
        raise InputError("an explanation of images has no slices; one of volumes or clips has")
    if axis not in {0, 1, 2}:
        raise InputError(f"axis must be 0, 1 or 2, not {axis!r}")
    size, geometry, images = explanation.image_size, explanation.geometry, explanation.images
    number = highest_slice(explanation, axis=axis) if number is None else operator.index(number)
    if not -size[axis] <= number < size[axis]:
        raise InputError(f"there are {size[axis]} slices along axis {axis}, counted from 0, and no slice {number}")
    number %= size[axis]
    left = [other for other in range(3) if other != axis]
    if geometry is not None:
        offset, pitch = (tuple(part[other] for other in left) for part in (geometry.offset, geometry.pitch))
        geometry = PatchGeometry(offset, pitch, tuple(geometry.image_size[other] for other in left))
    return replace(
        explanation,
        scores={method: _scores_of_slice(explanation, method, number, axis, smooth) for method in explanation.methods},
        grid=tuple(explanation.grid[other] for other in left),
        image_size=tuple(size[other] for other in left),
        images=None if images is None else tuple(slice_of_film(film, size, number, axis) for film in images),
        geometry=geometry,
        preprocessing=None,
        provenance={**explanation.provenance, "slice": number, "axis": axis},
    )


def highest_slice(
    explanation: Explanation, method: str | None = None, index: int = 0, target_index: int = 0, *, axis: int = 0
) -> int:
    """Find the slice in the middle of the patch that has the highest score of a volume."""
    method = explanation.methods[0] if method is None else method
    grid = explanation.grid_of(method)
    place = int(explanation.scores_of(method, index, target_index).nan_to_num(-math.inf).argmax())
    cell = place // math.prod(grid[axis + 1 :]) % grid[axis]
    weights = _slice_weights(explanation, grid, axis, smooth=False)
    (inside,) = (weights[:, cell] > 0).nonzero(as_tuple=True)
    return int(inside[len(inside) // 2]) if len(inside) else 0


def _slice_weights(explanation: Explanation, grid: Size, axis: int, *, smooth: bool) -> torch.Tensor:
    """What each patch along an axis of a volume counts in each slice, (slices, patches)."""
    length, geometry = explanation.image_size[axis], explanation.geometry
    places = (torch.arange(length, dtype=torch.float64) + 0.5) / length
    if geometry is not None and geometry.applies_to(grid):
        return line_weights(geometry.positions(axis, places), grid[axis], smooth=smooth)
    return line_weights(places * grid[axis], grid[axis], smooth=smooth)


def _scores_of_slice(
    explanation: Explanation,
    method: str,
    number: int,
    axis: int,
    smooth: bool,  # noqa: FBT001
) -> torch.Tensor:
    maps = explanation.maps(method)
    weights = _slice_weights(explanation, explanation.grid_of(method), axis, smooth=smooth)[number].to(maps)
    if not smooth:
        return maps.select(axis - 3, int(weights.argmax())).flatten(-2)
    return (maps.movedim(axis - 3, -1) * weights).sum(dim=-1).flatten(-2)


def slice_of_film(film: Image.Image, size: Size, number: int, axis: int = 0) -> Image.Image:
    """Cut one slice out of an image of all slices of a volume, one below the other.

    Args:
        film: The image; slices may have more pixels than the volume has voxels.
        size: Depth, height and width of the volume.
        number: Which slice.
        axis: Across which axis slices lie.

    Raises:
        InputError: It is no such image.
    """
    depth, rows, columns = size
    if film.height % depth:
        raise InputError(f"an image of a volume has its {depth} slices one below the other, all of one height")
    height = film.height // depth
    if axis == 0:
        return film.crop((0, number * height, film.width, (number + 1) * height))
    if axis == 1:
        row = number * height // rows
        lines = [film.crop((0, place * height + row, film.width, place * height + row + 1)) for place in range(depth)]
        page = film.resize((film.width, depth))
        for place, line in enumerate(lines):
            page.paste(line, (0, place))
        return page
    column = number * film.width // columns
    line = film.crop((column, 0, column + 1, film.height))
    page = film.resize((height, depth))
    for place in range(depth):
        across = line.crop((0, place * height, 1, (place + 1) * height))
        page.paste(across.transpose(Transpose.TRANSPOSE), (0, place))
    return page


def framed_maps(
    scores: torch.Tensor,
    grid: Size,
    frame: Frame,
    *,
    signed: bool,
    smooth: bool,
    span: tuple[float, float] | None = None,
    geometry: PatchGeometry | None = None,
    from_zero: bool = True,
) -> torch.Tensor:
    """Scale maps for display, at the size of the original image.

    Args:
        scores: Raw scores (..., patches).
        grid: Rows and columns of patches.
        frame: Which part of the photo they belong to.
        signed: See ``display_maps``.
        smooth: See ``display_maps``.
        span: The smallest and largest raw score that several maps share, so that their colours can be compared; by
            default every map fills the range by itself.
        geometry: See ``display_maps``.
        from_zero: See ``display_maps``; of no effect with a ``span``.

    Returns:
        Values (..., height, width) of the pixels that the model sees.
    """
    maps = scores.detach().to(torch.promote_types(scores.dtype, torch.float32)).reshape(*scores.shape[:-1], *grid)
    if span is None:
        filled = _fill_range(maps, signed=signed, from_zero=from_zero)
        placed = frame.place(filled, smooth=smooth, geometry=geometry)
        return _fill_range(placed, signed=signed, from_zero=from_zero) if smooth else placed
    low, high = (-max(map(abs, span)), max(map(abs, span))) if signed else span
    if high <= low:
        return torch.zeros_like(frame.place(maps, smooth=smooth))
    unit = (maps - low) / (high - low)
    return frame.place(2 * unit - 1 if signed else unit, smooth=smooth, geometry=geometry).clamp(-1 if signed else 0, 1)


def _fill_range(maps: torch.Tensor, *, signed: bool, from_zero: bool, axes: int = 2) -> torch.Tensor:
    """Scale each map of so many last axes into [0, 1], or [-1, 1] when signed; constant maps become zero."""
    last = tuple(range(-axes, 0))
    peak = maps.abs().amax(dim=last, keepdim=True)
    unit = maps / torch.where(peak > 0, peak, 1)
    lowest, highest = unit.amin(dim=last, keepdim=True), unit.amax(dim=last, keepdim=True)
    constant = highest - lowest <= 4 * torch.finfo(maps.dtype).eps
    start, _ = colour_range(lowest, highest, signed=False, from_zero=from_zero)
    scaled = unit if signed else ((unit - start) / torch.where(constant, 1, highest - start)).clamp(min=0)
    return torch.where(constant, 0, scaled)


def colour_range(
    lowest: torch.Tensor, highest: torch.Tensor, *, signed: bool, from_zero: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ends of the colour scale of maps, given their lowest and highest scores.

    A signed scale is symmetric around zero. An unsigned one starts at zero, and what lies below has no colour; a map
    without a score above zero is shown from its lowest score, or nothing would be seen. maps.js of the web page has the
    same rule.

    Args:
        lowest: Lowest scores, of any shape.
        highest: Highest scores.
        signed: Whether the sign of the scores carries meaning.
        from_zero: False starts unsigned scales at the lowest score.
    """
    if signed:
        largest = torch.maximum(lowest.abs(), highest.abs())
        return -largest, largest
    return torch.where(highest > 0, torch.zeros_like(lowest), lowest) if from_zero else lowest, highest

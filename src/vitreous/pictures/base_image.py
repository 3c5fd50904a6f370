"""The image under a heatmap, and quick pictures on it: one overlay, or methods side by side.

A base image is a photo in its own resolution and aspect, with the part of it that the model saw. Quick pictures are
drawn with Pillow alone, for folders and notebooks. Figures for print are in ``figures``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from PIL import Image, ImageDraw

from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation, ExplanationError
from vitreous.explanation.views import Look, framed_maps, highest_slice, register_view
from vitreous.inputs.images import read_image
from vitreous.inputs.patch_geometry import Frame, plane
from vitreous.models.pixels import Drawable, Photo
from vitreous.pictures.canvas import FAINT, INK, class_caption, draw_lines, line_height, placeholder, wrap
from vitreous.pictures.style import font, overlay

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vitreous.inputs.patch_geometry import PatchGeometry, Size


# Pixels that the model did not see are dimmed: no colour there does not mean "no evidence".
_DIM = 0.4
_OUTLINE = ((0, 0, 0), (255, 255, 255))  # a white line on a black one shows on any photo
_OUTLINE_WIDTH = 220  # the white line is as wide as the image by this


@dataclass(frozen=True)
class BaseImage:
    """A photo with the frame of what the model saw of it.

    Attributes:
        photo: The photo, or the image as the model saw it.
        frame: The part of it that the model saw.
        note: A sentence for the figure when it is not a photo, such as a normalised tensor.
        geometry: Where in the model's input patches are centred; ``None`` for equal cells.
        mask: Regions of the photo whose outline is drawn on maps, of the photo's size.
    """

    photo: Image.Image
    frame: Frame
    note: str = ""
    geometry: PatchGeometry | None = None
    mask: Image.Image | None = None

    @property
    def name(self) -> str:
        """Heading of the column that shows it."""
        return "input" if self.note else "photo"

    @classmethod
    def of(cls, explanation: Explanation, index: int = 0, photo: Photo | None = None) -> Self:
        """Find the base image of one image of an explanation.

        Args:
            explanation: The explanation to draw.
            index: Which image of the batch.
            photo: The photo before preprocessing; by default the image as the model saw it.

        Raises:
            InputError: It is a volume or a clip, there is no image, or the model's part of the photo is not known.
        """
        index, _ = explanation.position(index)
        plane(explanation.grid)
        if photo is not None:
            if explanation.preprocessing is None:
                raise InputError(
                    "it is not known which part of the photo the model saw, since its preprocessing is not; "
                    "pass the picture as the model saw it, resized and cropped, as image=..."
                )
            upright = read_image(photo)
            frame = explanation.preprocessing.frame((upright.height, upright.width))
            return cls(upright, frame, geometry=explanation.geometry)
        if explanation.images is None:
            raise InputError(
                "this explanation holds no pictures; pass the one to draw on as image=..."
                + ("" if explanation.preprocessing is None else ", or the whole photo as photo=...")
            )
        picture = explanation.images[index]
        whole = Frame.whole((picture.height, picture.width))
        return cls(picture, whole, explanation.images_note or "", explanation.geometry)

    def fitted(self, width: int, height: int) -> BaseImage:
        """Scale the photo up or down so that it just fits into a box."""
        scale = min(width / self.photo.width, height / self.photo.height)
        new_width, new_height = (max(1, round(side * scale)) for side in self.photo.size)
        photo = self.photo.resize((new_width, new_height), Image.Resampling.LANCZOS)
        mask = None if self.mask is None else self.mask.resize(photo.size, Image.Resampling.NEAREST)
        return replace(self, photo=photo, frame=self.frame.scaled((new_height, new_width)), mask=mask)

    def cropped(self) -> BaseImage:
        """Return the part of the photo that the model saw."""
        rows, columns = self.frame.rows, self.frame.columns
        if (rows.stop - rows.start, columns.stop - columns.start) == (self.photo.height, self.photo.width):
            return self
        box = (columns.start, rows.start, columns.stop, rows.stop)
        frame = Frame(
            (rows.stop - rows.start, columns.stop - columns.start),
            self.frame.top - rows.start,
            self.frame.left - columns.start,
            self.frame.bottom - rows.start,
            self.frame.right - columns.start,
        )
        mask = None if self.mask is None else self.mask.crop(box)
        return replace(self, photo=self.photo.crop(box), frame=frame, mask=mask)

    def with_mask(self, mask: Any) -> BaseImage:
        """Add regions whose outline is drawn on maps: an array (height, width) or an image; 0 is background.

        They have the size of the photo, or of the part that the model saw.

        Raises:
            InputError: They have neither.
        """
        if mask is None:
            return self
        regions = Image.fromarray((_region_numbers(mask) > 0).astype(np.uint8) * 255)
        if regions.size == self.photo.size:
            return replace(self, mask=regions)
        rows, columns = self.frame.rows, self.frame.columns
        seen = (columns.stop - columns.start, rows.stop - rows.start)
        if abs(regions.width * seen[1] - regions.height * seen[0]) > max(*seen, *regions.size):
            raise InputError(
                f"a mask of {regions.height}x{regions.width} pixels does not fit the photo of "
                f"{self.photo.height}x{self.photo.width}"
            )
        page = Image.new("L", self.photo.size)
        page.paste(regions.resize(seen, Image.Resampling.NEAREST), (columns.start, rows.start))
        return replace(self, mask=page)

    def outlined(self, picture: Image.Image) -> Image.Image:
        """Draw the outline of the mask on a picture of the photo's size."""
        if self.mask is None:
            return picture
        width = max(1, round(max(picture.size) / _OUTLINE_WIDTH))
        inside = np.asarray(self.mask.resize(picture.size, Image.Resampling.NEAREST)) > 0
        drawn = np.asarray(picture).copy()
        # The wider black line first; both lie on the edge, half inside and half outside.
        for colour, reach in zip(_OUTLINE, (2 * width + 1, width), strict=True):
            drawn[_edge(inside, (reach + 1) // 2)] = colour
        return Image.fromarray(drawn)

    def lay(
        self,
        scores: Tensor,
        grid: Size,
        *,
        signed: bool,
        look: Look | None = None,
        span: tuple[float, float] | None = None,
    ) -> Image.Image:
        """Lay one map over the photo; pixels that the model did not see are dimmed and get no colour.

        Args:
            scores: Raw scores (patches,).
            grid: Rows and columns of patches.
            signed: Whether the sign of the scores carries meaning.
            look: How maps are drawn.
            span: See ``framed_maps``.
        """
        look = look or Look()
        if not bool(scores.isfinite().all()):
            raise InputError("the scores contain NaN or infinity and cannot be shown")
        rows, columns = self.frame.rows, self.frame.columns
        heatmap = framed_maps(
            scores.cpu(),
            grid,
            self.frame,
            signed=signed,
            smooth=look.smooth,
            span=span,
            geometry=self.geometry,
            from_zero=look.from_zero,
        ).numpy()
        seen = self.photo.crop((columns.start, rows.start, columns.stop, rows.stop))
        coloured = overlay(seen, heatmap, signed=signed, opacity=look.opacity, cmap=look.cmap)
        if seen.size == self.photo.size:
            return self.outlined(coloured)
        page = self.dimmed()
        page.paste(coloured, (columns.start, rows.start))
        return self.outlined(page)

    def dimmed(self) -> Image.Image:
        """Return the photo in darker colours."""
        # A table of 256 values instead of arithmetic on every pixel: photos may be large.
        table = np.rint(np.arange(256) * _DIM).astype(int).tolist()
        return self.photo.convert("RGB").point(table * 3)


def _edge(inside: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Return the pixels that have others of the other kind at most so many pixels away, down or across."""
    edge = np.zeros_like(inside)
    for axis in (0, 1):
        for distance in range(1, reach + 1):
            here, there = (np.moveaxis(part, axis, 0) for part in (inside, edge))
            differs = here[distance:] != here[:-distance]
            there[distance:] |= differs
            there[:-distance] |= differs
    return edge


def _region_numbers(mask: Any) -> NDArray[Any]:
    """Read a mask as an array (height, width)."""
    found = np.asarray(mask.convert("L") if isinstance(mask, Image.Image) else mask)
    if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "buif":
        raise InputError(f"a mask is an image or an array (height, width), not {found.dtype} {found.shape}")
    return found


_MARGIN = 16
_GAP = 12
_CAPTION_LINES = 3
_NOTE_LINES = 5
_LEGEND_HEIGHT = 10


@register_view(Explanation, "overlay")
def draw_overlay(
    explanation: Explanation,
    method: str,
    index: int = 0,
    target_index: int = 0,
    *,
    look: Look | None = None,
    photo: Photo | None = None,
) -> Image.Image:
    """Lay one map over its image, as ``Explanation.overlay`` does, without a warning about normalised tensors.

    Of a volume or clip all slices or frames are drawn, one below the other.
    """
    look = look or Look()
    scores, signed = explanation.scores_of(method, index, target_index), explanation.signed[method]
    if photo is not None:
        base = BaseImage.of(explanation, index, photo)
        return base.lay(scores, explanation.grid_of(method), signed=signed, look=look)
    if explanation.images is None:
        raise ExplanationError("this explanation holds no pictures; pass the one to draw on as image=...")
    picture = explanation.images[index]
    size: tuple[int, ...] = (picture.height, picture.width)
    if len(explanation.grid) == 3:
        depth = explanation.image_size[0]
        size = (depth, picture.height // depth, picture.width)
    heatmap = explanation.display_map(method, index, target_index, smooth=look.smooth, size=size)
    flat = heatmap.reshape(picture.height, picture.width).cpu().numpy()
    return overlay(picture, flat, signed=signed, opacity=look.opacity)


def comparison(
    explanation: Explanation,
    index: int = 0,
    *,
    methods: Sequence[str] | None = None,
    image: Drawable | None = None,
    tile: int = 288,
) -> Image.Image:
    """Draw the photo and every method's overlay in a row, one row per explained class.

    A map with NaN or infinity becomes a placeholder that says so.

    Args:
        explanation: The explanation to draw.
        index: Which image of the batch.
        methods: The methods to show, in this order; all by default.
        image: The image as the model saw it, see ``Explanation.overlay``; by default the explanation's own.
        tile: Longer side of each tile, in pixels.

    Of a volume or clip the slice or frame with the highest score of the first method is shown.
    """
    if len(explanation.grid) == 3:
        shown = (methods or explanation.methods)[0]
        explanation = explanation.slice(highest_slice(explanation, shown, index))
    if image is not None:
        index, _ = explanation.position(index)
        explanation, index = explanation.select(index).with_images(image), 0
    photo = _tile_photo(_photo(explanation, index), tile)
    tiles = replace(explanation.select(index), images=(photo,))
    columns = tuple(methods or explanation.methods)
    targets = range(explanation.classes_per_image)
    row_images = [_row(tiles, target_index, photo, columns) for target_index in targets]
    header = _header(columns, photo.width, "input" if explanation.images_note else "photo")
    legend = _legend(explanation, columns, photo.width)
    note = [_note(explanation.images_note, legend.width)] if explanation.images_note else []
    return _stack([header, *row_images, legend, *note])


def _photo(explanation: Explanation, index: int) -> Image.Image:
    if explanation.images is None:
        raise InputError("this explanation holds no pictures; pass the one to draw on as image=...")
    index, _ = explanation.position(index)
    return explanation.images[index]


def _tile_photo(photo: Image.Image, tile: int) -> Image.Image:
    """Scale a photo up or down so that its longer side is ``tile`` pixels."""
    scale = tile / max(photo.size)
    width, height = (max(1, round(side * scale)) for side in photo.size)
    return photo.resize((width, height), Image.Resampling.LANCZOS)


def _blank(columns: int, tile_width: int, height: int) -> Image.Image:
    """Make a white strip as wide as the photo and ``columns`` methods."""
    return Image.new("RGB", (2 * _MARGIN + (columns + 1) * tile_width + columns * _GAP, height), "white")


def _left(column: int, tile_width: int) -> int:
    return _MARGIN + column * (tile_width + _GAP)


def _header(methods: Sequence[str], tile_width: int, first: str) -> Image.Image:
    """Draw the captions above the columns, aligned at their bottom."""
    style = font(15, bold=True)
    captions = [wrap(caption, style, tile_width, lines=_CAPTION_LINES) for caption in (first, *methods)]
    tallest = max(len(lines) for lines in captions)
    strip = _blank(len(methods), tile_width, _MARGIN + tallest * line_height(style) + 4)
    draw = ImageDraw.Draw(strip)
    for column, lines in enumerate(captions):
        top = _MARGIN + (tallest - len(lines)) * line_height(style)
        draw_lines(draw, (_left(column, tile_width), top), lines, style, INK)
    return strip


def _row(explanation: Explanation, target_index: int, photo: Image.Image, methods: Sequence[str]) -> Image.Image:
    """Draw the photo, the overlays, and below the photo the class that they explain."""
    style = font(15)
    caption = class_caption(explanation, 0, target_index)
    strip = _blank(len(methods), photo.width, photo.height + 6 + line_height(style) + _GAP)
    strip.paste(photo, (_left(0, photo.width), 0))
    for column, method in enumerate(methods, start=1):
        if explanation.shows(method, 0, target_index):
            picture = draw_overlay(explanation, method, 0, target_index)
        else:
            picture = placeholder(photo.size)
        strip.paste(picture, (_left(column, photo.width), 0))
    width = strip.width - 2 * _MARGIN
    lines = wrap(caption, style, width, lines=1)
    draw_lines(ImageDraw.Draw(strip), (_MARGIN, photo.height + 6), lines, style, INK)
    return strip


def _legend(explanation: Explanation, methods: Sequence[str], tile_width: int) -> Image.Image:
    """Draw the colour bar of each column."""
    style = font(12)
    strip = _blank(len(methods), tile_width, _LEGEND_HEIGHT + 4 + line_height(style) + _MARGIN)
    draw = ImageDraw.Draw(strip)
    grey = Image.new("RGB", (tile_width, _LEGEND_HEIGHT), "#808080")
    for column, method in enumerate(methods, start=1):
        signed = explanation.signed[method]
        ramp = np.linspace(-1.0 if signed else 0.0, 1.0, tile_width)
        heatmap = np.broadcast_to(ramp, (_LEGEND_HEIGHT, tile_width))
        left = _left(column, tile_width)
        strip.paste(overlay(grey, heatmap, signed=signed), (left, 0))
        low, high = ("against", "for") if signed else ("low", "high")
        top = _LEGEND_HEIGHT + 2
        draw.text((left, top), low, fill=FAINT, font=style)
        draw.text((left + tile_width, top), high, fill=FAINT, font=style, anchor="ra")
    return strip


def _note(text: str, width: int) -> Image.Image:
    """Draw the note on what the image is."""
    style = font(12)
    lines = wrap(text, style, width - 2 * _MARGIN, lines=_NOTE_LINES)
    strip = Image.new("RGB", (width, len(lines) * line_height(style) + _MARGIN), "white")
    draw_lines(ImageDraw.Draw(strip), (_MARGIN, 0), lines, style, FAINT)
    return strip


def _stack(strips: Sequence[Image.Image]) -> Image.Image:
    """Stack strips of one width."""
    page = Image.new("RGB", (strips[0].width, sum(strip.height for strip in strips)), "white")
    top = 0
    for strip in strips:
        page.paste(strip, (0, top))
        top += strip.height
    return page

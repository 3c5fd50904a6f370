"""Quick pictures drawn with Pillow alone, on the image as the model saw it: one overlay, and methods side by side.

They serve folders and notebooks. Figures for print, in the photo's own resolution, are in ``figures``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image, ImageDraw

from vitreous.errors import InputError
from vitreous.explanation.explanation import Explanation, ExplanationError
from vitreous.explanation.views import Look, highest_slice, register_view
from vitreous.models.display_images import Drawable, Photo
from vitreous.pictures.base_image import BaseImage
from vitreous.pictures.captions import FAINT, INK, class_caption, draw_lines, line_height, placeholder, wrap
from vitreous.pictures.colours import overlay
from vitreous.pictures.style import font

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

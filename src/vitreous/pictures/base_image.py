"""The image under a heatmap: a photo in its own resolution and aspect, and the part of it that the model saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from PIL import Image

from vitreous.errors import InputError
from vitreous.explanation.views import Look, framed_maps
from vitreous.inputs.images import read_image
from vitreous.inputs.patch_geometry import Frame, plane
from vitreous.pictures.colours import overlay

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from vitreous.explanation.explanation import Explanation
    from vitreous.inputs.patch_geometry import PatchGeometry, Size
    from vitreous.models.display_images import Photo

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
        """Give the part of the photo that the model saw."""
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
        """Give the photo in darker colours."""
        # A table of 256 values instead of arithmetic on every pixel: photos may be large.
        table = np.rint(np.arange(256) * _DIM).astype(int).tolist()
        return self.photo.convert("RGB").point(table * 3)


def _edge(inside: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """Give the pixels that have others of the other kind at most so many pixels away, down or across."""
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

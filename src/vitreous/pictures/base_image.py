"""The image under a heatmap: a photo in its own resolution and aspect, and the part of it that the model saw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import numpy as np
from PIL import Image

from vitreous.errors import InputError
from vitreous.explanation.views import Look, framed_maps
from vitreous.inputs.images import read_image
from vitreous.inputs.patch_geometry import Frame
from vitreous.pictures.colours import overlay

if TYPE_CHECKING:
    from torch import Tensor

    from vitreous.explanation.explanation import Explanation
    from vitreous.inputs.patch_geometry import PatchGeometry
    from vitreous.models.display_images import Photo

# Pixels that the model did not see are grey and faded towards white: no colour there does not mean "no evidence".
_FADE = 0.45


@dataclass(frozen=True)
class BaseImage:
    """A photo with the frame of what the model saw of it.

    Attributes:
        photo: The photo, or the image as the model saw it.
        frame: The part of it that the model saw.
        note: A sentence for the figure when it is not a photo, such as a normalised tensor.
        geometry: Where in the model's input patches are centred; ``None`` for equal cells.
    """

    photo: Image.Image
    frame: Frame
    note: str = ""
    geometry: PatchGeometry | None = None

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
        """
        index, _ = explanation.position(index)
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
        return replace(self, photo=photo, frame=self.frame.scaled((new_height, new_width)))

    def lay(
        self,
        scores: Tensor,
        grid: tuple[int, int],
        *,
        signed: bool,
        look: Look | None = None,
        span: tuple[float, float] | None = None,
    ) -> Image.Image:
        """Lay one map over the photo; pixels that the model did not see get no colour.

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
            scores.cpu(), grid, self.frame, signed=signed, smooth=look.smooth, span=span, geometry=self.geometry
        ).numpy()
        seen = self.photo.crop((columns.start, rows.start, columns.stop, rows.stop))
        coloured = overlay(seen, heatmap, signed=signed, opacity=look.opacity)
        if seen.size == self.photo.size:
            return coloured
        page = _faded(self.photo)
        page.paste(coloured, (columns.start, rows.start))
        return page


def _faded(photo: Image.Image) -> Image.Image:
    # A table of 256 values instead of arithmetic on every pixel: photos may be large.
    table = np.rint(np.arange(256) * (1 - _FADE) + 255 * _FADE).astype(int).tolist()
    return photo.convert("L").point(table).convert("RGB")

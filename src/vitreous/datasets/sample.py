"""What a data set holds: photos or texts, each with what people said about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Mask = NDArray[np.int16]

Things = Literal["photos", "texts"]


@dataclass(frozen=True)
class Sample:
    """One photo of a data set and what is known of it.

    Attributes:
        name: Unique in its data set and the same on every machine.
        image: The photo, upright RGB, as stored.
        label: The index of the model's output that is right, where it is known.
        mask: (height, width) of the image: 0 background, n the n-th object, -1 not counted; None where there is none.
        objects: The class of object 1, 2, ...; None where a mask says that something is an object, but not which.
    """

    name: str
    image: Image.Image
    label: int | None = None
    mask: Mask | None = None
    objects: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Review:
    """One text of a data set and what is known of it.

    Attributes:
        name: Unique in its data set and the same on every machine.
        words: The text as the data set counts its words: what is between white space.
        label: The index of the data set's class that is right.
        rationale: For each word whether people marked it as a reason.
    """

    name: str
    words: tuple[str, ...]
    label: int
    rationale: NDArray[np.bool_]

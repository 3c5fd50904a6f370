"""The figures whose pictures are kept in tests/golden/figures, from made-up numbers; run it to write them anew."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitreous.explanation.explanation import Explanation
from vitreous.models.preprocessing import Preprocessing
from vitreous.pictures.charts import curves_figure
from vitreous.pictures.curves import Curves
from vitreous.pictures.figures import (
    Shown,
    classes_figure,
    comparison_figure,
    overlay_figure,
    strips_figure,
    transformation_figure,
)
from vitreous.pictures.strips import Strip, Transformation

FOLDER = Path(__file__).parents[1] / "golden" / "figures"
GRID = (6, 6)
POSITIVE, SIGNED = "tokentm", "gradtoken:heads=average"


def photo(width=96, height=64):
    """A photo without noise, so that its PNG is small: a disc on a ramp."""
    rows, columns = np.mgrid[0:height, 0:width]
    disc = (rows - height * 0.4) ** 2 + (columns - width * 0.3) ** 2 < (height * 0.3) ** 2
    channels = [60 + columns * 120 // width, np.full_like(rows, 120), 60 + rows * 120 // height]
    picture = np.where(disc[..., None], (230, 180, 60), np.stack(channels, axis=-1))
    return Image.fromarray(picture.astype(np.uint8))


def bump(row, column):
    """A smooth map with its peak at a patch: neither direction is symmetric."""
    rows, columns = np.mgrid[0 : GRID[0], 0 : GRID[1]]
    return torch.from_numpy(np.exp(-((rows - row) ** 2 / 4 + (columns - column) ** 2 / 2))).flatten()


def explanation(change=lambda maps: maps):
    """One image, two classes, a positive and a signed method; ``change`` is applied to the maps (6, 6)."""
    positive = torch.stack([bump(1, 1), bump(4, 2)])
    signed = torch.stack([bump(1, 1) - 0.7 * bump(4, 5), bump(4, 2) - bump(1, 4)])
    scores = {POSITIVE: positive, SIGNED: signed}
    return Explanation(
        scores={name: change(maps.view(2, *GRID)).reshape(1, 2, -1) for name, maps in scores.items()},
        grid=GRID,
        target=torch.tensor([[0, 1]]),
        logits=torch.tensor([[2.0, 1.0, 0.0]]),
        image_size=(48, 48),
        signed={POSITIVE: False, SIGNED: True},
        class_names=("tabby cat", "$100 & <b>", "猫"),
        preprocessing=Preprocessing(image_size=(48, 48), mean=(0.5,) * 3, std=(0.5,) * 3),
    )


def strip(change, *, signed):
    maps = [
        change((bump(n, 5 - n) - (0.5 * bump(5 - n, 5 - n) if signed else 0)).view(GRID)).flatten() for n in range(5)
    ]
    captions = tuple(f"block {number}" for number in range(5))
    return Strip(SIGNED if signed else POSITIVE, explanation(), captions, torch.stack(maps), signed, shared=signed)


def curves(change):
    fractions = np.linspace(0, 1, 11)
    fast, slow = (1 - fractions) ** 3, 1 - fractions**2
    if change(torch.arange(36).view(GRID)).flatten()[0] != 0:  # what is wrong with maps is wrong with their curves
        fast, slow = slow, fast
    return [Curves(POSITIVE, fractions, fast, fast[::-1].copy()), Curves(SIGNED, fractions, slow, slow[::-1].copy())]


def transformation(change):
    parts = [change(bump(row, column).view(GRID)).flatten() for row, column in ((0, 1), (2, 4), (4, 1), (1, 2))]
    return Transformation(explanation(change), 3, *parts)


FIGURES = {
    "overlay": lambda change: overlay_figure(explanation(change), photo=photo()),
    "comparison": lambda change: comparison_figure(
        [Shown(explanation(change), 0, photo()), Shown(explanation(change), 0, photo(40, 80))], tile=110
    ),
    "classes": lambda change: classes_figure(explanation(change), photo=photo(), tile=130),
    "depth": lambda change: strips_figure([strip(change, signed=False)], photo=photo(), tile=90, columns=4),
    "heads": lambda change: strips_figure([strip(change, signed=True)], photo=photo(), tile=90),
    "curves": lambda change: curves_figure(curves(change), caption="tabby cat · 66.5%"),
    "transformation": lambda change: transformation_figure(transformation(change), photo=photo(), tile=120),
}


def drawn(name, change=lambda maps: maps):
    return FIGURES[name](change).image(scale=1)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for figure in FIGURES:
        drawn(figure).save(FOLDER / f"{figure}.png", optimize=True)

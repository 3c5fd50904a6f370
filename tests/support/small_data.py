"""A small loaded model and generated photos with labels and masks, for tests of protocols."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from small_models import CLASSES, SIZE, small_vit
from vitreous.datasets.dataset import Sample
from vitreous.models import LoadedModel, Preprocessing


def loaded(model: nn.Module | None = None, *, size: int = SIZE, depth: int = 3) -> LoadedModel:
    """A model as vitreous loads it, float64 unless another is given."""
    preprocessing = Preprocessing((size, size), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), interpolation="bilinear")
    return LoadedModel("small", model or small_vit(depth=depth), preprocessing, None)


def samples(count: int = 3, *, classes: int = CLASSES, seed: int = 0, size: tuple[int, int] = (40, 48)) -> list[Sample]:
    """Photos of noise, each with a label and a mask of two objects, a border that does not count and a background."""
    random = np.random.default_rng(seed)
    found = []
    for number in range(count):
        pixels = random.integers(0, 256, (*size, 3), dtype=np.uint8)
        mask = np.zeros(size, np.int16)
        mask[4:20, 5:25] = 1
        mask[22:30, 10:20] = 2
        mask[20:22, 5:25] = -1
        label = int(random.integers(classes))
        objects = (label, (label + 1) % classes)
        found.append(Sample(f"photo-{number}", Image.fromarray(pixels), label, mask, objects))
    return found


def finite(row: dict, columns) -> bool:
    """Whether a row has a number in every column and no error."""
    return row["error"] is None and all(np.isfinite(row[column]) for column in columns)


def arrays_in(file: Path) -> dict[str, np.ndarray]:
    """All arrays of a stored archive."""
    with np.load(file) as stored:
        return dict(stored)


def as_tensor(maps: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(maps))

"""A small loaded model and generated photos with labels and masks, for tests of protocols."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from small_models import CLASSES, SIZE, small_vit
from vitreous.datasets.dataset import Sample
from vitreous.evaluation.tasks.task import Batch, Case, Picture
from vitreous.models import LoadedModel, Preprocessing
from vitreous.tape.runner import ModelRunner


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


def batch_of(model: nn.Module, images: torch.Tensor, maps: dict[str, torch.Tensor], labels=None, black=None) -> Batch:
    """Photos with given maps, one per method and photo, the same for every class."""
    black = images.new_full((images.shape[1],), -1.0) if black is None else black
    runner = ModelRunner(model, images, black=black)
    logits = runner.logits(images)
    labels = logits.argmax(dim=1) if labels is None else labels
    pictures = tuple(
        Picture(f"{number}", int(row.argmax()), len(row), label=int(label))
        for number, (row, label) in enumerate(zip(logits, labels, strict=True))
    )
    given = {
        Case(number, method): dict.fromkeys(range(logits.shape[1]), map_)
        for method, each in maps.items()
        for number, map_ in enumerate(each)
    }
    return Batch(None, runner, pictures, logits, given)

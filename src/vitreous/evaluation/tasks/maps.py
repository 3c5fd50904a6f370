"""``KeepMaps``: the maps themselves and what lies under them, kept for an audit instead of a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vitreous._utils.torch_state import float64_array
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.tasks.patch_masking import patch_scores
from vitreous.evaluation.tasks.task import Case, ImageBatch, ImageTask, Picture, Values
from vitreous.inputs.patch_geometry import plane
from vitreous.metrics import perturbation
from vitreous.metrics.metric import Metric
from vitreous.tape import Needs

COLUMNS = (
    *("predicted", "label", "probability", "second", "rows", "columns", "masked"),
    *("red", "green", "blue", "map[]", "object[]", "features[]"),
)
_TOP = 0.1  # part of the patches whose tokens are averaged


@dataclass(frozen=True)
class KeepMaps(ImageTask):
    """The map of the predicted class, one half-precision number per patch, and what an audit reads besides.

    Columns: ``map[]`` divided by its largest absolute score; ``object[]``, the part of every patch that the object
    covers, from the mask (``masked`` is 1) or, without one, estimated from the tokens; ``features[]``, the mean token
    under the highest patches, of length 1; the mean of every channel near the border, outside of the mask; classes and
    probability.

    Attributes:
        explained: the class whose map is kept.
        tokens: which tokens features are made of.
        top: the part of the patches that counts as the peak of a map.
        estimate: how objects are found without masks.
    """

    kind: ClassVar[str] = "keep maps"

    explained: Literal["predicted"] = "predicted"
    tokens: Literal["input of the block halfway up"] = "input of the block halfway up"
    top: float = _TOP
    estimate: Literal["tokens unlike those of the outer patches"] = "tokens unlike those of the outer patches"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return ()

    @property
    def columns(self) -> tuple[str, ...]:
        return COLUMNS

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return (picture.predicted,)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        tokens = self._tokens(batch)
        chances = perturbation.probabilities(float64_array(batch.logits), outputs=batch.outputs)
        return [self._values(batch, case, tokens, chances[case.image]) for case in cases]

    def _values(self, batch: ImageBatch, case: Case, tokens: Tensor | None, chances: NDArray[np.float64]) -> Values:
        picture = batch.pictures[case.image]
        scores = patch_scores(batch, batch.map_of(case, picture.predicted)).detach().double().cpu()
        grid = plane(batch.runner.layout.grid)
        own = None if tokens is None else tokens[case.image]
        ranked = np.argsort(-chances, kind="stable")
        found: dict[str, Any] = {
            "predicted": float(picture.predicted),
            "label": None if picture.label is None else float(picture.label),
            "probability": float(chances[picture.predicted]),
            "second": float(ranked[1]) if len(ranked) > 1 else None,
            "rows": float(grid[0]),
            "columns": float(grid[1]),
            "masked": float(picture.mask is not None),
            **dict(zip(("red", "green", "blue"), _colour(batch, case.image, picture.mask), strict=True)),
            "map[]": _half(scores / scores.abs().max().clamp(min=1e-30)),
            "object[]": _half(_object(picture, grid, own)),
            "features[]": _half(self._features(scores, own)),
        }
        return found

    def _features(self, scores: Tensor, tokens: Tensor | None) -> Tensor | None:
        if tokens is None:
            return None
        count = max(1, round(self.top * len(scores)))
        highest = scores.argsort(descending=True, stable=True)[:count]
        return functional.normalize(tokens[highest].mean(dim=0), dim=0)

    def _tokens(self, batch: ImageBatch) -> Tensor | None:
        """Tokens of all patches, (images, patches, channels); None where the model does not show them."""
        runner = batch.runner
        layer = runner.architecture.depth // 2
        found = []
        try:
            for images in torch.split(batch.images, runner.at_once):
                with runner.record(images, Needs(tokens=frozenset({layer}))) as tape:
                    found.append(tape.tokens(layer)[:, tape.layout.prefix :].double().cpu())
        except UnsupportedModelError:
            return None
        tokens = torch.cat(found)
        return tokens if tokens.shape[1] == runner.layout.patches else None


def _colour(batch: ImageBatch, image: int, mask: NDArray[np.int16] | None) -> list[float]:
    """The mean of every channel above black in the outer sixths of a photo, where the object rarely is.

    What a mask says is the object is left out, unless nothing else is there. Grey photos have three equal ones.
    """
    pixels = batch.images[image].double().cpu()
    black = batch.runner.black
    floor = pixels.amin(dim=(1, 2)) if black is None else black.double().cpu()
    outer = torch.ones(pixels.shape[1:], dtype=torch.bool)
    high, wide = (max(1, side // 6) for side in outer.shape)
    outer[high:-high, wide:-wide] = False
    if mask is not None:
        outside = outer & torch.from_numpy(np.ascontiguousarray(mask <= 0))
        outer = outside if outside.any() else outer
    means = (pixels[:, outer] - floor[:, None]).mean(dim=1).clamp(min=0).tolist()
    return [means[number] if number < len(means) else means[-1] for number in range(3)]


def _object(picture: Picture, grid: tuple[int, int], tokens: Tensor | None) -> Tensor | None:
    """The part of every patch that belongs to the object, 0 to 1; pixels that do not count are left out."""
    if picture.mask is not None:
        mask = torch.from_numpy(np.ascontiguousarray(picture.mask))
        sums = [functional.adaptive_avg_pool2d(part.double()[None, None], grid) for part in (mask > 0, mask >= 0)]
        return (sums[0] / sums[1].clamp(min=1e-9)).flatten()
    return None if tokens is None else estimated_object(tokens, grid)


def estimated_object(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """Which patches are unlike the outer ones and near the centre, as 0 or 1: an estimate of where the object is."""
    rows, columns = (torch.arange(count, dtype=torch.float64) for count in grid)
    down, across = (2 * (rows + 0.5) / grid[0] - 1, 2 * (columns + 0.5) / grid[1] - 1)
    near = torch.exp(-(down[:, None] ** 2 + across[None, :] ** 2)).flatten()
    outer = torch.zeros(grid, dtype=torch.bool)
    outer[[0, -1], :] = True
    outer[:, [0, -1]] = True
    unit = functional.normalize(tokens - tokens.mean(dim=0), dim=1)
    alike = (unit @ unit[outer.flatten()].T).clamp(min=0).mean(dim=1)
    score = near * (1 - alike / alike.max().clamp(min=1e-12))
    return (score > score.mean()).double()


def _half(values: Tensor | None) -> NDArray[np.float16] | None:
    return None if values is None else values.numpy().astype(np.float16)

"""Tasks on patches: curves over dropped patches (True Token Masking: insertion, deletion, MIF and LIF), and kept maps.

Patches are ranked once per map. Inputs that keep the same number of patches are run together, whatever image, map or
curve they belong to, and no input is run twice. ``KeepMaps`` measures nothing: it keeps the maps and what lies under
them, for an audit.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vitreous._utils.torch_state import float64_array
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.tasks.pixel_masking import Orders, find_orders
from vitreous.evaluation.tasks.task import (
    NINE,
    Case,
    Explained,
    ImageBatch,
    ImageTask,
    MapTarget,
    MissingAnnotationError,
    Picture,
    Purpose,
    Values,
    explained_class,
)
from vitreous.inputs.model_io import ClassOutputs
from vitreous.inputs.patch_geometry import plane
from vitreous.inputs.target_objects import Contrast
from vitreous.methods.readout import layout_means
from vitreous.metrics import perturbation
from vitreous.metrics.metric import Floats, Metric, row
from vitreous.tape import Needs

Side = Literal["top", "bottom"]


class Kept(NamedTuple):
    """How many patches are kept, and which: the most or the least relevant."""

    side: Side
    number: int


class _KeptPatches(NamedTuple):
    name: Hashable
    image: int
    patches: Tensor


def kept_logits(batch: ImageBatch, orders: Orders, kept: Sequence[Kept]) -> Tensor:
    """The model's outputs for the kept patches, (orders, kept, classes)."""
    names = [[("kept", order.key, each) for each in kept] for order in orders.different]
    inputs: dict[int, dict[Hashable, _KeptPatches]] = {}
    for order, own in zip(orders.different, names, strict=True):
        ranking = patch_scores(batch, order.map).argsort(descending=True, stable=True)
        for name, (side, count) in zip(own, kept, strict=True):
            if count == len(ranking):  # the whole image, whose output is known
                batch.memory[name] = batch.logits[order.image]
            patches = ranking[:count] if side == "top" else ranking[len(ranking) - count :]
            if name not in batch.memory:
                inputs.setdefault(count, {})[name] = _KeptPatches(name, order.image, patches)
    for alike in inputs.values():
        _run(batch, list(alike.values()))
    flat = [batch.memory[name] for own in names for name in own]
    shape = (len(names), len(kept), batch.logits.shape[1])
    return torch.stack(flat).view(shape) if flat else batch.logits.new_empty(shape)


def patch_scores(batch: ImageBatch, map_: Tensor) -> Tensor:
    """One score per patch, (patches,); of a map of pixels, the means over the patches."""
    layout = batch.runner.layout
    if tuple(map_.shape) == layout.grid:
        return map_.flatten()
    return layout_means(map_.flatten(), tuple(map_.shape), layout)


def _run(batch: ImageBatch, inputs: Sequence[_KeptPatches]) -> None:
    """Run inputs that keep the same number of patches, a batch at a time, so that few images are copied at once."""
    runner = batch.runner
    for first in range(0, len(inputs), runner.batch):
        part = inputs[first : first + runner.batch]
        images = runner.images[[kept_patches.image for kept_patches in part]]
        logits = runner.logits_of_kept(images, torch.stack([kept_patches.patches for kept_patches in part]))
        batch.memory.update(zip((kept_patches.name for kept_patches in part), logits, strict=True))


@dataclass(frozen=True)
class TokenDropping(ImageTask):
    """What all curves over dropped patches have in common.

    Attributes:
        explained: The class whose map is measured, and whose probability and rank count.
        percent: How much is dropped or put in at each step.
        count: Patches at a ratio.
        dropping: How patches are dropped.
        prefix_tokens: Whether class, distillation and register tokens stay.
        ties: Which of equal patches ranks higher.
        area: How the steps and the unmasked image become one number, in percent.
    """

    purpose: ClassVar[Purpose] = "faithfulness"
    volumes: ClassVar[bool] = True
    explained: Explained = "label"
    percent: tuple[int, ...] = NINE
    count: Literal["floor(ratio * patches)"] = "floor(ratio * patches)"
    dropping: Literal["behind the positional embedding"] = "behind the positional embedding"
    prefix_tokens: Literal["stay"] = "stay"
    ties: Literal["the upper left one"] = "the upper left one"
    area: Literal["trapezoid over the ratio, with the unmasked point"] = (
        "trapezoid over the ratio, with the unmasked point"
    )

    def targets(self, picture: Picture) -> tuple[MapTarget, ...]:
        return (explained_class(picture, self.explained),)

    def outputs_along(
        self, batch: ImageBatch, cases: Sequence[Case], curves: Sequence[Sequence[Kept]]
    ) -> list[list[_CurveOutputs]]:
        """For every case, what is kept of the outputs along each curve."""
        targets = [explained_class(batch.pictures[case.image], self.explained) for case in cases]
        orders = find_orders(batch, zip(cases, targets, strict=True))
        logits = kept_logits(batch, orders, [kept for curve in curves for kept in curve])
        found = []
        for case, target, position in zip(cases, targets, orders.positions, strict=True):
            along = torch.split(logits[position], [len(curve) for curve in curves])
            whole = batch.logits[case.image]
            found.append([_curve_outputs(whole, part, target, outputs=batch.outputs) for part in along])
        return found

    def counts(self, batch: ImageBatch) -> list[int]:
        """How many patches each step drops or puts in."""
        return [percent * batch.runner.layout.patches // 100 for percent in self.percent]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The steps as parts of one."""
        return tuple(percent / 100 for percent in self.percent)

    @property
    def from_zero(self) -> tuple[float, ...]:
        """The steps of dropping, which begins at the unmasked image."""
        return (0.0, *self.ratios)

    @property
    def to_one(self) -> tuple[float, ...]:
        """The steps of insertion, which ends at the unmasked image."""
        return (*self.ratios, 1.0)


@dataclass(frozen=True)
class _CurveOutputs:
    """Along one curve: whether the class is on top, and the drop of its probability; for the whole image as well."""

    whole_hit: float
    hits: Floats
    drops: Floats


def _curve_outputs(whole: Tensor, along: Tensor, target: int, *, outputs: ClassOutputs) -> _CurveOutputs:
    before, after = float64_array(whole), float64_array(along)
    p0, pk = (perturbation.probabilities(logits, outputs=outputs)[..., target] for logits in (before, after))
    drops = perturbation.drops(p0, pk)
    return _CurveOutputs(float(perturbation.hits(before, target)), perturbation.hits(after, target), drops)


@dataclass(frozen=True)
class InsertionDeletion(TokenDropping):
    """Accuracy and fall of the probability: insertion keeps the most relevant patches, deletion drops them.

    Attributes:
        shown: What is turned round, so that higher is better everywhere.
    """

    kind: ClassVar[str] = "insertion and deletion of patches"

    shown: Literal["deletion accuracy and insertion AOPC as 100 - x"] = (
        "deletion accuracy and insertion AOPC as 100 - x"
    )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            perturbation.insertion_accuracy(ratios=self.to_one),
            perturbation.deletion_accuracy(ratios=self.from_zero),
            perturbation.insertion_aopc(ratios=self.to_one),
            perturbation.deletion_aopc(ratios=self.from_zero),
        )

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        patches = batch.runner.layout.patches
        insertion = [Kept("top", count) for count in self.counts(batch)]
        deletion = [Kept("bottom", patches - count) for count in self.counts(batch)]
        return [self._values(*pair) for pair in self.outputs_along(batch, cases, (insertion, deletion))]

    def _values(self, insertion: _CurveOutputs, deletion: _CurveOutputs) -> Values:
        return (
            row(perturbation.curve_columns("insertion_", "hit", self.to_one), [*insertion.hits, insertion.whole_hit])
            | row(perturbation.curve_columns("insertion_", "drop", self.to_one), [*insertion.drops, 0.0])
            | row(perturbation.curve_columns("deletion_", "hit", self.from_zero), [deletion.whole_hit, *deletion.hits])
            | row(perturbation.curve_columns("deletion_", "drop", self.from_zero), [0.0, *deletion.drops])
        )


@dataclass(frozen=True)
class InfluenceDeletion(TokenDropping):
    """Accuracy against the prediction while the most (MIF) or the least (LIF) influential patches are dropped."""

    kind: ClassVar[str] = "deletion of the most and the least influential patches"

    explained: Explained = "predicted"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return perturbation.mif(ratios=self.from_zero), perturbation.lif(ratios=self.from_zero)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        patches = batch.runner.layout.patches
        most = [Kept("bottom", patches - count) for count in self.counts(batch)]
        least = [Kept("top", patches - count) for count in self.counts(batch)]
        mif, lif = (perturbation.curve_columns(name, "hit", self.from_zero) for name in ("mif_", "lif_"))
        return [
            row(mif, [of_most.whole_hit, *of_most.hits]) | row(lif, [of_least.whole_hit, *of_least.hits])
            for of_most, of_least in self.outputs_along(batch, cases, (most, least))
        ]


@dataclass(frozen=True)
class ContrastDropping(TokenDropping):
    """f_A - f_B, A the predicted class and B the next likely, while patches go in the order of the contrast's map.

    Deletion drops the patches that speak most for A rather than B, insertion keeps them. The same two curves in the
    order of the map of class A alone tell what the contrast adds to it.

    Attributes:
        explained: What the first map explains.
        compared: What the other map explains.
        shown: What is measured along the curves.
    """

    kind: ClassVar[str] = "difference of two classes while patches are dropped"

    explained: Literal["predicted vs next"] = "predicted vs next"  # type: ignore[assignment]
    compared: Literal["predicted"] = "predicted"
    shown: Literal["f_A - f_B of the model's outputs"] = "f_A - f_B of the model's outputs"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            perturbation.contrast_deletion(ratios=self.from_zero),
            perturbation.contrast_insertion(ratios=self.to_one),
            perturbation.contrast_deletion_gain(ratios=self.from_zero),
            perturbation.contrast_insertion_gain(ratios=self.to_one),
        )

    def targets(self, picture: Picture) -> tuple[MapTarget, ...]:
        contrast = contrast_of(picture)
        return contrast, picture.predicted

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        patches, counts = batch.runner.layout.patches, self.counts(batch)
        kept = [*(Kept("bottom", patches - count) for count in counts), *(Kept("top", count) for count in counts)]
        contrasts = [contrast_of(batch.pictures[case.image]) for case in cases]
        requested: list[tuple[Case, MapTarget]] = []
        for case, contrast in zip(cases, contrasts, strict=True):
            requested += [(case, contrast), (case, batch.pictures[case.image].predicted)]
        orders = find_orders(batch, requested)
        logits = kept_logits(batch, orders, kept)
        found = []
        for number, (case, contrast) in enumerate(zip(cases, contrasts, strict=True)):
            values: Values = {}
            (whole,) = self._difference(batch.logits[case.image, None], contrast)
            for prefix, position in zip(("", "class_"), orders.positions[2 * number : 2 * number + 2], strict=True):
                along = self._difference(logits[position], contrast)
                deletion, insertion = along[: len(counts)], along[len(counts) :]
                values |= row(self._columns(f"{prefix}deletion_", self.from_zero), [whole, *deletion])
                values |= row(self._columns(f"{prefix}insertion_", self.to_one), [*insertion, whole])
            found.append(values)
        return found

    @staticmethod
    def _columns(prefix: str, ratios: Sequence[float]) -> tuple[str, ...]:
        return perturbation.curve_columns(prefix, "difference", ratios)

    @staticmethod
    def _difference(logits: Tensor, contrast: Contrast) -> list[float]:
        """f_A - f_B of outputs (steps, classes)."""
        difference: list[float] = contrast.score(logits.cpu().double()).tolist()
        return difference


def contrast_of(picture: Picture) -> Contrast:
    """The predicted class of an image rather than the next likely.

    Raises:
        MissingAnnotationError: the model has one output.
    """
    if picture.second is None:
        raise MissingAnnotationError("a contrast needs two classes, and the model has one output")
    return Contrast(picture.predicted, picture.second)


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

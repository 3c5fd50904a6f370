"""Curves over erased pixels: the model's outputs while pixels are erased in the order of a map.

Pixels are ranked once per map. All images, maps, directions and steps go through the model in full batches, and no
input is run twice.

Erased pixels are filled with one colour, a blurred image, or a noisy linear interpolation of their surroundings (ROAD).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vitreous._utils.torch_state import float64_array
from vitreous.errors import ProtocolError
from vitreous.evaluation.tasks.task import (
    NINE,
    Case,
    Explained,
    ImageBatch,
    ImageTask,
    MapTarget,
    Picture,
    Purpose,
    Values,
    enlarged,
    explained_class,
    label_of,
)
from vitreous.inputs.model_io import ClassOutputs
from vitreous.metrics import perturbation
from vitreous.metrics.metric import Direction, Floats, Metric, row
from vitreous.tape.runner import ModelRunner

Sign = Literal["positive", "negative"]
Filling = Literal["black before normalisation", "zero after normalisation"]

ELEVEN = tuple(range(0, 101, 10))


class Order(NamedTuple):
    """A image of a batch, by its position, a map (height, width) that ranks its pixels, and a name for the two."""

    image: int
    map: Tensor
    key: Hashable


class Orders(NamedTuple):
    """The distinct orders, and for each requested one its position among them."""

    different: list[Order]
    positions: list[int]


def find_orders(batch: ImageBatch, requested: Iterable[tuple[Case, MapTarget]]) -> Orders:
    """The maps of cases for targets; equal maps of an image are one order, whatever their method or target."""
    different: list[Order] = []
    known: dict[Hashable, int] = {}
    positions = []
    for case, target in requested:
        map_ = batch.map_of(case, target)
        key = (case.image, tuple(map_.shape), map_.cpu().numpy().tobytes())
        if key not in known:
            known[key] = len(different)
            different.append(Order(case.image, map_, key))
        positions.append(known[key])
    return Orders(different, positions)


def ranks(map_: Tensor) -> Tensor:
    """The place of every pixel of a map (height, width), 0 for the highest; of equal ones the upper left is first."""
    order = map_.flatten().argsort(descending=True, stable=True)
    places = torch.empty_like(order, dtype=torch.int32)
    places[order] = torch.arange(len(order), dtype=torch.int32, device=order.device)
    return places.view(map_.shape)


def erased_logits(
    batch: ImageBatch,
    orders: Sequence[Order],
    counts: Sequence[int],
    directions: Sequence[Sign],
    *,
    filling: Filling,
    upsampling: str = "bilinear",
) -> Tensor:
    """The model's outputs for images with pixels erased.

    Args:
        batch: The images.
        orders: In which order their pixels go; maps smaller than the image are enlarged first.
        counts: How many pixels are erased at each step.
        directions: ``positive`` erases the highest first, ``negative`` the lowest.
        filling: What erased pixels become.
        upsampling: How maps are enlarged.

    Returns:
        Logits (orders, directions, counts, classes).
    """
    runner = batch.runner
    pixels = runner.size[0] * runner.size[1]
    fill = fill_of(runner, filling)

    def name_of(order: Order, direction: Sign, count: int) -> Hashable:
        # Nothing erased and everything erased look the same whatever the order.
        if count in (0, pixels):
            return ("erased", filling, order.image if count == 0 else "all")
        return ("erased", filling, upsampling, order.key, direction, count)

    for order in orders:
        batch.memory[name_of(order, "positive", 0)] = batch.logits[order.image]
    names = [[[name_of(order, way, count) for count in counts] for way in directions] for order in orders]
    work = []
    known = set(batch.memory)
    for order, rows in zip(orders, names, strict=True):
        requested = zip(directions, rows, strict=True)
        steps = {name: (way, count) for way, row in requested for name, count in zip(row, counts, strict=True)}
        work.append((order, {name: step for name, step in steps.items() if name not in known}))
        known |= steps.keys()
    for painted, pictures in _pictures(runner, work, fill, upsampling):
        batch.memory.update(zip(painted, runner.logits(pictures), strict=True))
    flat = [batch.memory[name] for rows in names for row in rows for name in row]
    shape = (len(orders), len(directions), len(counts), batch.logits.shape[1])
    return torch.stack(flat).view(shape) if flat else batch.logits.new_empty(shape)


def _pictures(
    runner: ModelRunner,
    work: Sequence[tuple[Order, Mapping[Hashable, tuple[Sign, int]]]],
    fill: Tensor,
    upsampling: str,
) -> Iterator[tuple[list[Hashable], Tensor]]:
    """Full batches of erased images and the name of each; all are painted into one buffer."""
    pixels = runner.size[0] * runner.size[1]
    buffer = runner.images.new_empty((runner.batch, *runner.images.shape[1:]))
    names: list[Hashable] = []
    for order, steps in work:
        if not steps:
            continue
        rank = ranks(enlarged(order.map[None], runner.size, upsampling, runner.geometry)[0])
        for name, (direction, count) in steps.items():
            erased = rank < count if direction == "positive" else rank >= pixels - count
            torch.where(erased, fill, runner.images[order.image], out=buffer[len(names)])
            names.append(name)
            if len(names) == len(buffer):
                yield names, buffer
                names = []
    if names:
        yield names, buffer[: len(names)]


def fill_of(runner: ModelRunner, filling: Filling) -> Tensor:
    """What erased pixels become, (channel, 1, 1)."""
    if filling == "zero after normalisation":
        return runner.images.new_zeros((runner.images.shape[1], 1, 1))
    if runner.black is None:
        raise ProtocolError("the value of a black pixel is not known, because the model's preprocessing is missing")
    return runner.black[:, None, None]


class Curves(NamedTuple):
    """Logits of one image.

    Attributes:
        whole: Of the unperturbed image, (classes,).
        erased: With pixels erased, (explained, directions, steps, classes).
        explained: The class that each of the maps explains, (explained,).
        outputs: What the model's outputs are, see ``Batch``.
    """

    whole: Floats
    erased: Floats
    explained: NDArray[np.int64]
    outputs: ClassOutputs

    def probabilities(self) -> tuple[Floats, Floats]:
        """p0 (explained,) and pk (explained, directions, steps) of the explained classes."""
        before = perturbation.probabilities(self.whole, outputs=self.outputs)[self.explained]
        after = perturbation.probabilities(self.erased, outputs=self.outputs)
        return before, perturbation.of_class(after, self.explained[:, None, None])


@dataclass(frozen=True)
class PixelErasing(ImageTask):
    """What all curves over erased pixels have in common.

    Attributes:
        explained: The classes whose maps are measured, each by itself.
        percent: How much is erased at each step.
        directions: ``positive``: the highest pixels first; ``negative``: the lowest.
        filling: What erased pixels become.
        upsampling: How a map of patches gets the size of the image.
        count: Pixels erased at p percent.
        ties: Which of equal pixels ranks higher.
    """

    purpose: ClassVar[Purpose] = "faithfulness"
    explained: tuple[Explained, ...] = ("predicted",)
    percent: tuple[int, ...] = NINE
    directions: tuple[Sign, ...] = ("positive", "negative")
    filling: Filling = "black before normalisation"
    upsampling: Literal["bilinear"] = "bilinear"
    count: Literal["int(pixels * p)"] = "int(pixels * p)"
    ties: Literal["the upper left one"] = "the upper left one"

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return tuple(dict.fromkeys(explained_class(picture, explained) for explained in self.explained))

    def curves(self, batch: ImageBatch, cases: Sequence[Case]) -> Iterator[Curves]:
        """The model's outputs for every case: for the original image and at every step."""
        targets = [self._explained_classes(batch.pictures[case.image]) for case in cases]
        requested = [(case, target) for case, classes in zip(cases, targets, strict=True) for target in classes]
        orders = find_orders(batch, requested)
        pixels = batch.runner.size[0] * batch.runner.size[1]
        logits = erased_logits(
            batch,
            orders.different,
            [percent * pixels // 100 for percent in self.percent],
            self.directions,
            filling=self.filling,
            upsampling=self.upsampling,
        )
        positions = np.array(orders.positions).reshape(len(cases), len(self.explained))
        for case, classes, places in zip(cases, targets, positions, strict=True):
            # One case at a time: in float64, all of them would be larger than the model.
            whole, erased = float64_array(batch.logits[case.image]), float64_array(logits[places])
            yield Curves(whole, erased, np.array(classes), batch.outputs)

    def _explained_classes(self, picture: Picture) -> list[int]:
        return [explained_class(picture, explained) for explained in self.explained]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The steps as parts of one."""
        return tuple(percent / 100 for percent in self.percent)


@dataclass(frozen=True)
class ErasingAccuracy(PixelErasing):
    """Top-1 accuracy against the label while pixels are erased, and the area under that curve in percent.

    Attributes:
        area: How the points become one number; the point at 0% is the unperturbed image.
    """

    kind: ClassVar[str] = "accuracy while pixels are erased"

    explained: tuple[Explained, ...] = ("predicted", "label")
    area: tuple[Literal["trapezoid from 0%", "mean of the steps"], ...] = ("trapezoid from 0%", "mean of the steps")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        found = []
        for explained in self.explained:
            for direction in self.directions:
                # Papers that do not name the class mean the predicted one.
                whose = "" if explained == "predicted" else ", true class"
                name, prefix = f"AUC {direction}{whose}", f"{explained}_{direction}_"
                better: Direction = "lower" if direction == "positive" else "higher"
                if "trapezoid from 0%" in self.area:
                    found.append(perturbation.accuracy_auc(prefix, (0, *self.ratios), direction=better, name=name))
                if "mean of the steps" in self.area:
                    name = f"{name} (mean of {len(self.percent)})"
                    found.append(perturbation.accuracy_auc(prefix, self.ratios, "mean", direction=better, name=name))
        return tuple(found)

    @property
    def uses_labels(self) -> bool:
        """Accuracy is against the label, whatever is explained."""
        return True

    def targets(self, picture: Picture) -> tuple[int, ...]:
        label_of(picture)
        return super().targets(picture)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        found = []
        for case, curves in zip(cases, self.curves(batch, cases), strict=True):
            label = label_of(batch.pictures[case.image])
            before = float(perturbation.hits(curves.whole, label))
            found.append(self._values(before, perturbation.hits(curves.erased, label)))
        return found

    def _values(self, before: float, curves: Floats) -> Values:
        values: Values = {}
        for explained, of_class in zip(self.explained, curves, strict=True):
            for direction, curve in zip(self.directions, of_class, strict=True):
                columns = perturbation.curve_columns(f"{explained}_{direction}_", "hit", (0, *self.ratios))
                values |= row(columns, [before, *curve])
        return values


@dataclass(frozen=True)
class ErasingProbability(PixelErasing):
    """AOPC and LOdds: how the probability of the explained class falls while the highest pixels are erased.

    Attributes:
        aopc: Over the steps, p being the softmax over the classes, or the sigmoid where several may be right.
        log_odds: The same of the logarithm.
    """

    kind: ClassVar[str] = "probability while pixels are erased"

    directions: tuple[Sign, ...] = ("positive",)
    aopc: Literal["mean of p0 - pk"] = "mean of p0 - pk"
    log_odds: Literal["mean of log(pk / p0)"] = "mean of log(pk / p0)"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        curves = [(explained, direction) for explained in self.explained for direction in self.directions]
        return tuple(metric for curve in curves for metric in self._metrics(*curve))

    def _metrics(self, explained: Explained, direction: Sign) -> tuple[Metric, Metric]:
        prefix, first = f"{explained}_{direction}_", direction == "positive"
        suffix = "" if (explained, direction) == ("predicted", "positive") else f" {direction}, {explained} class"
        return (
            perturbation.mean_aopc(prefix, f"AOPC{suffix}", most_relevant_first=first),
            perturbation.mean_log_odds(prefix, f"LOdds{suffix}", most_relevant_first=first),
        )

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        return [self._values(*curves.probabilities()) for curves in self.curves(batch, cases)]

    def _values(self, before: Floats, curves: Floats) -> Values:
        values: Values = {}
        for explained, start, of_class in zip(self.explained, before, curves, strict=True):
            for direction, curve in zip(self.directions, of_class, strict=True):
                aopc, log_odds = self._metrics(explained, direction)
                values |= aopc.row(float(perturbation.aopc(start, curve)))
                values |= log_odds.row(float(perturbation.log_odds(start, curve)))
        return values


@dataclass(frozen=True)
class AreaBetweenCurves(PixelErasing):
    """ABPC: the mean probability with the lowest pixels erased first, minus that with the highest erased first.

    Attributes:
        area: How the points become one number, in percent.
    """

    kind: ClassVar[str] = "area between perturbation curves"

    percent: tuple[int, ...] = ELEVEN
    filling: Filling = "zero after normalisation"
    area: Literal["mean of the steps"] = "mean of the steps"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (
            perturbation.area_between_curves("probability", self.ratios),
            perturbation.probability_auc("positive_", self.ratios, direction="lower"),
            perturbation.probability_auc("negative_", self.ratios, direction="higher"),
        )

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        columns = [
            name
            for direction in self.directions
            for name in perturbation.curve_columns(f"{direction}_", "probability", self.ratios)
        ]
        return [row(columns, curves.probabilities()[1].ravel()) for curves in self.curves(batch, cases)]


_MOST_ITERATIONS = 500
_RESIDUAL = 1e-5  # of a pixel's equation, in standard deviations: a thousandth of the noise that is added
ROAD_NOISE = 0.01  # of normalised pixels, as in the authors' program
_BLUR = 1 / 16  # of the shorter side: the standard deviation of the Gaussian


def linear_imputation(images: Tensor, erased: Tensor) -> Tensor:
    """Replace erased pixels by the weighted mean of their eight neighbours, erased ones included.

    The imputation of [rong2022consistent][], without its noise. Its linear equations (one for every erased pixel) are
    solved for all images together by conjugate gradients, from a start that a pyramid of means gives.

    Args:
        images: (images, channel, height, width).
        erased: which pixels are replaced, (images, height, width). Where none is left, all become the image's mean.
    """
    inside = erased[:, None].to(images.dtype)
    # Beyond the edge there is nothing, so the weights that are left are fewer.
    weights = _neighbours(torch.ones_like(images[:1, :1]))
    nothing_left = erased.flatten(1).all(dim=1)[:, None, None, None]
    start = torch.where(nothing_left, images.mean(dim=(-2, -1), keepdim=True), _from_pyramid(images, 1 - inside))
    found = torch.where(inside > 0, start, images)
    residual = inside * (_neighbours(found) - weights * found) * (~nothing_left)
    direction = residual.clone()
    square = residual.square().sum(dim=(-2, -1), keepdim=True)
    for _ in range(_MOST_ITERATIONS):
        if float(residual.abs().amax()) <= _RESIDUAL:
            break
        moved = inside * (weights * direction - _neighbours(direction))
        curvature = (direction * moved).sum(dim=(-2, -1), keepdim=True)
        step = torch.where(curvature > 0, square / curvature.clamp(min=torch.finfo(images.dtype).tiny), 0.0)
        found = found + step * direction
        residual = residual - step * moved
        last, square = square, residual.square().sum(dim=(-2, -1), keepdim=True)
        direction = residual + square / last.clamp(min=torch.finfo(images.dtype).tiny) * direction
    return found


def _neighbours(values: Tensor) -> Tensor:
    """The weighted sum of the eight neighbours: those beside a pixel weigh 1/6, those at its corners 1/12."""
    framed = functional.pad(values, (1, 1, 1, 1))
    rows = framed[..., :-2, :] + framed[..., 2:, :] + 2 * framed[..., 1:-1, :]
    return (rows[..., :-2] + rows[..., 2:] + 2 * rows[..., 1:-1] - 4 * values) / 12


def _from_pyramid(images: Tensor, known: Tensor) -> Tensor:
    """Fill what is not known from means over ever larger squares."""
    if min(images.shape[-2:]) == 1 or bool((known > 0).all()):
        return images * (known > 0)
    size = images.shape[-2:]
    sums = functional.avg_pool2d(images * known, 2, ceil_mode=True, count_include_pad=False)
    share = functional.avg_pool2d(known, 2, ceil_mode=True, count_include_pad=False)
    means = sums / share.clamp(min=torch.finfo(images.dtype).tiny)
    coarse = _from_pyramid(means, (share > 0).to(images.dtype))
    fine = functional.interpolate(coarse, size=size, mode="bilinear", align_corners=False)
    return torch.where(known > 0, images, fine)


def blurred(images: Tensor) -> Tensor:
    """Images (images, channel, height, width) behind a Gaussian as wide as a sixteenth of their shorter side."""
    deviation = max(1.0, _BLUR * min(images.shape[-2:]))
    reach = min(round(3 * deviation), min(images.shape[-2:]) - 1)
    places = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    line = torch.exp(-(places**2) / (2 * deviation**2))
    line = line / line.sum()
    flat = functional.pad(images.flatten(0, 1)[:, None], (reach, reach, reach, reach), mode="reflect")
    flat = functional.conv2d(functional.conv2d(flat, line.view(1, 1, 1, -1)), line.view(1, 1, -1, 1))
    return flat.view_as(images)

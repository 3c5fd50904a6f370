"""Curves under several fillings (ROAD among them), SaCo, single deletion, completeness, classes, weights and shifts."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vitreous._utils.torch_state import float64_array
from vitreous.errors import UnsupportedModelError
from vitreous.evaluation.tasks.patch_masking import Kept, kept_logits
from vitreous.evaluation.tasks.pixel_masking import (
    ROAD_NOISE,
    Order,
    Orders,
    blurred,
    fill_of,
    find_orders,
    linear_imputation,
    ranks,
)
from vitreous.evaluation.tasks.sanity import MapTask, randomised_models
from vitreous.evaluation.tasks.task import (
    NINE,
    Case,
    Explained,
    ImageBatch,
    Picture,
    Purpose,
    Values,
    enlarged,
    explained_class,
    generator_of,
    seed_of,
)
from vitreous.metrics import faithfulness, perturbation
from vitreous.metrics.metric import Curve, Floats, Metric, row
from vitreous.metrics.sanity import spearman

PixelFilling = Literal["black", "mean", "blur", "road"]
AnyFilling = PixelFilling | Literal["dropped"]
FILLINGS: tuple[AnyFilling, ...] = ("black", "mean", "blur", "road", "dropped")
_DIRECTIONS = ("morf", "lerf")  # the most, or the least relevant first
_SHIFTS = ((0, 1), (0, -1), (1, 0), (-1, 0))


class ErasedImage(NamedTuple):
    """An image of a batch, by its position, with some pixels erased, and a name for the two."""

    name: Hashable
    image: int
    erased: Tensor


def filled_logits(batch: ImageBatch, wanted: Iterable[ErasedImage], filling: PixelFilling) -> None:
    """Run the model on images with pixels erased and leave the outputs in the batch's memory, by name.

    Args:
        batch: the images.
        wanted: what is erased; made one after the other, so that few masks are in memory.
        filling: ``black``: before normalisation; ``mean``: the mean of the image, channel by channel; ``blur``: the
            blurred image; ``road``: noisy linear imputation. The noise is that of the image, whatever is erased.
    """
    runner, together = batch.runner, list[ErasedImage]()

    def run() -> None:
        images = torch.stack([runner.images[each.image] for each in together])
        erased = torch.stack([each.erased for each in together])
        filled = _filled(batch, [each.image for each in together], images, erased, filling)
        batch.memory.update(zip((each.name for each in together), runner.logits(filled), strict=True))
        together.clear()

    for each in wanted:
        together.append(each)
        if len(together) == runner.batch:
            run()
    if together:
        run()


def _filled(batch: ImageBatch, numbers: Sequence[int], images: Tensor, erased: Tensor, filling: PixelFilling) -> Tensor:
    if filling == "road":
        noise = torch.stack([_noise(batch.pictures[number].name, images[0]) for number in numbers])
        return torch.where(erased[:, None], linear_imputation(images, erased) + noise, images)
    if filling == "black":
        other = fill_of(batch.runner, "black before normalisation").expand_as(images)
    elif filling == "mean":
        other = images.mean(dim=(-2, -1), keepdim=True)
    else:
        other = blurred(images)
    return torch.where(erased[:, None], other, images)


def _noise(name: str, like: Tensor) -> Tensor:
    drawn = torch.randn(like.shape, generator=generator_of(name, "imputation"), dtype=torch.float64)
    return (ROAD_NOISE * drawn).to(like)


@dataclass(frozen=True)
class FillingCurves(MapTask):
    """The probability of the explained class while pixels or patches go, under one or several fillings.

    Attributes:
        fillings: what becomes of erased pixels; ``dropped`` drops whole patches instead.
        percent: how much is erased at each step.
        upsampling: how a map of patches gets the size of the image.
        count: pixels, or patches, erased at p percent.
        ties: which of equal pixels ranks higher.
        noise: standard deviation of the noise of ``road``, of normalised pixels.
        separate: whether MoRF and LeRF are metrics of their own, besides half of their difference.
    """

    purpose: ClassVar[Purpose] = "faithfulness"
    kind: ClassVar[str] = "probability under fillings"

    fillings: tuple[AnyFilling, ...] = FILLINGS
    percent: tuple[int, ...] = (10, 30, 50, 70, 90)
    upsampling: Literal["bilinear"] = "bilinear"
    count: Literal["int(number * p)"] = "int(number * p)"
    ties: Literal["the upper left one"] = "the upper left one"
    noise: float = ROAD_NOISE
    separate: bool = False

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(metric for filling in self.fillings for metric in self._metrics_of(filling))

    def _metrics_of(self, filling: AnyFilling) -> tuple[Metric, ...]:
        ratios, name = self._ratios, "ROAD" if filling == "road" else filling
        morf, lerf = self._curves_of(filling)
        weights = [-50 / len(ratios)] * len(ratios) + [50 / len(ratios)] * len(ratios)
        description = (
            "Half of the difference between the mean probabilities with the least and with the most relevant "
            f"{'patches' if filling == 'dropped' else 'pixels'} erased first, in percent; filling: {filling}."
        )
        gap = perturbation.curve_metric(
            [morf, lerf], weights, (0.0, 1.0), f"{name} (LeRF - MoRF) / 2", "higher", description
        )
        if not self.separate:
            return (gap,)
        means = {"MoRF": (f"{filling}_morf_", "lower"), "LeRF": (f"{filling}_lerf_", "higher")}
        return (
            gap,
            *(
                perturbation.probability_auc(prefix, ratios, direction=better, name=f"{name} {order}")  # type: ignore[arg-type]
                for order, (prefix, better) in means.items()
            ),
        )

    @property
    def _ratios(self) -> tuple[float, ...]:
        return tuple(percent / 100 for percent in self.percent)

    def _curves_of(self, filling: AnyFilling) -> list[Curve]:
        return [perturbation.curve_of(f"{filling}_{way}_", "probability", self._ratios) for way in _DIRECTIONS]

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        targets = [explained_class(batch.pictures[case.image], self.explained) for case in cases]
        orders = find_orders(batch, zip(cases, targets, strict=True))
        found: list[Values] = [{} for _ in cases]
        for filling in self.fillings:
            columns = [column for curve in self._curves_of(filling) for column in curve.columns]
            logits = self._logits(batch, orders, filling)
            for values, target, position in zip(found, targets, orders.positions, strict=True):
                values.update(row(columns, self._along(batch, logits, position, target)))
        return found

    def _along(self, batch: ImageBatch, logits: Tensor | None, position: int, target: int) -> Floats:
        """The probability of a class at every step, first MoRF, then LeRF; NaN where the model cannot do that."""
        if logits is None:
            return np.full(len(_DIRECTIONS) * len(self.percent), np.nan)
        along: Floats = perturbation.probabilities(float64_array(logits[position]), outputs=batch.outputs)[:, target]
        return along

    def _logits(self, batch: ImageBatch, orders: Orders, filling: AnyFilling) -> Tensor | None:
        """The model's outputs, (orders, directions x steps, classes)."""
        if filling == "dropped":
            patches = batch.runner.layout.patches
            left = [patches - patches * percent // 100 for percent in self.percent]
            try:
                return kept_logits(batch, orders, [*(Kept("bottom", n) for n in left), *(Kept("top", n) for n in left)])
            except UnsupportedModelError:
                return None
        names = [self._names(order, filling) for order in orders.different]
        filled_logits(batch, self._erased(batch, orders.different, filling), filling)
        return torch.stack([torch.stack([batch.memory[name] for name in own]) for own in names])

    def _names(self, order: Order, filling: AnyFilling) -> list[Hashable]:
        steps = [(way, percent) for way in _DIRECTIONS for percent in self.percent]
        return [("filled", filling, self.noise, self.upsampling, order.key, step) for step in steps]

    def _erased(self, batch: ImageBatch, orders: Sequence[Order], filling: AnyFilling) -> Iterator[ErasedImage]:
        runner = batch.runner
        pixels = runner.size[0] * runner.size[1]
        counts = [percent * pixels // 100 for percent in self.percent]
        for order in orders:
            names = self._names(order, filling)
            if all(name in batch.memory for name in names):
                continue
            rank = ranks(enlarged(order.map[None], runner.size, self.upsampling, runner.geometry)[0])
            masks = [rank < count for count in counts] + [rank >= pixels - count for count in counts]
            yield from (ErasedImage(name, order.image, mask) for name, mask in zip(names, masks, strict=True))


@dataclass(frozen=True)
class Road(FillingCurves):
    """ROAD: the same at nine steps with noisy linear imputation, MoRF and LeRF each by itself."""

    kind: ClassVar[str] = "ROAD"

    fillings: tuple[AnyFilling, ...] = ("road",)
    percent: tuple[int, ...] = NINE
    separate: bool = True


@dataclass(frozen=True)
class GroupFaithfulness(MapTask):
    """SaCo: whether groups of more salient pixels change the prediction more, for all pairs of groups.

    Attributes:
        groups: K, of equal size.
        filling: what the pixels of a group become.
        upsampling: how a map of patches gets the size of the image.
        salience: of a group; its mean and its sum differ by a factor, but for groups that have a pixel more.
        effect: what changes.
    """

    purpose: ClassVar[Purpose] = "faithfulness"
    kind: ClassVar[str] = "salience-guided faithfulness coefficient"

    groups: int = 10
    filling: PixelFilling = "mean"
    upsampling: Literal["bilinear"] = "bilinear"
    salience: Literal["mean of its pixels"] = "mean of its pixels"
    effect: Literal["fall of the explained class's probability"] = "fall of the explained class's probability"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (faithfulness.mean_saco(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        targets = [explained_class(batch.pictures[case.image], self.explained) for case in cases]
        orders = find_orders(batch, zip(cases, targets, strict=True))
        saliences: dict[int, Floats] = {}

        def erased() -> Iterator[ErasedImage]:
            for position, order in enumerate(orders.different):
                map_ = self._enlarged(batch, order)
                parts = faithfulness.salience_groups(map_, self.groups)
                saliences[position] = np.array([map_.ravel()[part].mean() for part in parts])
                for number, part in enumerate(parts):
                    mask = torch.zeros(map_.size, dtype=torch.bool)
                    mask[torch.from_numpy(part)] = True
                    shaped = mask.view(map_.shape).to(batch.images.device)
                    yield ErasedImage(self._name(order, number), order.image, shaped)

        filled_logits(batch, erased(), self.filling)
        (metric,) = self.metrics
        found = []
        for case, target, position in zip(cases, targets, orders.positions, strict=True):
            order = orders.different[position]
            logits = torch.stack([batch.memory[self._name(order, number)] for number in range(self.groups)])
            before, after = (
                perturbation.probabilities(float64_array(each), outputs=batch.outputs)[..., target]
                for each in (batch.logits[case.image], logits)
            )
            found.append(metric.row(float(faithfulness.salience_coefficient(saliences[position], before - after))))
        return found

    def _name(self, order: Order, number: int) -> Hashable:
        return ("group", self.filling, self.upsampling, self.groups, order.key, number)

    def _enlarged(self, batch: ImageBatch, order: Order) -> Floats:
        runner = batch.runner
        map_: Floats = float64_array(
            enlarged(order.map[None].double(), runner.size, self.upsampling, runner.geometry)[0]
        )
        return map_


@dataclass(frozen=True)
class SingleDeletion(MapTask):
    """Rank correlation of the scores of square cells with the fall of the logit when each cell alone is erased.

    Attributes:
        cells: in each direction.
        filling: what the pixels of a cell become.
        score: of a cell, from those of its pixels.
        effect: what falls.
    """

    purpose: ClassVar[Purpose] = "faithfulness"
    kind: ClassVar[str] = "single-deletion correlation"

    cells: int = 4
    filling: PixelFilling = "mean"
    score: Literal["mean over its pixels"] = "mean over its pixels"
    effect: Literal["logit of the explained class"] = "logit of the explained class"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (faithfulness.mean_single_deletion(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        cell_of = self._cell_of_pixel(batch)
        count = self.cells**2
        images = dict.fromkeys(case.image for case in cases)
        filled_logits(
            batch,
            (
                ErasedImage(self._name(image, cell), image, cell_of == cell)
                for image in images
                for cell in range(count)
                if self._name(image, cell) not in batch.memory
            ),
            self.filling,
        )
        (metric,) = self.metrics
        sizes = torch.bincount(cell_of.flatten(), minlength=count)
        found = []
        for case in cases:
            target = explained_class(batch.pictures[case.image], self.explained)
            runner, map_ = batch.runner, batch.map_of(case, target)
            pixels = enlarged(map_[None].double(), runner.size, "nearest", runner.geometry)[0]
            sums = torch.zeros(count, dtype=pixels.dtype, device=pixels.device)
            scores = sums.index_add_(0, cell_of.flatten(), pixels.flatten()) / sizes
            without = torch.stack([batch.memory[self._name(case.image, cell)] for cell in range(count)])
            drops = float64_array(batch.logits[case.image, target]) - float64_array(without[:, target])
            value = faithfulness.single_deletion_correlation(float64_array(scores), drops)
            found.append(metric.row(value))
        return found

    def _name(self, image: int, cell: int) -> Hashable:
        return ("cell", self.filling, self.cells, image, cell)

    def _cell_of_pixel(self, batch: ImageBatch) -> Tensor:
        """Which cell every pixel belongs to, (height, width)."""
        rows, columns = (
            torch.arange(length, device=batch.images.device) * self.cells // length for length in batch.runner.size
        )
        return rows[:, None] * self.cells + columns


@dataclass(frozen=True)
class Completeness(MapTask):
    """How far the sum of a map is from the logit that it explains.

    Attributes:
        explains: what the scores should add up to.
        form: of the error.
    """

    kind: ClassVar[str] = "completeness"

    explains: Literal["logit of the explained class"] = "logit of the explained class"
    form: Literal["|sum - logit| / (|sum| + |logit|)"] = "|sum - logit| / (|sum| + |logit|)"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (faithfulness.mean_completeness_error(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        (metric,) = self.metrics
        found = []
        for case in cases:
            target = explained_class(batch.pictures[case.image], self.explained)
            total = self.map_of(batch, case).sum()
            found.append(
                metric.row(float(faithfulness.completeness_error(total, float(batch.logits[case.image, target]))))
            )
        return found


@dataclass(frozen=True)
class RandomLogit(MapTask):
    """Rank correlation of a map with that of another class: a map that stays the same does not show the class.

    Attributes:
        other: the class that it is compared with.
    """

    kind: ClassVar[str] = "random logit"

    other: Literal["drawn from all other classes, seeded by the image's name"] = (
        "drawn from all other classes, seeded by the image's name"
    )

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (faithfulness.mean_class_similarity(),)

    def targets(self, picture: Picture) -> tuple[int, ...]:
        return explained_class(picture, self.explained), self.other_class(picture)

    def other_class(self, picture: Picture) -> int:
        """The class whose map should be another one."""
        explained = explained_class(picture, self.explained)
        return (explained + 1 + seed_of(picture.name, "other class") % (picture.classes - 1)) % picture.classes

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        (metric,) = self.metrics
        found = []
        for case in cases:
            other = batch.map_of(case, self.other_class(batch.pictures[case.image]))
            found.append(metric.row(spearman(self.map_of(batch, case), float64_array(other.flatten()))))
        return found


@dataclass(frozen=True)
class EfficientRandomisation(MapTask):
    """eMPRT: how much more complex a map gets when all weights of the model are random.

    Attributes:
        bins: of the histogram whose entropy is a map's complexity.
        weights: what a parameter becomes.
        seed: of the random weights, together with the parameter's name.
    """

    kind: ClassVar[str] = "efficient model randomisation"

    bins: int = faithfulness.ENTROPY_BINS
    weights: Literal["normal, with the mean and the spread of each parameter"] = (
        "normal, with the mean and the spread of each parameter"
    )
    seed: int = 0

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (faithfulness.mean_complexity_rise(),)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        (metric,) = self.metrics
        values: dict[Case, Values] = {}
        for _, network in randomised_models(batch, ("everything",), self.seed):
            for case, other in self.other_maps(batch, cases, network, batch.images):
                known = bool(np.isfinite(other).all())
                rise = faithfulness.complexity_rise(self.map_of(batch, case), other, self.bins) if known else np.nan
                values[case] = metric.row(float(rise))
        return [values[case] for case in cases]


@dataclass(frozen=True)
class ShiftStability(MapTask):
    """Rank correlation of a map with those of the same image shifted by a few pixels; the explained class stays.

    Attributes:
        pixels: by how much the image is shifted, in four directions each.
        edge: what comes in at the side that is left.
    """

    kind: ClassVar[str] = "stability under shifts"

    explained: Explained = "predicted"
    pixels: tuple[int, ...] = (1, 4)
    edge: Literal["the last row or column again"] = "the last row or column again"

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return tuple(faithfulness.mean_shift_similarity(pixels) for pixels in self.pixels)

    def measure(self, batch: ImageBatch, cases: Sequence[Case]) -> list[Values]:
        values: dict[Case, Values] = {case: {} for case in cases}
        for pixels, metric in zip(self.pixels, self.metrics, strict=True):
            similar: dict[Case, list[float]] = {case: [] for case in cases}
            for down, right in _SHIFTS:
                images = shifted(batch.images, pixels * down, pixels * right)
                for case, other in self.other_maps(batch, cases, batch.model.model, images):
                    known = bool(np.isfinite(other).all())
                    similar[case].append(spearman(self.map_of(batch, case), other) if known else np.nan)
            for case in cases:
                values[case] |= metric.row(float(np.mean(similar[case])))
        return [values[case] for case in cases]


def shifted(images: Tensor, down: int, right: int) -> Tensor:
    """Images (images, channel, height, width) moved by some pixels; the edge is repeated where nothing comes in."""
    height, width = images.shape[-2:]
    framed = functional.pad(images, (abs(right), abs(right), abs(down), abs(down)), mode="replicate")
    top, left = abs(down) - down, abs(right) - right
    return framed[..., top : top + height, left : left + width]

"""Controls and ceilings: maps that say nothing about the model, and orders found by searching on the metric itself.

They are rows of their own in every evaluation: a method that does not beat ``random``, ``centre`` and ``edges`` has
shown nothing about the model, and ``oracle`` is close to the most that an order of patches can reach. None of them
explains anything, so they are listed apart and never recommended. MDA [walker2025metric][] and LiMA [chen2025less][]
search for an order of regions by running the model on subsets, with the papers' searches. Regions are patches or
squares of patches; the others are dropped from the sequence, where the papers paint them.
"""

from __future__ import annotations

import hashlib
import math
from abc import abstractmethod
from itertools import pairwise
from typing import Annotated, Literal

import torch
from torch import Tensor

from vitreous._utils.torch_state import at_least_float32
from vitreous.errors import MethodError
from vitreous.inputs.model_io import Inputs, Texts
from vitreous.methods.perturbation import PerturbationMethod, all_targets, seeded, windows
from vitreous.methods.readout import Procedure, View, layout_means
from vitreous.methods.registry import AtMost, register
from vitreous.tape import Needs

OracleOrder = Literal["deletion", "insertion", "both"]
_SHARPNESS = 3  # how far the first patches of an order stand out where two orders are added


class Control(Procedure):
    """A map that is made without reading the model."""

    runs_again = False

    def needs(self, layer: int, depth: int) -> Needs:
        """Nothing is recorded; a text has neither a centre nor edges."""
        del layer, depth
        return Needs(picture=True)


class RandomOrder(Control):
    """Independent uniform numbers, seeded by ``seed`` and the content of the model's input.

    The same input has the same map in every batch, process and run; the sha256 of its numbers in float32 (of a text:
    of its token numbers) is the seed.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def needs(self, layer: int, depth: int) -> Needs:
        """Nothing; tokens of a text have an order, too."""
        del layer, depth
        return Needs()

    def map(self, view: View) -> Tensor:
        """One number for every patch."""
        inputs = view.runner.inputs
        drawn = [
            torch.rand(
                view.layout.patches, generator=seeded(content_seed(inputs, row, self._seed)), dtype=torch.float64
            )
            for row in range(len(inputs))
        ]
        return torch.stack(drawn).to(inputs.device, view.dtype)


def content_seed(inputs: Inputs, row: int, seed: int) -> int:
    """A seed that depends on the numbers of one input and on ``seed``, and on nothing else."""
    if isinstance(inputs, Texts):
        numbers = inputs.parts["input_ids"][row].cpu().numpy()
    else:
        numbers = inputs[row].detach().to("cpu", torch.float32).numpy()
    return int.from_bytes(hashlib.sha256(f"{seed}|".encode() + numbers.tobytes()).digest()[:8], "big") >> 1


class CentredGaussian(Control):
    """exp(-(u² + v²) / 2 s²) with u and v the distance from the centre as a part of the image's height and width.

    Of a volume also its depth counts, of a clip its length.
    """

    def __init__(self, spread: float = 0.25) -> None:
        if not spread > 0:
            raise MethodError("spread must be above 0")
        self._spread = spread

    def map(self, view: View) -> Tensor:
        """The same for every image."""
        bell = torch.ones((), dtype=torch.float64)
        for cells in view.layout.grid:
            distances = (torch.arange(cells, dtype=torch.float64) + 0.5) / cells - 0.5
            bell = bell[..., None] * torch.exp(-(distances**2) / (2 * self._spread**2))
        return bell.flatten().to(view.runner.inputs.device, view.dtype).repeat(len(view.target), 1)


class Edges(Control):
    """Mean over channels and pixels of a patch of the Sobel gradient's length, of the image as the model sees it."""

    def needs(self, layer: int, depth: int) -> Needs:
        """A picture: the Sobel gradient is that of a plane."""
        return super().needs(layer, depth) | Needs(plane=True)

    def map(self, view: View) -> Tensor:
        """How much changes inside of each patch."""
        images = at_least_float32(view.runner.images.detach())
        across = images.new_tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        kernels = torch.stack((across, across.T))[:, None]
        batch, channels, height, width = images.shape
        framed = torch.nn.functional.pad(images.reshape(-1, 1, height, width), (1, 1, 1, 1), mode="replicate")
        lengths = torch.nn.functional.conv2d(framed, kernels).square().sum(dim=1).sqrt()
        pixels = lengths.view(batch, channels, -1).mean(dim=1)
        return layout_means(pixels, (height, width), view.layout).to(view.dtype)


class GreedyOracle(PerturbationMethod):
    """An order of patches found by greedy search on p_c itself, with dropped tokens.

    In each of ``steps`` rounds every patch that is left is dropped alone; then an equal share of the patches goes for
    good: for ``deletion`` those whose loss lowers log p_c most, the first of them ranking highest; for ``insertion``
    those whose loss lowers it least, the last that stay ranking highest. ``both`` adds the cubes of the two ranks.
    """

    _by = "drop"

    def __init__(self, steps: int = 8, order: OracleOrder = "both") -> None:
        if steps < 1:
            raise MethodError("steps must be at least 1")
        self._steps, self._order = steps, order

    def maps(self, view: View) -> Tensor:
        """Ranks from 0 to 1, the highest for what matters most."""
        return torch.stack([self._ranks(view, target) for target in all_targets(view).unbind(dim=1)], dim=1)

    def _ranks(self, view: View, target: Tensor) -> Tensor:
        if self._order == "both":
            both = [self._search(view, target, most_first=first) for first in (True, False)]
            return torch.stack(both).pow(_SHARPNESS).mean(dim=0)
        return self._search(view, target, most_first=self._order == "deletion")

    def _search(self, view: View, target: Tensor, *, most_first: bool) -> Tensor:
        """The rank of every patch in one direction, (batch, patches)."""
        patches, batch = view.layout.patches, len(target)
        left = torch.arange(patches, device=target.device).repeat(batch, 1)
        gone: list[Tensor] = []
        bounds = [round(patches * step / self._steps) for step in range(self._steps + 1)]
        for count in (end - start for start, end in pairwise(bounds) if end > start):
            order = self._without_one(view, target, left).argsort(dim=1, stable=True, descending=not most_first)
            left = left.gather(1, order)
            gone.append(left[:, :count])
            left = left[:, count:].sort(dim=1).values
        ranks = torch.linspace(1, 0, patches, dtype=view.dtype, device=target.device).expand(batch, -1)
        if not most_first:
            ranks = ranks.flip(1)
        return torch.zeros_like(ranks).scatter(1, torch.cat(gone, dim=1), ranks)

    def _without_one(self, view: View, target: Tensor, left: Tensor) -> Tensor:
        """The log p_c with each of the patches that are left dropped alone, (batch, left)."""
        runner, (batch, count) = view.runner, left.shape
        if count == 1:  # nothing to compare, and some models have nothing else to read
            return left.new_zeros(batch, 1, dtype=view.dtype)
        others = torch.arange(count, device=left.device).repeat(count, 1)
        others = others[~torch.eye(count, dtype=torch.bool, device=left.device)].view(count, count - 1)
        kept = left[:, others].flatten(0, 1)
        image = torch.arange(batch, device=left.device).repeat_interleave(count)
        found = [
            runner.explained(
                at_least_float32(runner.logits_of_kept(runner.inputs[rows], kept[part])), "log_probability"
            )
            .gather(1, target[rows][:, None])
            .squeeze(1)
            for part in torch.split(torch.arange(len(image), device=left.device), runner.batch)
            for rows in (image[part],)
        ]
        return torch.cat(found).view(batch, count).to(view.dtype)


@register(
    "random",
    family="control",
    paper="Samek et al., Evaluating the Visualization of What a Deep Neural Network Has Learned",
    year=2017,
    arxiv="1509.06321",
    class_specific=False,
    signed=False,
)
def random_order(*, seed: Annotated[int, "of the numbers, together with the image"] = 0) -> RandomOrder:
    """Control: random numbers, the same for the same image; what any method must beat."""
    return RandomOrder(seed)


@register(
    "centre",
    family="control",
    paper="Judd et al., Learning to Predict Where Humans Look",
    year=2009,
    doi="10.1109/ICCV.2009.5459462",
    class_specific=False,
    signed=False,
)
def centre(
    *, spread: Annotated[float, "standard deviation, as a part of the image's height and width"] = 0.25
) -> CentredGaussian:
    """Control: a Gaussian in the centre of the image, where photographers put objects."""
    return CentredGaussian(spread)


@register(
    "edges",
    family="control",
    paper="Adebayo et al., Sanity Checks for Saliency Maps",
    year=2018,
    arxiv="1810.03292",
    class_specific=False,
    signed=False,
)
def edges() -> Edges:
    """Control: how strong the edges of the image are in each patch, whatever the model does."""
    return Edges()


@register(
    "oracle",
    family="ceiling",
    paper="Hase et al., The Out-of-Distribution Problem in Explainability and Search Methods for Feature Importance "
    "Explanations",
    year=2021,
    arxiv="2106.00786",
    note="greedy search instead of their parallel local search",
    class_specific=True,
    signed=False,
)
def oracle(
    *,
    steps: Annotated[
        int, "rounds of a search; on n patches one search costs about n (steps + 1) / 2 evaluations", AtMost(10_000)
    ] = 8,
    order: Annotated[
        OracleOrder, "search what lowers the output when it goes, what keeps it up, or add both ranks"
    ] = "both",
) -> GreedyOracle:
    """Ceiling: the order of patches found by asking the model itself, for curves of deletion and insertion."""
    return GreedyOracle(steps, order)


_REACHED = 0.9  # of the way from nothing to the whole image: from here on MDA orders by deletion
_MOST_CANDIDATES = 28  # of one step of MDA's search
_PENDING = 8  # candidates for the last place that LiMA looks at more closely
_CONSISTENCY, _COLLABORATION, _CONFIDENCE = 20.0, 5.0, 0.01  # weights of LiMA's program


class RegionSearch(PerturbationMethod):
    """An order of regions found by running the model on subsets of them.

    Args:
        cells: regions along each side of the image; 0 for single patches.
    """

    _by = "drop"

    def __init__(self, cells: int) -> None:
        if cells < 0:
            raise MethodError("cells must be at least 1, or 0 for single patches")
        self._cells = cells

    def maps(self, view: View) -> Tensor:
        """One search for every image and target."""
        regions = self.regions(view)
        region_of = regions.int().argmax(dim=0)
        found = []
        for image, targets in enumerate(all_targets(view)):
            searches = [self.search(RegionSubsets(view, image, int(target), regions)) for target in targets]
            found.append(torch.stack([values.to(view.dtype)[region_of] for values in searches]))
        return torch.stack(found).to(view.target.device)

    def regions(self, view: View) -> Tensor:
        """Which patches belong to each region, (regions, patches); each patch to one."""
        grid = view.layout.grid
        if self._cells == 0:
            return torch.eye(view.layout.patches, dtype=torch.bool)
        side = max(1, math.ceil(max(grid) / self._cells))
        return windows(grid, side, side)

    @abstractmethod
    def search(self, subsets: RegionSubsets) -> Tensor:
        """The score of every region, (regions,)."""


class RegionSubsets:
    """The model's probabilities for subsets of the regions of one image, with a cache."""

    def __init__(self, view: View, image: int, target: int, regions: Tensor) -> None:
        self._view, self._image, self.target, self._regions = view, image, target, regions
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.count = len(regions)

    def probabilities(self, sets: list[tuple[int, ...]]) -> Tensor:
        """Probabilities of all classes with only the regions of each set, (sets, classes); cached."""
        sets = [tuple(sorted(each)) for each in sets]
        new = [each for each in dict.fromkeys(sets) if each not in self._known]
        kept = {each: self._regions[list(each)].any(dim=0).nonzero()[:, 0] for each in new}
        for size in sorted({len(patches) for patches in kept.values()}):
            alike = [each for each in new if len(kept[each]) == size]
            self._known.update(zip(alike, self._run(torch.stack([kept[each] for each in alike])), strict=True))
        return torch.stack([self._known[each] for each in sets])

    def of_class(self, sets: list[tuple[int, ...]]) -> Tensor:
        """The probability of the explained class with the regions of each set, (sets,)."""
        return self.probabilities(sets)[:, self.target]

    def _run(self, kept: Tensor) -> Tensor:
        runner = self._view.runner
        found = []
        for part in torch.split(kept.to(runner.inputs.device), runner.batch):
            inputs = runner.inputs[torch.full((len(part),), self._image, device=part.device)]
            found.append(runner.explained(at_least_float32(runner.logits_of_kept(inputs, part)), "probability").cpu())
        return torch.cat(found).double()

    @property
    def all(self) -> tuple[int, ...]:
        """Every region."""
        return tuple(range(self.count))

    def without(self, some: tuple[int, ...]) -> tuple[int, ...]:
        """Every other region."""
        gone = set(some)
        return tuple(number for number in range(self.count) if number not in gone)


class MetricDriven(RegionSearch):
    """MDA: an order that is best for insertion first and for deletion after that, and the drops of its curve as sizes.

    Regions are first ranked by what the probability loses without each. Insertion puts in, of the 2 sqrt(n) highest
    that are left, the one that raises it most, until 0.9 of the way to the whole image. The others are ordered from the
    end: starting from nothing, of the 2 sqrt(n) lowest the one that raises it least. Sizes are the drops of the mean of
    insertion and deletion curve along that order, made monotone, so that they keep it; the paper makes the curve convex
    by a quadratic program, which orders the same.
    """

    def search(self, subsets: RegionSubsets) -> Tensor:
        """Order, then sizes."""
        order = self.order(subsets)
        return _sizes(subsets, order)

    def order(self, subsets: RegionSubsets) -> list[int]:
        """All regions, the most important first."""
        whole = float(subsets.of_class([subsets.all])[0])
        losses = whole - subsets.of_class([subsets.without((number,)) for number in subsets.all])
        ranked = losses.argsort(descending=True, stable=True).tolist()
        first = self._best_first(subsets, ranked, whole)
        rest = [number for number in reversed(ranked) if number not in set(first)]
        last: list[int] = []
        while rest:
            candidates = rest[: _candidates(subsets.count)]
            outputs = subsets.of_class([(*last, number) for number in candidates])
            last.append(candidates[int(outputs.argmin())])
            rest.remove(last[-1])
        return [*first, *reversed(last)]

    def _best_first(self, subsets: RegionSubsets, ranked: list[int], whole: float) -> list[int]:
        found: list[int] = []
        left = list(ranked)
        start: float | None = None
        while left:
            candidates = left[: _candidates(subsets.count)]
            outputs = subsets.of_class([(*found, number) for number in candidates])
            # Some models have nothing to read without patches: their way starts at the worst single region.
            start = float(outputs.min()) if start is None else start
            found.append(candidates[int(outputs.argmax())])
            left.remove(found[-1])
            if float(outputs.max()) - start >= _REACHED * (whole - start):
                break
        return found


class SubmodularSearch(RegionSearch):
    """LiMA: greedy from both ends on F(S) = 20 p_c(S) + 5 (1 - p_c(V - S)) + 0.01 (1 - H(S) / log K).

    In each round every region that is left is tried: the one with the largest F(S + r) comes next at the front; of the
    eight with the smallest, the one with the smallest F(E + r) joins the set E at the end. H is the entropy of the K
    probabilities. The weights are those of the authors' program for classifiers, whose fourth term (distances between
    regions' features) is off there.
    """

    def search(self, subsets: RegionSubsets) -> Tensor:
        """Ranks from 1 down to 0."""
        order = self.order(subsets)
        ranks = torch.empty(subsets.count, dtype=torch.float64)
        ranks[order] = torch.linspace(1, 0, subsets.count, dtype=torch.float64)
        return ranks

    def order(self, subsets: RegionSubsets) -> list[int]:
        """All regions, the most important first."""
        front: tuple[int, ...] = ()
        end: tuple[int, ...] = ()
        left = list(subsets.all)
        while len(left) > 1:
            values = self.value(subsets, [(*front, number) for number in left])
            best = int(values.argmax())
            lowest = values.argsort(stable=True)[:_PENDING].tolist() if len(left) > _PENDING else []
            pending = [left[place] for place in lowest if place != best]
            front = (*front, left[best])
            left.remove(front[-1])
            if pending:
                end_values = self.value(subsets, [(*end, number) for number in pending])
                end = (*end, pending[int(end_values.argmin())])
                left.remove(end[-1])
        return [*front, *left, *reversed(end)]

    def value(self, subsets: RegionSubsets, sets: list[tuple[int, ...]]) -> Tensor:
        """F of some sets, (sets,)."""
        probabilities = subsets.probabilities(sets)
        entropy = torch.special.entr(probabilities).sum(dim=1)
        confidence = 1 - entropy / math.log(max(2, probabilities.shape[1]))
        without = subsets.of_class([subsets.without(each) for each in sets])
        consistency = probabilities[:, subsets.target]
        found: Tensor = _CONSISTENCY * consistency + _COLLABORATION * (1 - without) + _CONFIDENCE * confidence
        return found


def _candidates(count: int) -> int:
    return max(1, min(_MOST_CANDIDATES, 2 * math.isqrt(count)))


def _sizes(subsets: RegionSubsets, order: list[int]) -> Tensor:
    """What each region of an order takes off the curve, made monotone; equal ones still keep the order."""
    count = subsets.count
    steps = range(1, count)
    inserted = subsets.of_class([tuple(order[:step]) for step in steps])
    deleted = subsets.of_class([tuple(order[step:]) for step in steps])
    whole = subsets.of_class([subsets.all])
    # Both run from the least to the most: what is gained by insertion, and what is lost by deletion.
    gained = torch.cat((inserted, whole)) / whole.clamp(min=torch.finfo(whole.dtype).tiny)
    lost = 1 - torch.cat((deleted, deleted[-1:])) / whole.clamp(min=torch.finfo(whole.dtype).tiny)
    curve = torch.cat((whole.new_zeros(1), (gained + lost) / 2)).clamp(0, 1).cummax(dim=0).values
    drops = _decreasing(curve.diff())
    falling = torch.linspace(1, 0, count, dtype=drops.dtype)
    sizes = torch.empty_like(drops)
    sizes[order] = drops * (1 + falling) + falling * 1e-6
    return sizes


def _decreasing(values: Tensor) -> Tensor:
    """The nearest numbers that nowhere rise (least squares, pooled neighbours)."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, size = value, 1
        while pools and pools[-1][0] < mean:
            before, length = pools.pop()
            mean, size = (mean * size + before * length) / (size + length), size + length
        pools.append((mean, size))
    return torch.cat([values.new_full((size,), mean) for mean, size in pools])


@register(
    "mda",
    family="ceiling",
    paper="Walker et al., Metric-Driven Attributions for Vision Transformers",
    year=2025,
    url="https://openreview.net/forum?id=rGP2jbWt0l",
    note="regions are dropped instead of painted",
    class_specific=True,
    signed=False,
)
def mda(
    *, cells: Annotated[int, "regions along each side of the image; 0 for single patches", AtMost(1000)] = 0
) -> MetricDriven:
    """Ceiling: the order of patches that is best for insertion, then for deletion, found by a search on subsets."""
    return MetricDriven(cells)


@register(
    "lima",
    family="ceiling",
    paper="Chen et al., Less is More: Efficient Black-box Attribution via Minimal Interpretable Subset Selection",
    year=2025,
    arxiv="2504.00470",
    note="squares of patches instead of superpixels, dropped instead of painted",
    class_specific=True,
    signed=False,
)
def lima(
    *, cells: Annotated[int, "regions along each side of the image; 0 for single patches", AtMost(1000)] = 7
) -> SubmodularSearch:
    """Ceiling: an order of regions by greedy search from both ends on a submodular score of the model's output."""
    return SubmodularSearch(cells)

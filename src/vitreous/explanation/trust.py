"""How far maps can be trusted, as data: the measurements of one image, the verdict, and a sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from vitreous.inputs.model_io import percent
from vitreous.metrics.metric import Floats
from vitreous.metrics.sanity import ranks, spearman

Order = np.typing.NDArray[np.int64]
Verdict = Literal["good", "fair", "poor", "not measured"]
Removal = Literal["dropped", "painted"]

KEPT = (5, 10, 20, 35, 50)  # percent of the patches that are kept, the highest first
REMOVED = (25, 50, 65, 80, 95)  # percent of the patches that are removed, the highest first
COMPARED = 20  # percent at which maps are compared with random orders; see docs/trust.md on the choice
HALF = 50  # percent of the patches; whether fewer or more are removed next depends on what half of them changes
SIDES = ("top", "bottom")
RANDOM_SETS = 5  # disjoint, so that every pair of them is the highest and the lowest part of a random order

# Chosen on one half of the images by benchmarks/trust_calibration.py, which reports the other half.
_GOOD, _FAIR = 0.25, 0.0  # of the gap between the highest and the lowest patches, as a part of the probability
DOUBTFUL_BOUND = 0.25  # as many random orders may do as well
LIKELY = 0.3  # below this, no class is likely
NO_EFFECT = 0.01  # of the probability
UNSTABLE = 0.5  # rank correlation with the map of the image shifted by one pixel
# Of 65 pet photos that its head was not trained on, by benchmarks/trust_far_photos.py.
ENERGY_BOUNDS: Mapping[str, float] = {"demo": 5.46}
NO_PART_MATTERS = "no removed part of the photo changes the prediction, so no map of patches can explain it"
FAR_SHARE = 10  # percent of the reference photos; those whose energy is lower still are far from what a model knows
_THIRDS = (("upper left", "top", "upper right"), ("left", "centre", "right"), ("lower left", "bottom", "lower right"))
_DEPTHS = ("first third's", "middle third's", "last third's")  # of a volume's depth or a clip's time


@dataclass(frozen=True)
class Share:
    """A share of the patches and the probability of the explained class that goes with it.

    Attributes:
        percent: of the patches.
        probability: with them, or without them.
    """

    percent: float
    probability: float


@dataclass(frozen=True)
class MapTrust:
    """What one map is worth.

    Attributes:
        gap: probability with the highest 20% of the patches alone minus that with the lowest 20% alone.
        beats: how many of ``orders`` random orders have a smaller gap.
        orders: random orders, made of pairs of disjoint random sets of patches: one is the highest, one the lowest.
        bound: the largest share of all random orders that can have such a gap, by Cantelli's inequality with the
            variance of these; 1 where the map is no better than chance.
        keeps: the smallest measured share of patches that keeps the prediction; None where none is enough.
        destroys: the smallest measured share of patches whose removal changes the prediction; None where none does.
        stability: rank correlation with the map of the photo shifted by one pixel; None where it was not measured.
        total: the sum of the map, where its sign means something.
    """

    gap: float
    beats: int
    orders: int
    bound: float
    keeps: Share | None = None
    destroys: Share | None = None
    stability: float | None = None
    total: float | None = None


@dataclass(frozen=True)
class Account:
    """What the explained output is made of, measured by removing all patches.

    Attributes:
        output: the logit (or what the model gives instead) of the whole photo.
        without_patches: the same when all patches are removed: class token, registers and biases.
        patches: the difference, which is all that a map of patches can explain.
    """

    output: float
    without_patches: float
    patches: float


@dataclass(frozen=True)
class Trust:
    """How far the maps of one image can be trusted.

    Attributes:
        verdict: ``good``, ``fair``, ``poor``, or ``not measured`` where there is nothing to measure.
        sentence: all of it for a reader.
        method: the map that the verdict is on, the first of the explanation.
        best: the map with the largest gap.
        target: the explained class.
        target_name: its name, or its number.
        probability: of that class; NaN where the target is no class.
        predicted: the class with the highest output; -1 where the target is no class.
        maps: the measurements, by method.
        account: what patches carry of the output; None where not all patches can be removed.
        agreement: mean rank correlation of all pairs of maps; None of a single map.
        agree_on: the part of the photo that all maps rank highest; None of a single map.
        disagree_on: the part of the photo where their ranks differ most; None of a single map.
        removal: whether patches were ``dropped`` or ``painted``.
        evaluations: how many images the model evaluated, each with a part of its patches; the shifted one besides.
        notes: what a reader should know besides.
        energy: log of the sum of exp(logit) over all classes, high for what a model knows (Liu et al. 2020); None where
            outputs are no logits of a softmax.
        energy_bound: what 90% of the reference photos are above; None where there are none.

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain(model, "demo.jpg", ["gae", "ixg.plus"])
        >>> (trust,) = vitreous.trust(model, "demo.jpg", explanation)
        >>> trust.verdict in ("good", "fair", "poor")
        True
        >>> trust.maps["gae"].orders
        20
    """

    verdict: Verdict
    sentence: str
    method: str
    best: str
    target: int
    target_name: str
    probability: float
    predicted: int
    maps: Mapping[str, MapTrust]
    account: Account | None
    agreement: float | None
    agree_on: str | None
    disagree_on: str | None
    removal: Removal
    evaluations: int
    notes: tuple[str, ...] = ()
    energy: float | None = None
    energy_bound: float | None = None

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """Give everything as JSON values."""
        values = {**asdict(self), "notes": list(self.notes)}
        return values | {"probability": None if math.isnan(self.probability) else self.probability}


@dataclass
class Parts:
    """The model's output on parts of one photo: the highest (top) or the lowest (bottom) patches of a map.

    Attributes:
        orders: the patches of every map, the highest first.
        run: the probabilities of all classes with some sets of patches, (sets, classes).
        outputs: what was run, by method, side and percent of the patches.
    """

    orders: Mapping[str, Order]
    run: Callable[[Sequence[Order]], Floats]
    outputs: dict[tuple[str, str, int], Floats] = field(default_factory=dict)

    def patches(self, method: str, side: str, share: int) -> Order:
        """The highest or the lowest patches of a map."""
        order = self.orders[method]
        count = count_of(share, len(order))
        return order[:count] if side == "top" else order[len(order) - count :]

    def prepare(self, wanted: Sequence[tuple[str, str, int]], others: Sequence[Order]) -> Floats:
        """Run several parts together, and other sets whose outputs are returned."""
        found = self.run([*(self.patches(*one) for one in wanted), *others])
        self.outputs.update(zip(wanted, found, strict=False))
        return found[len(wanted) :]

    def output(self, method: str, side: str, share: int) -> Floats:
        """The output on one part, run now if it was not before."""
        if (method, side, share) not in self.outputs:
            (self.outputs[method, side, share],) = self.run([self.patches(method, side, share)])
        return self.outputs[method, side, share]


def count_of(share: int, patches: int) -> int:
    """How many patches a share of them is, one at least and not all."""
    return min(patches - 1, max(1, round(patches * share / 100)))


def smallest_keeping(keeps: Callable[[int], bool]) -> int | None:
    """The smallest share that keeps a prediction; large ones cost more and are run where smaller ones do not."""
    shares = KEPT if keeps(COMPARED) else [share for share in KEPT if share > COMPARED]
    return next((share for share in shares if keeps(share)), None)


def smallest_destroying(destroys: Callable[[int], bool]) -> int | None:
    """The smallest share whose removal changes a prediction: below one half where that changes it, else above."""
    if destroys(HALF):
        return next((share for share in REMOVED if share < HALF and destroys(share)), HALF)
    found = None
    for share in reversed(REMOVED):
        if share <= HALF or not destroys(share):
            return found
        found = share
    return found


def against_chance(gap: float, chance: Floats) -> MapTrust:
    """Compare a gap with those of random orders, whose highest and lowest patches are two disjoint random sets.

    Args:
        gap: of the map.
        chance: the probability with each of several disjoint random sets of patches.
    """
    random = np.array([one - other for one, other in itertools.permutations(chance.tolist(), 2)])
    # Any two of the sets are distributed as the ends of a random order, whose gap has the mean 0: this is unbiased.
    variance = float((random**2).mean())
    bound = variance / (variance + gap**2) if gap > 0 and variance + gap**2 > 0 else 1.0
    return MapTrust(gap, int((random < gap).sum()), len(random), bound)


def verdict_of(map_: MapTrust, probability: float, *, doubtful: bool) -> Verdict:
    """Judge a map by its gap as a part of the class's probability; what is doubtful is not good, whatever its gap."""
    relative = map_.gap / probability if probability > 0 else 0.0
    if relative < _FAIR or map_.bound > DOUBTFUL_BOUND:
        return "poor"
    return "good" if relative >= _GOOD and not doubtful else "fair"


def doubts_of(found: Trust, map_: MapTrust, likeliest: str, probability: float) -> tuple[str, ...]:
    """What speaks against a map, whatever its gap; ``likeliest`` is the class with the highest ``probability``."""
    doubts = []
    if probability < LIKELY:
        doubts.append(f"no class is likely: the highest is {likeliest!r} with {percent(probability)}")
    elif found.predicted != found.target:
        doubts.append(f"the model says {likeliest!r} ({percent(probability)}), not the explained class")
    if found.energy is not None and found.energy_bound is not None and found.energy < found.energy_bound:
        doubts.append(
            f"the photo lies far from what the model knows: its energy of {found.energy:.1f} is below "
            f"{found.energy_bound:.1f}, which {100 - FAR_SHARE}% of the reference photos are above"
        )
    if map_.stability is not None and not map_.stability >= UNSTABLE:
        doubts.append(f"a shift by one pixel changes the map of {found.method} (rank correlation {map_.stability:.2f})")
    return tuple(doubts)


def agreement_of(maps: Mapping[str, Floats], grid: tuple[int, ...]) -> tuple[float | None, str | None, str | None]:
    """Mean rank correlation of the maps, the part that all rank highest, and the part where ranks differ most.

    Parts are thirds along height and width; of a volume or clip also along its depth or time, which come first.
    """
    if len(maps) < 2:
        return None, None, None
    pairs = [spearman(one, other) for one, other in itertools.combinations(maps.values(), 2)]
    places = np.stack([ranks(scores) / scores.size for scores in maps.values()])
    thirds = np.meshgrid(*(np.arange(length) * 3 // length for length in grid), indexing="ij")
    part = np.ravel_multi_index([each.ravel() for each in thirds], (3,) * len(grid))
    present = sorted(set(part.tolist()))
    lowest = {number: float(places[:, part == number].mean(axis=1).min()) for number in present}
    spread = {number: float(places.std(axis=0)[part == number].mean()) for number in present}
    high, torn = max(lowest, key=lowest.__getitem__), max(spread, key=spread.__getitem__)
    return float(np.mean(pairs)), _part_name(high, len(grid)), _part_name(torn, len(grid))


def _part_name(number: int, axes: int) -> str:
    """Name a part by its thirds, counted from the first axis on."""
    name = _THIRDS[number % 9 // 3][number % 3]
    return name if axes == 2 else f"{_DEPTHS[number // 9]} {name}"


def figures_of(found: Trust) -> list[tuple[str, str, str]]:
    """What was measured, for cards and tables: a name, a value, and what it means."""
    figures: list[tuple[str, str, str]] = []
    first = found.maps.get(found.method)
    if first is not None:
        kept, lost = first.keeps, first.destroys
        figures += [
            (
                "Keeps the prediction",
                "none" if kept is None else f"{kept.percent:g}% of the patches",
                "The highest patches",
            ),
            ("Destroys it", "none" if lost is None else f"without {lost.percent:g}%", "Without the highest patches"),
            (
                "Random orders beaten",
                f"{first.beats} of {first.orders}",
                "By the gap between highest and lowest patches",
            ),
        ]
        if first.stability is not None:
            figures.append(("Shifted by a pixel", f"{first.stability:.2f}", "Rank correlation of both maps"))
    if found.agreement is not None:
        figures.append(("Agreement of methods", f"{found.agreement:.2f}", "Mean rank correlation of all pairs"))
    if found.account is not None:
        carried = f"{found.account.patches:.1f} of {found.account.output:.1f}"
        figures.append(("Logit from patches", carried, "The rest: class token, registers and biases"))
    return figures


def sentence(found: Trust) -> str:
    """Write a measured trust for a reader."""
    map_, name = found.maps[found.method], found.target_name
    parts = [_kept_part(map_, name), _destroyed_part(map_)]
    parts.append(_chance_part(map_))
    if found.best != found.method:
        gaps = " to ".join(f"{100 * found.maps[name].gap:.0f}" for name in (found.best, found.method))
        parts.append(f"that of {found.best} does better (a gap of {gaps} points)")
    if found.agreement is not None:
        where = f"on the {found.agree_on} part" if found.agree_on != found.disagree_on else "in parts"
        likeness = f"methods agree {where} and differ most on the {found.disagree_on} part"
        parts.append(f"{likeness} (rank correlation {found.agreement:.2f})")
    if found.account is not None:
        account = found.account
        parts.append(
            f"patches carry {account.patches:.1f} of the logit {account.output:.1f}, class token and biases "
            f"{account.without_patches:.1f}"
        )
    notes = "".join(f" Note: {note}." for note in found.notes)
    body = "; ".join(part for part in parts if part)
    return f"Trust: {found.verdict}. {body[0].upper()}{body[1:]}.{notes}"


def _kept_part(map_: MapTrust, name: str) -> str:
    if map_.keeps is None:
        return f"the highest {KEPT[-1]}% of the patches do not keep {name!r}"
    return f"{map_.keeps.percent:g}% of the patches keep {name!r} at {percent(map_.keeps.probability)}"


def _chance_part(map_: MapTrust) -> str:
    beaten = f"the map beats {map_.beats} of {map_.orders} random orders"
    # Rounded down: it is a lower bound.
    least = math.floor(100 * (1 - map_.bound))
    return f"{beaten} and at least {least}% of all" if least else beaten


def _destroyed_part(map_: MapTrust) -> str:
    if map_.destroys is None:
        return f"it stays even without the highest {REMOVED[-1]}%"
    return f"without the highest {map_.destroys.percent:g}% it is lost"

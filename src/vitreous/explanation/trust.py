"""How far maps can be trusted, as data: the measurements of one image, the verdict, and a sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from vitreous.inputs.outputs import percent
from vitreous.metrics.metric import Floats
from vitreous.metrics.sanity import ranks, spearman

Verdict = Literal["good", "fair", "poor", "not measured"]
Removal = Literal["dropped", "painted"]

KEPT = (5, 10, 25, 50)  # percent of the patches that are kept, the highest first
REMOVED = (10, 25, 50, 75, 90)  # percent of the patches that are removed, the highest first
COMPARED = (10, 25)  # percent at which maps are compared with random orders
RANDOM_ORDERS = 8

# Chosen on one half of the images by benchmarks/trust_calibration.py, which reports the other half.
_GOOD, _FAIR = 0.15, 0.0  # of the gap between the highest and the lowest patches, as a part of the probability
DOUBTFUL_BOUND = 0.25  # as many random orders may do as well
LIKELY = 0.3  # below this, no class is likely
NO_EFFECT = 0.01  # of the probability
UNSTABLE = 0.5  # rank correlation with the map of the image shifted by one pixel
# Of 65 pet photos that its head was not trained on, by benchmarks/trust_far_photos.py.
ENERGY_BOUNDS: Mapping[str, float] = {"demo": 5.46}
FAR_SHARE = 10  # percent of the reference photos; those whose energy is lower still are far from what a model knows
_THIRDS = (("upper left", "top", "upper right"), ("left", "centre", "right"), ("lower left", "bottom", "lower right"))


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
        gap: mean probability with the highest patches alone minus that with the lowest alone, at 10 and 25%.
        beats: how many of ``orders`` random orders have a smaller gap.
        orders: random orders, made of pairs of random sets of patches.
        bound: the largest share of all random orders that can have such a gap, by Cantelli's inequality with the
            variance of the random sets; 1 where the map is no better than chance.
        keeps: the smallest measured share of patches from which on the prediction stays; None where none is enough.
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
        56
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


def against_chance(gap: float, chance: Floats) -> MapTrust:
    """Compare a gap with those of random orders, whose highest and lowest patches are two random sets."""
    random = np.array([one - other for one, other in itertools.permutations(chance.tolist(), 2)])
    # A random order's gap has mean 0 and twice the variance of a random set's probability.
    variance = 2 * float(chance.var(ddof=1))
    bound = variance / (variance + gap**2) if gap > 0 and variance + gap**2 > 0 else 1.0
    return MapTrust(gap, int((random < gap).sum()), len(random), bound)


def verdict_of(map_: MapTrust, probability: float, *, doubtful: bool) -> Verdict:
    """Judge a map by its gap as a part of the class's probability; what is doubtful is not good, whatever its gap."""
    relative = map_.gap / probability if probability > 0 else 0.0
    if relative < _FAIR or map_.bound > DOUBTFUL_BOUND:
        return "poor"
    return "good" if relative >= _GOOD and not doubtful else "fair"


def agreement_of(maps: Mapping[str, Floats], grid: tuple[int, int]) -> tuple[float | None, str | None, str | None]:
    """Mean rank correlation of the maps, the part that all rank highest, and the part where ranks differ most."""
    if len(maps) < 2:
        return None, None, None
    pairs = [spearman(one, other) for one, other in itertools.combinations(maps.values(), 2)]
    places = np.stack([ranks(scores) / scores.size for scores in maps.values()])
    third = [np.arange(length) * 3 // length for length in grid]
    part = (third[0][:, None] * 3 + third[1]).ravel()
    present = sorted(set(part.tolist()))
    lowest = {number: float(places[:, part == number].mean(axis=1).min()) for number in present}
    spread = {number: float(places.std(axis=0)[part == number].mean()) for number in present}
    high, torn = max(lowest, key=lowest.__getitem__), max(spread, key=spread.__getitem__)
    return float(np.mean(pairs)), _THIRDS[high // 3][high % 3], _THIRDS[torn // 3][torn % 3]


def sentence(found: Trust) -> str:
    """Write a measured trust for a reader."""
    map_, name = found.maps[found.method], found.target_name
    parts = [_kept_part(map_, name), _destroyed_part(map_)]
    parts.append(f"the map beats {map_.beats} of {map_.orders} random orders")
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


def _destroyed_part(map_: MapTrust) -> str:
    if map_.destroys is None:
        return f"it stays even without the highest {REMOVED[-1]}%"
    return f"without the highest {map_.destroys.percent:g}% it is lost"

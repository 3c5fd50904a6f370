"""``trust``: what the maps of one photo are worth for one prediction, measured on the model by dropped patches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.tensors import exact, float64_array
from vitreous._utils.torch_state import leaves_torch_as_it_was
from vitreous.api.explain import black_pixel, declared_outputs, explain, find_recipes, network_of, stage_of
from vitreous.api.run_methods import run_on_images
from vitreous.api.runs import RunSettings
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.views import register_view
from vitreous.inputs.outputs import likelihoods, percent
from vitreous.methods.perturbation import PatchMasks, seeded
from vitreous.methods.readout import patch_means
from vitreous.metrics.metric import Floats
from vitreous.metrics.sanity import is_constant, ranks, spearman
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.tape.runner import ModelRunner

Verdict = Literal["good", "fair", "poor", "not measured"]

KEPT = (5, 10, 25, 50)  # percent of the patches that are kept, the highest first
REMOVED = (10, 25, 50, 75, 90)  # percent of the patches that are removed, the highest first
COMPARED = (10, 25)  # percent at which maps are compared with random orders
RANDOM_ORDERS = 8

# Chosen on one half of the photos by benchmarks/trust_calibration.py, which reports the other half.
_GOOD, _FAIR = 0.5, 0.2  # of the gap between the highest and the lowest patches, as a part of the probability
_DOUBTFUL_BOUND = 0.25  # as many random orders may do as well
_LIKELY = 0.3  # below this, no class is likely
_NO_EFFECT = 0.01  # of the probability
_UNSTABLE = 0.5  # rank correlation with the map of a photo that is shifted by one pixel
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
    """How far the maps of one photo can be trusted.

    Attributes:
        verdict: ``good``, ``fair``, ``poor``, or ``not measured`` where there is nothing to measure.
        sentence: all of it for a reader.
        method: the map that the verdict is on, the first of the explanation.
        best: the map with the largest gap.
        target: the explained class.
        target_name: its name, or its number.
        probability: of that class.
        predicted: the class with the highest output.
        maps: the measurements, by method.
        account: what patches carry of the output; None where not all patches can be removed.
        agreement: mean rank correlation of all pairs of maps; None of a single map.
        agree_on: the part of the photo that all maps rank highest; None of a single map.
        disagree_on: the part of the photo where their ranks differ most; None of a single map.
        removal: whether patches were ``dropped`` or ``painted``.
        evaluations: how many images the model evaluated, each with a part of its patches; the shifted one besides.
        notes: what a reader should know besides.

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
    removal: Literal["dropped", "painted"]
    evaluations: int
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """Give everything as JSON values."""
        return {**asdict(self), "notes": list(self.notes)}


@leaves_torch_as_it_was
def trust(
    model: Model,
    images: Images,
    explanation: Explanation | None = None,
    *,
    target_index: int = 0,
    shift: bool = True,
    seed: int = 0,
) -> tuple[Trust, ...]:
    """Measure what the maps of an explanation are worth for the predictions that they explain.

    The model runs on parts of each photo (True Token Masking: patches are dropped, and a run costs what is left of
    them): the highest 5 to 50% and what remains without the highest 10 to 90% of the first method, the highest and the
    lowest 10 and 25% of the others, and eight random sets of both sizes that all methods are compared with. With one
    method that is 27 runs of a third of the patches on average, some nine whole ones; every further method adds 4. The
    first method explains the photo again, shifted by one pixel.

    Args:
        model: as ``explain`` takes it; the model that was explained.
        images: the same images.
        explanation: what ``explain`` found; None explains with the usual methods first.
        target_index: which of several explained classes.
        shift: whether the stability of the first map is measured, which costs another explanation by it.
        seed: of the random sets.

    Returns:
        One ``Trust`` for every image.

    Examples:
        >>> import vitreous
        >>> (trust,) = vitreous.trust(model, "demo.jpg")
        >>> trust.sentence.startswith("Trust: ")
        True
    """
    found = explain(model, images) if explanation is None else explanation
    loaded = find_model(model, images)
    pixels, _ = find_pixels(loaded, network_of(loaded), images)
    if len(pixels) != len(found) or tuple(pixels.shape[-2:]) != found.image_size:
        raise InputError(
            f"the explanation is of {len(found)} images of {found.image_size}, and the images given are {len(pixels)} "
            f"of {tuple(pixels.shape[-2:])}: pass the images that were explained"
        )
    stage = found.provenance.get("stage", stage_of(loaded))
    settings = RunSettings(black_pixel(loaded, pixels), outputs=found.scale or declared_outputs(loaded), stage=stage)

    def run(network: nn.Module) -> tuple[Trust, ...]:
        return tuple(
            _Measurement(network, pixels[[index]], found, index, target_index, settings).measure(shift=shift, seed=seed)
            for index in range(len(found))
        )

    return run_in_evaluation(network_of(loaded), run)


@register_view(Explanation, "trust")
def _trust_view(explanation: Explanation, model: Model, images: Images, **options: Any) -> tuple[Trust, ...]:
    return trust(model, images, explanation, **options)


class _Measurement:
    """The measurement of one image."""

    def __init__(
        self,
        network: nn.Module,
        image: Tensor,
        explanation: Explanation,
        index: int,
        target_index: int,
        settings: RunSettings,
    ) -> None:
        self._network, self._image, self._explanation = network, image, explanation
        self._index, self._target_index, self._settings = index, target_index, settings
        self._runner = ModelRunner(network, image, black=settings.black, outputs=settings.outputs, stage=settings.stage)
        self._target = explanation.class_index(index, target_index)
        self._removal: Literal["dropped", "painted"] = "dropped"

    def measure(self, *, shift: bool, seed: int) -> Trust:
        """Measure all maps, and conclude."""
        patches = self._runner.layout.patches
        maps = {method: self._patch_scores(method) for method in self._explanation.methods}
        first = next(iter(maps))
        whole = self._probabilities(self._runner.logits(self._image))[0]
        if (reason := self._unmeasurable(maps, patches)) is not None:
            return self._not_measured(first, whole, reason)
        orders = {method: np.argsort(-scores, kind="stable") for method, scores in maps.items()}
        wanted = self._wanted(orders, first, patches)
        sets = self._random_sets(patches, seed)
        outputs = self._outputs([*wanted.values(), *sets], patches)
        by_name = dict(zip(wanted, range(len(wanted)), strict=True))
        chance = np.array([outputs[number, self._target] for number in range(len(wanted), len(outputs))])
        # One mean over the sizes for every random order: its sets of different sizes lie inside each other.
        chance = chance.reshape(RANDOM_ORDERS, len(COMPARED)).mean(axis=1)
        measured = {}
        for method in maps:
            top, bottom = (
                np.mean([outputs[by_name[method, side, share], self._target] for share in COMPARED])
                for side in ("top", "bottom")
            )
            measured[method] = _against_chance(float(top - bottom), chance)
        measured[first] = replace(
            measured[first],
            keeps=self._keeps(outputs, by_name, first, whole),
            destroys=self._destroys(outputs, by_name, first, whole),
            stability=self._stability(first, maps[first]) if shift else None,
        )
        for method, scores in maps.items():
            if self._explanation.signed[method]:
                measured[method] = replace(measured[method], total=float(scores.sum()))
        account = self._account()
        unmoved = float(np.abs(outputs[:, self._target] - whole[self._target]).max()) < _NO_EFFECT * whole[self._target]
        return self._concluded(first, measured, maps, whole, account, unmoved=unmoved)

    # What is run ------------------------------------------------------------------------------------------------------

    def _patch_scores(self, method: str) -> Floats:
        scores = self._explanation.scores_of(method, self._index, self._target_index)
        layout = self._runner.layout
        if scores.numel() != layout.patches:
            scores = patch_means(exact(scores)[None], self._explanation.image_size, layout.grid, layout.geometry)[0]
        return float64_array(scores)

    def _unmeasurable(self, maps: Mapping[str, Floats], patches: int) -> str | None:
        broken = [method for method, scores in maps.items() if not np.isfinite(scores).all()]
        if broken:
            return f"the map of {broken[0]} has values that are not finite"
        if self._runner.scale == "value":
            return "the model's outputs are values (regression), which have no probability to keep or to lose"
        if patches < 4:
            return f"the model sees {patches} patches, too few to remove some of them"
        return None

    def _wanted(
        self, orders: Mapping[str, np.typing.NDArray[np.int64]], first: str, patches: int
    ) -> dict[tuple[str, str, int], np.typing.NDArray[np.int64]]:
        """Which patches are kept, by method, side and percent: the highest (top) or the lowest (bottom)."""
        wanted = {}
        for method, order in orders.items():
            for share in KEPT if method == first else COMPARED:
                wanted[method, "top", share] = order[: _count(share, patches)]
            left = sorted({*COMPARED, *(100 - share for share in REMOVED)}) if method == first else COMPARED
            for share in left:
                wanted[method, "bottom", share] = order[patches - _count(share, patches) :]
        return wanted

    def _random_sets(self, patches: int, seed: int) -> list[np.typing.NDArray[np.int64]]:
        generator = seeded(seed)
        drawn = [torch.randperm(patches, generator=generator).numpy() for _ in range(RANDOM_ORDERS)]
        return [order[: _count(share, patches)] for order in drawn for share in COMPARED]

    def _outputs(self, sets: Sequence[np.typing.NDArray[np.int64]], patches: int) -> Floats:
        """Probabilities of all classes with some of the patches, (sets, classes); equal sizes run together."""
        logits: list[Tensor] = [torch.empty(0)] * len(sets)
        for size in sorted({len(kept) for kept in sets}):
            numbers = [number for number, kept in enumerate(sets) if len(kept) == size]
            kept = torch.from_numpy(np.stack([np.sort(sets[number]) for number in numbers]))
            for number, row in zip(numbers, self._kept(kept, patches), strict=True):
                logits[number] = row
        return self._probabilities(torch.stack(logits))

    def _kept(self, kept: Tensor, patches: int) -> Tensor:
        images = self._image.expand(len(kept), -1, -1, -1)
        if self._removal == "dropped":
            try:
                return self._runner.logits_of_kept(images, kept)
            except UnsupportedModelError:
                self._removal = "painted"
        inside = torch.zeros(len(kept), patches).scatter(1, kept, 1.0)
        masks = PatchMasks(inside, self._runner.layout, self._runner.size)
        pixels = masks.pixels(torch.arange(len(kept))).to(images)
        return self._runner.logits(images * pixels)

    def _probabilities(self, logits: Tensor) -> Floats:
        return float64_array(likelihoods(exact(logits), self._runner.scale))

    def _stability(self, method: str, scores: Floats) -> float:
        """Rank correlation with the map of the photo moved down and right by one pixel."""
        moved = functional.pad(self._image, (1, 0, 1, 0), mode="replicate")[..., :-1, :-1]
        result = run_on_images(self._network, moved, find_recipes([method]), self._target, None, self._settings)
        other = float64_array(result.scores[method][0])
        if other.size != scores.size:
            layout = self._runner.layout
            other = float64_array(
                patch_means(torch.from_numpy(other)[None], self._runner.size, layout.grid, layout.geometry)[0]
            )
        return spearman(scores, other) if np.isfinite(other).all() else math.nan

    def _account(self) -> Account | None:
        if self._removal != "dropped" or not self._runner.layout.reads_prefix_only:
            return None
        nothing = torch.empty(1, 0, dtype=torch.int64, device=self._image.device)
        try:
            without = self._runner.logits_of_kept(self._image, nothing)
        except UnsupportedModelError:
            return None
        output = float(self._explanation.logits[self._index, self._target])
        left = float(exact(without)[0, self._target])
        return Account(output, left, output - left)

    # What follows -----------------------------------------------------------------------------------------------------

    def _holds(self, probabilities: Floats, whole: Floats) -> bool:
        """Whether a prediction stays: the class stays on top, or, if it was not, keeps half of its probability."""
        if int(whole.argmax()) == self._target and len(whole) > 1:
            return int(probabilities.argmax()) == self._target
        return bool(probabilities[self._target] >= whole[self._target] / 2)

    def _keeps(
        self, outputs: Floats, by_name: Mapping[tuple[str, str, int], int], method: str, whole: Floats
    ) -> Share | None:
        found = None
        for share in reversed(KEPT):
            row = outputs[by_name[method, "top", share]]
            if not self._holds(row, whole):
                break
            found = Share(share, float(row[self._target]))
        return found

    def _destroys(
        self, outputs: Floats, by_name: Mapping[tuple[str, str, int], int], method: str, whole: Floats
    ) -> Share | None:
        for share in REMOVED:
            row = outputs[by_name[method, "bottom", 100 - share]]
            if not self._holds(row, whole):
                return Share(share, float(row[self._target]))
        return None

    def _concluded(
        self,
        first: str,
        measured: Mapping[str, MapTrust],
        maps: Mapping[str, Floats],
        whole: Floats,
        account: Account | None,
        *,
        unmoved: bool,
    ) -> Trust:
        agreement, agree_on, disagree_on = _agreement(maps, self._runner.layout.grid)
        notes = self._notes(first, measured[first], maps[first], whole, unmoved=unmoved)
        verdict = _verdict(
            measured[first], float(whole[self._target]), doubtful=bool(notes) and not self._only_painted(notes)
        )
        found = Trust(
            verdict=verdict,
            sentence="",
            method=first,
            best=max(measured, key=lambda method: measured[method].gap),
            target=self._target,
            target_name=self._name(self._target),
            probability=float(whole[self._target]),
            predicted=int(whole.argmax()),
            maps=dict(measured),
            account=account,
            agreement=agreement,
            agree_on=agree_on,
            disagree_on=disagree_on,
            removal=self._removal,
            evaluations=self._runner.evaluations,
            notes=notes,
        )
        return replace(found, sentence=sentence(found))

    def _only_painted(self, notes: tuple[str, ...]) -> bool:
        return len(notes) == 1 and self._removal == "painted"

    def _notes(self, method: str, map_: MapTrust, scores: Floats, whole: Floats, *, unmoved: bool) -> tuple[str, ...]:
        notes = []
        top = int(whole.argmax())
        if float(whole[top]) < _LIKELY:
            notes.append(f"no class is likely: the highest is {self._name(top)!r} with {percent(float(whole[top]))}")
        elif top != self._target:
            notes.append(f"the model says {self._name(top)!r} ({percent(float(whole[top]))}), not the explained class")
        if unmoved:
            notes.append("no removed part of the photo changes the prediction, so no map of patches can explain it")
        if bool(is_constant(scores)):
            notes.append(f"the map of {method} is the same everywhere and orders nothing")
        if map_.stability is not None and not map_.stability >= _UNSTABLE:
            notes.append(f"a shift by one pixel changes the map of {method} (rank correlation {map_.stability:.2f})")
        if self._removal == "painted":
            notes.append("patches were painted with the mean colour, because the model cannot do without them")
        return tuple(notes)

    def _name(self, number: int) -> str:
        names = self._explanation.class_names
        return str(number) if names is None else names[number]

    def _not_measured(self, first: str, whole: Floats, reason: str) -> Trust:
        return Trust(
            verdict="not measured",
            sentence=f"Trust: not measured, because {reason}.",
            method=first,
            best=first,
            target=self._target,
            target_name=self._name(self._target),
            probability=float(whole[self._target]),
            predicted=int(whole.argmax()),
            maps={},
            account=None,
            agreement=None,
            agree_on=None,
            disagree_on=None,
            removal=self._removal,
            evaluations=self._runner.evaluations,
            notes=(reason,),
        )


def _count(share: int, patches: int) -> int:
    """How many patches a share of them is, one at least and not all."""
    return min(patches - 1, max(1, round(patches * share / 100)))


def _against_chance(gap: float, chance: Floats) -> MapTrust:
    """Compare a gap with those of random orders, whose highest and lowest patches are two random sets."""
    random = np.array([one - other for one, other in itertools.permutations(chance.tolist(), 2)])
    # A random order's gap has mean 0 and twice the variance of a random set's probability.
    variance = 2 * float(chance.var(ddof=1))
    bound = variance / (variance + gap**2) if gap > 0 and variance + gap**2 > 0 else 1.0
    return MapTrust(gap, int((random < gap).sum()), len(random), bound)


def _verdict(map_: MapTrust, probability: float, *, doubtful: bool) -> Verdict:
    relative = map_.gap / probability if probability > 0 else 0.0
    if relative < _FAIR or map_.bound > _DOUBTFUL_BOUND:
        return "poor"
    return "good" if relative >= _GOOD and not doubtful else "fair"


def _agreement(maps: Mapping[str, Floats], grid: tuple[int, int]) -> tuple[float | None, str | None, str | None]:
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

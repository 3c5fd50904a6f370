"""``trust``: what the maps of one photo are worth for one prediction, measured on the model by dropped patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.defaults import AUTO
from vitreous._utils.messages import warn_caller
from vitreous._utils.tensors import at_least_float32, float64_array
from vitreous._utils.torch_state import preserves_torch_state
from vitreous.api.explain import black_pixel, declared_outputs, explain, find_recipes, network_of, stage_of
from vitreous.api.run_methods import run_on_images
from vitreous.api.runs import RunSettings
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation
from vitreous.explanation.trust import (
    COMPARED,
    DOUBTFUL_BOUND,
    ENERGY_BOUNDS,
    FAR_SHARE,
    KEPT,
    LIKELY,
    NO_EFFECT,
    RANDOM_ORDERS,
    REMOVED,
    UNSTABLE,
    Account,
    MapTrust,
    Removal,
    Share,
    Trust,
    against_chance,
    agreement_of,
    sentence,
    verdict_of,
)
from vitreous.explanation.views import register_view
from vitreous.inputs.outputs import likelihoods, percent
from vitreous.methods.perturbation import PatchMasks, seeded
from vitreous.methods.readout import patch_means
from vitreous.metrics.metric import Floats
from vitreous.metrics.sanity import is_constant, spearman
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.tape.runner import ModelRunner

_FEWEST_REFERENCES = 10
_CHEAP = 50  # percent of the patches; the removal of fewer is measured only where that of more changes the prediction


@preserves_torch_state
def trust(
    model: Model,
    images: Images,
    explanation: Explanation | None = None,
    *,
    target_index: int = 0,
    shift: bool = True,
    seed: int = 0,
    reference: Images | None = None,
) -> tuple[Trust, ...]:
    """Measure what the maps of an explanation are worth for the predictions that they explain.

    The model runs on parts of each photo (True Token Masking: patches are dropped, and a run costs what is left of
    them): the highest 5 to 50% and what remains without the highest 50 to 90% of the first method (of 10 and 25% only
    where half of the patches destroys the prediction), the highest and the lowest 10 and 25% of the others, and eight
    random sets of both sizes that all methods are compared with. With one method that is 25 to 27 runs of a quarter of
    the patches on average, some seven whole ones; every further method adds 4. The first method explains the photo
    again, shifted by one pixel.

    Args:
        model: as ``explain`` takes it; the model that was explained.
        images: the same images.
        explanation: what ``explain`` found; None explains with the usual methods first.
        target_index: which of several explained classes.
        shift: whether the stability of the first map is measured, which costs another explanation by it.
        seed: of the random sets.
        reference: photos of the kind that the model is for, some dozens at least: a photo whose energy (log sum exp of
            the logits) is below that of 90% of them gets a note. The demo model has a bound of its own.

    Returns:
        One ``Trust`` for every image.

    Examples:
        >>> import vitreous
        >>> (trust,) = vitreous.trust(model, "demo.jpg")
        >>> trust.sentence.startswith("Trust: ")
        True
    """
    found = explain(model, images) if explanation is None else explanation
    bound = _energy_bound(model, reference)
    return _measured(
        model, images, found, target_index, lambda one: one.measure(shift=shift, seed=seed, energy_bound=bound)
    )


def _energy_bound(model: Model, reference: Images | None) -> float | None:
    """What the energy of nearly all photos is above that a model is for, where some are given or the model is known."""
    if reference is None:
        name = model if isinstance(model, str) else getattr(model, "name", None)
        return ENERGY_BOUNDS.get(name) if isinstance(name, str) else None
    loaded = find_model(model, reference)
    pixels, _ = find_pixels(loaded, network_of(loaded), reference)
    if len(pixels) < _FEWEST_REFERENCES:
        raise InputError(f"reference needs {_FEWEST_REFERENCES} photos at least, not {len(pixels)}")

    def run(network: nn.Module) -> float:
        logits = ModelRunner(network, pixels, stage=stage_of(loaded)).logits(pixels)
        return float(np.percentile(float64_array(at_least_float32(logits).logsumexp(dim=1)), FAR_SHARE))

    return run_in_evaluation(network_of(loaded), run)


Measured = TypeVar("Measured")


def _measured(
    model: Model, images: Images, found: Explanation, target_index: int, measure: Callable[[_Measurement], Measured]
) -> tuple[Measured, ...]:
    """Measure the maps of every image."""
    loaded = find_model(model, images)
    pixels, _ = find_pixels(loaded, network_of(loaded), images)
    given = tuple(pixels.shape[-2:] if pixels.dim() == 4 else pixels.shape[1:])
    # Which of a clip's first axes has its channels is found when it runs.
    sizes = {given} if pixels.dim() == 4 else {given[1:], (given[0], *given[2:])}
    if len(pixels) != len(found) or found.image_size not in sizes:
        raise InputError(
            f"the explanation is of {len(found)} images of {found.image_size}, and the images given are {len(pixels)} "
            f"of {given}: pass the images that were explained"
        )
    stage = found.provenance.get("stage", stage_of(loaded))
    settings = RunSettings(black_pixel(loaded, pixels), outputs=found.scale or declared_outputs(loaded), stage=stage)

    def run(network: nn.Module) -> tuple[Measured, ...]:
        return tuple(
            measure(_Measurement(network, pixels[[index]], found, index, target_index, settings))
            for index in range(len(found))
        )

    return run_in_evaluation(network_of(loaded), run)


@preserves_torch_state
def most_trusted(model: Model, images: Images, explanation: Explanation, *, seed: int = 0) -> Explanation:
    """Keep the map of an explanation that the model's own answers speak for: the one with the largest gap.

    The gap of ``trust``: the probability of the class with the highest 10 and 25% of the patches alone, minus that with
    the lowest. It takes 4 runs of a sixth of the patches for every method, and 16 for random sets that all are compared
    with. Of several images the mean gap counts. What was measured is in ``provenance["auto"]``.
    """
    measured = [found for found in _measured(model, images, explanation, 0, lambda one: one.compare(seed)) if found]
    if not measured:
        warn_caller(
            f"methods={AUTO!r} could not be measured here (no class with a probability, or maps that are not finite): "
            f"{explanation.methods[0]} is taken, which is the first candidate"
        )
        chosen, gaps = explanation.methods[0], dict[str, float]()
    else:
        gaps = {name: float(np.mean([each[name].gap for each in measured])) for name in explanation.methods}
        chosen = max(gaps, key=gaps.__getitem__)
        if all(each[chosen].bound > DOUBTFUL_BOUND for each in measured):
            warn_caller(
                f"no candidate is better than random orders of the patches here; {chosen} comes nearest to it, and its "
                "map should not be relied on"
            )
    return replace(
        explanation,
        scores={chosen: explanation.scores[chosen]},
        signed={chosen: explanation.signed[chosen]},
        provenance={**explanation.provenance, "auto": {"method": chosen, "gaps": gaps}},
    )


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
        self._removal: Removal = "dropped"
        self._energy: float | None = None
        self._energy_bound: float | None = None

    def measure(self, *, shift: bool, seed: int, energy_bound: float | None = None) -> Trust:
        """Measure all maps, and conclude."""
        first = self._explanation.methods[0]
        if self._target >= self._explanation.logits.shape[1]:
            return self._not_measured(
                first, None, f"{self._name(self._target)!r} is no class that the model could keep or lose"
            )
        patches = self._runner.layout.patches
        maps = {method: self._patch_scores(method) for method in self._explanation.methods}
        logits = self._runner.logits(self._image)
        whole = self._probabilities(logits)[0]
        if self._runner.scale in {None, "logits"} and logits.shape[1] > 1:
            self._energy, self._energy_bound = float(at_least_float32(logits).logsumexp(dim=1)[0]), energy_bound
        if (reason := self._unmeasurable(maps, patches)) is not None:
            return self._not_measured(first, whole, reason)
        orders = {method: np.argsort(-scores, kind="stable") for method, scores in maps.items()}
        wanted = self._wanted(orders, first, patches)
        sets = self._random_sets(patches, seed)
        outputs = self._outputs([*wanted.values(), *sets], patches)
        by_name = dict(zip(wanted, range(len(wanted)), strict=True))
        measured = self._compared(maps, outputs, by_name)
        measured[first] = replace(
            measured[first],
            keeps=self._keeps(outputs, by_name, first, whole),
            destroys=self._destroys(outputs, by_name, orders[first], whole),
            stability=self._stability(first, maps[first]) if shift else None,
        )
        for method, scores in maps.items():
            if self._explanation.signed[method]:
                measured[method] = replace(measured[method], total=float(scores.sum()))
        account = self._account()
        unmoved = float(np.abs(outputs[:, self._target] - whole[self._target]).max()) < NO_EFFECT * whole[self._target]
        return self._concluded(first, measured, maps, whole, account, unmoved=unmoved)

    def compare(self, seed: int) -> dict[str, MapTrust]:
        """Compare all maps with random orders and measure nothing else; empty where nothing can be measured."""
        patches = self._runner.layout.patches
        maps = {method: self._patch_scores(method) for method in self._explanation.methods}
        is_class = self._target < self._explanation.logits.shape[1]
        if not is_class or self._unmeasurable(maps, patches) is not None:
            return {}
        orders = {method: np.argsort(-scores, kind="stable") for method, scores in maps.items()}
        wanted = self._wanted(orders, None, patches)
        outputs = self._outputs([*wanted.values(), *self._random_sets(patches, seed)], patches)
        return self._compared(maps, outputs, dict(zip(wanted, range(len(wanted)), strict=True)))

    def _compared(
        self, maps: Mapping[str, Floats], outputs: Floats, by_name: Mapping[tuple[str, str, int], int]
    ) -> dict[str, MapTrust]:
        """The gap of every map, and its place among the random sets, whose outputs come after those of the maps."""
        chance = outputs[len(by_name) :, self._target]
        # One mean over the sizes for every random order: its sets of different sizes lie inside each other.
        chance = chance.reshape(RANDOM_ORDERS, len(COMPARED)).mean(axis=1)
        measured = {}
        for method in maps:
            top, bottom = (
                np.mean([outputs[by_name[method, side, share], self._target] for share in COMPARED])
                for side in ("top", "bottom")
            )
            measured[method] = against_chance(float(top - bottom), chance)
        return measured

    # What is run ------------------------------------------------------------------------------------------------------

    def _patch_scores(self, method: str) -> Floats:
        scores = self._explanation.scores_of(method, self._index, self._target_index)
        layout = self._runner.layout
        if scores.numel() != layout.patches:
            scores = patch_means(
                at_least_float32(scores)[None], self._explanation.image_size, layout.grid, layout.geometry
            )[0]
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
        self, orders: Mapping[str, np.typing.NDArray[np.int64]], first: str | None, patches: int
    ) -> dict[tuple[str, str, int], np.typing.NDArray[np.int64]]:
        """Which patches are kept, by method, side and percent: the highest (top) or the lowest (bottom)."""
        wanted = {}
        for method, order in orders.items():
            for share in KEPT if method == first else COMPARED:
                wanted[method, "top", share] = order[: _count(share, patches)]
            cheap = (100 - share for share in REMOVED if share >= _CHEAP)
            left = sorted({*COMPARED, *cheap}) if method == first else COMPARED
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
        images = self._image.expand(len(kept), *self._image.shape[1:])
        if self._removal == "dropped":
            try:
                return self._runner.logits_of_kept(images, kept)
            except UnsupportedModelError:
                self._removal = "painted"
        inside = torch.zeros(len(kept), patches).scatter(1, kept, 1.0)
        masks = PatchMasks(inside, self._runner.layout, self._runner.size)
        pixels = masks.pixels(torch.arange(len(kept))).to(images).unsqueeze(self._runner.channel_axis)
        return self._runner.logits(images * pixels)

    def _probabilities(self, logits: Tensor) -> Floats:
        return float64_array(likelihoods(at_least_float32(logits), self._runner.scale))

    def _stability(self, method: str, scores: Floats) -> float:
        """Rank correlation with the map of the photo moved down and right by one pixel."""
        # Every plane by itself, also of a volume or a clip.
        planes = self._image.reshape(-1, 1, *self._image.shape[-2:])
        moved = functional.pad(planes, (1, 0, 1, 0), mode="replicate")[..., :-1, :-1].reshape(self._image.shape)
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
        left = float(at_least_float32(without)[0, self._target])
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
        self,
        outputs: Floats,
        by_name: Mapping[tuple[str, str, int], int],
        order: np.typing.NDArray[np.int64],
        whole: Floats,
    ) -> Share | None:
        """The smallest share whose removal changes the prediction.

        Small shares leave nearly the whole photo and cost as much: one is run only where the next larger one destroys.
        """
        first, patches = self._explanation.methods[0], len(order)
        found: Share | None = None
        for share in reversed(REMOVED):
            number = by_name.get((first, "bottom", 100 - share))
            if number is None:
                if found is None or found.percent > _next_larger(share):
                    break
                row = self._outputs([order[patches - _count(100 - share, patches) :]], patches)[0]
            else:
                row = outputs[number]
            if not self._holds(row, whole):
                found = Share(share, float(row[self._target]))
        return found

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
        agreement, agree_on, disagree_on = agreement_of(maps, self._runner.layout.grid)
        notes = self._notes(first, measured[first], maps[first], whole, unmoved=unmoved)
        verdict = verdict_of(
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
            energy=self._energy,
            energy_bound=self._energy_bound,
        )
        return replace(found, sentence=sentence(found))

    def _only_painted(self, notes: tuple[str, ...]) -> bool:
        return len(notes) == 1 and self._removal == "painted"

    def _notes(self, method: str, map_: MapTrust, scores: Floats, whole: Floats, *, unmoved: bool) -> tuple[str, ...]:
        notes = []
        top = int(whole.argmax())
        if float(whole[top]) < LIKELY:
            notes.append(f"no class is likely: the highest is {self._name(top)!r} with {percent(float(whole[top]))}")
        elif top != self._target:
            notes.append(f"the model says {self._name(top)!r} ({percent(float(whole[top]))}), not the explained class")
        if self._energy is not None and self._energy_bound is not None and self._energy < self._energy_bound:
            notes.append(
                f"the photo lies far from what the model knows: its energy of {self._energy:.1f} is below "
                f"{self._energy_bound:.1f}, which {100 - FAR_SHARE}% of the reference photos are above"
            )
        if unmoved:
            notes.append("no removed part of the photo changes the prediction, so no map of patches can explain it")
        if bool(is_constant(scores)):
            notes.append(f"the map of {method} is the same everywhere and orders nothing")
        if map_.stability is not None and not map_.stability >= UNSTABLE:
            notes.append(f"a shift by one pixel changes the map of {method} (rank correlation {map_.stability:.2f})")
        if self._removal == "painted":
            notes.append("patches were painted with the mean colour, because the model cannot do without them")
        return tuple(notes)

    def _name(self, number: int) -> str:
        if number == self._target:
            return self._explanation.label(self._index, self._target_index)
        names = self._explanation.class_names
        return str(number) if names is None else names[number]

    def _not_measured(self, first: str, whole: Floats | None, reason: str) -> Trust:
        return Trust(
            verdict="not measured",
            sentence=f"Trust: not measured, because {reason}.",
            method=first,
            best=first,
            target=self._target,
            target_name=self._name(self._target),
            probability=math.nan if whole is None else float(whole[self._target]),
            predicted=-1 if whole is None else int(whole.argmax()),
            maps={},
            account=None,
            agreement=None,
            agree_on=None,
            disagree_on=None,
            removal=self._removal,
            evaluations=self._runner.evaluations,
            notes=(reason,),
        )


def _next_larger(share: int) -> int:
    return REMOVED[REMOVED.index(share) + 1]


def _count(share: int, patches: int) -> int:
    """How many patches a share of them is, one at least and not all."""
    return min(patches - 1, max(1, round(patches * share / 100)))

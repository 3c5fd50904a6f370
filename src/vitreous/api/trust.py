"""``trust``: what the maps of one photo are worth for one prediction, measured on the model by dropped patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from vitreous._utils.defaults import AUTO
from vitreous._utils.messages import warn_caller
from vitreous._utils.torch_state import at_least_float32, float64_array, preserves_torch_state
from vitreous.api.explain import black_pixel, declared_outputs, explain, find_recipes, module_of, network_of, stage_of
from vitreous.api.run_methods import run_on_images
from vitreous.api.runs import RunSettings
from vitreous.architecture.evaluation_copy import run_in_evaluation
from vitreous.errors import InputError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation, with_origin
from vitreous.explanation.trust import (
    COMPARED,
    DOUBTFUL_BOUND,
    ENERGY_BOUNDS,
    FAR_SHARE,
    HALF,
    NO_EFFECT,
    NO_PART_MATTERS,
    RANDOM_SETS,
    SIDES,
    Account,
    MapTrust,
    Order,
    Parts,
    Removal,
    Share,
    Trust,
    Verdict,
    against_chance,
    agreement_of,
    count_of,
    doubts_of,
    sentence,
    smallest_destroying,
    smallest_keeping,
    verdict_of,
)
from vitreous.explanation.views import register_view
from vitreous.inputs.model_io import likelihoods
from vitreous.methods.perturbation import PatchMasks, seeded
from vitreous.methods.readout import patch_means
from vitreous.metrics.metric import Floats
from vitreous.metrics.sanity import is_constant, spearman
from vitreous.models import LoadedModel
from vitreous.models.pixels import Images, Model, find_model, find_pixels
from vitreous.tape import Layout
from vitreous.tape.runner import ModelRunner

_FEWEST_PATCHES, _FEWEST_REFERENCES = 4, 10
# Rounding, other batches and bfloat16 change outputs by less than this part of the largest; another photo by more.
_OTHER = 0.1


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
    them): the highest and the lowest 20% of every method, and five disjoint random fifths that all are compared with.
    Of the first method also what remains without the highest half and, depending on what was found, the highest 5 and
    10% or 35 and 50%, and what remains without the highest 25% or 65 to 95%. With one method that is 10 to 14 runs of a
    quarter of the patches on average, some three whole ones; every further method adds 2, 0.4 of a whole one. The first
    method explains the photo again, shifted by one pixel. An explanation that was loaded, copied or put together costs
    two whole runs more.

    Args:
        model: as ``explain`` takes it; the model that was explained.
        images: the same images.
        explanation: what ``explain`` found; None explains with the default methods first.
        target_index: which of several explained classes.
        shift: whether the stability of the first map is measured, which costs another explanation by it.
        seed: of the random sets.
        reference: photos of the kind that the model is for, some dozens at least: a photo whose energy (log sum exp of
            the logits) is below that of 90% of them gets a note. The demo model has a bound of its own.

    Returns:
        One ``Trust`` for every image.

    Raises:
        InputError: model or images are not those that were explained.

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
    layout = _known_layout(found, loaded, pixels)

    def run(network: nn.Module) -> tuple[Measured, ...]:
        return tuple(
            measure(_Measurement(network, pixels[[index]], found, (index, target_index), settings, layout))
            for index in range(len(found))
        )

    return run_in_evaluation(network_of(loaded), run)


def _known_layout(found: Explanation, loaded: LoadedModel | nn.Module, pixels: Tensor) -> Layout | None:
    """The layout of the run that made the maps, if that was a run of this model, as it is, on these images."""
    origin = found.origin
    if origin is None or not origin.unchanged():
        return None
    model = origin.model()
    if model is None or module_of(model) is not module_of(loaded) or pixels.shape != origin.pixels.shape:
        return None
    return cast("Layout", origin.layout) if bool(torch.equal(pixels, origin.pixels)) else None


@preserves_torch_state
def most_trusted(model: Model, images: Images, explanation: Explanation, *, seed: int = 0) -> Explanation:
    """Keep the map of an explanation that the model's own answers speak for: the one with the largest gap.

    The gap of ``trust``: the probability of the class with the highest 20% of the patches alone, minus that with the
    lowest. It takes 2 runs of a fifth of the patches for every method, and 5 for random sets to compare with.
    Of several images the mean gap counts. What was measured is in ``provenance["auto"]``.
    """
    measured = [found for found in _measured(model, images, explanation, 0, lambda one: one.compare(seed)) if found]
    named = [name for name in explanation.methods if all(name in each for each in measured)]
    if not measured or not named:
        warn_caller(
            f"methods={AUTO!r} could not be measured here (no class with a probability, or maps that are not finite): "
            f"{explanation.methods[0]} is taken, which is the first candidate"
        )
        chosen, gaps = explanation.methods[0], dict[str, float]()
    else:
        gaps = {name: float(np.mean([each[name].gap for each in measured])) for name in named}
        chosen = max(gaps, key=gaps.__getitem__)
        if all(each[chosen].bound > DOUBTFUL_BOUND for each in measured):
            warn_caller(
                f"no candidate is better than random orders of the patches here; {chosen} comes nearest to it, and its "
                "map should not be relied on"
            )
    kept = replace(
        explanation,
        scores={chosen: explanation.scores[chosen]},
        signed={chosen: explanation.signed[chosen]},
        provenance={**explanation.provenance, "auto": {"method": chosen, "gaps": gaps}},
    )
    return with_origin(kept, explanation.origin)


@register_view(Explanation, "trust")
def _trust_view(
    explanation: Explanation, model: Model | None, images: Images | None, **options: Any
) -> tuple[Trust, ...]:
    if model is None and images is None:
        model, images = _original(explanation)
    if model is None or images is None:
        raise InputError("pass both the model and the images that were explained, or neither")
    return trust(model, images, explanation, **options)


def _original(explanation: Explanation) -> tuple[Model, Tensor]:
    """The model and the input that an explanation was made of."""
    again = "pass them: explanation.trust(model, images)"
    origin = explanation.origin
    model = None if origin is None else origin.model()
    if origin is None or model is None:
        raise InputError(
            "the explanation does not know its model and images any more (it was loaded, copied, put together, made "
            f"with call= or output=, or the model is gone): {again}"
        )
    if not origin.unchanged():
        raise InputError(
            "the model or the images were changed after they were explained: explain again, or restore the weights and "
            + again
        )
    return model, origin.pixels


class _Measurement:
    """The measurement of one image."""

    def __init__(
        self,
        network: nn.Module,
        image: Tensor,
        explanation: Explanation,
        place: tuple[int, int],
        settings: RunSettings,
        layout: Layout | None,
    ) -> None:
        self._network, self._image, self._explanation = network, image, explanation
        self._settings, self._known = settings, layout is not None
        self._index, self._target_index = place
        self._runner = ModelRunner(network, image, black=settings.black, outputs=settings.outputs, stage=settings.stage)
        if layout is not None:
            self._runner.note_layout(layout)
        self._target = explanation.class_index(*place)
        self._removal: Removal = "dropped"
        self._energy: float | None = None
        self._energy_bound: float | None = None

    def measure(self, *, shift: bool, seed: int, energy_bound: float | None = None) -> Trust:
        """Measure all maps, and conclude."""
        first, *_ = self._explanation.methods
        if self._target >= self._explanation.logits.shape[1]:
            return self._without_maps(
                first, None, f"{self._name(self._target)!r} is no class that the model could keep or lose"
            )
        finite = self._finite()
        if first not in finite:
            return self._without_maps(first, None, f"the map of {first} has values that are not finite")
        moved = self._moved(first) if shift else None  # its run shows the layout, where that is not known
        logits = self._whole()
        whole = self._probabilities(logits)[0]
        if self._runner.scale in {None, "logits"} and logits.shape[1] > 1:
            self._energy, self._energy_bound = float(at_least_float32(logits).logsumexp(dim=1)[0]), energy_bound
        if (reason := self._unmeasurable()) is not None:
            return self._without_maps(first, whole, reason)
        maps = {method: self._patch_scores(method) for method in finite}
        parts = self._parts(maps)
        measured, chance = self._compared(parts, seed, [(first, "bottom", HALF)])
        keeps, destroys = self._shares(parts, first, whole)
        measured[first] = replace(
            measured[first],
            keeps=keeps,
            destroys=destroys,
            stability=None if moved is None else self._stability(maps[first], moved),
        )
        for method in filter(self._explanation.signed.get, maps):
            measured[method] = replace(measured[method], total=float(maps[method].sum()))
        if self._unmoved(parts, chance, whole):
            return self._without_maps(first, whole, NO_PART_MATTERS, verdict="poor")
        return self._concluded(first, measured, maps, whole, self._account())

    def compare(self, seed: int) -> dict[str, MapTrust]:
        """Compare all maps with random orders and measure nothing else; empty where nothing can be measured."""
        is_class = self._target < self._explanation.logits.shape[1]
        finite = self._finite()
        if not is_class or not finite or self._unmeasurable() is not None:
            return {}
        parts = self._parts({method: self._patch_scores(method) for method in finite})
        measured, chance = self._compared(parts, seed, [])
        if self._unmoved(parts, chance, self._probabilities(self._explanation.logits[[self._index]])[0]):
            return {method: MapTrust(0.0, 0, one.orders, 1.0) for method, one in measured.items()}
        return measured

    def _unmoved(self, parts: Parts, chance: Floats, whole: Floats) -> bool:
        """Whether no part that was run changes the prediction."""
        outputs = np.concatenate([chance, np.stack(list(parts.outputs.values()))])[:, self._target]
        return float(np.abs(outputs - whole[self._target]).max()) < NO_EFFECT * float(whole[self._target])

    def _parts(self, maps: Mapping[str, Floats]) -> Parts:
        orders = {method: np.argsort(-scores, kind="stable") for method, scores in maps.items()}
        return Parts(orders, self._outputs)

    def _compared(
        self, parts: Parts, seed: int, further: Sequence[tuple[str, str, int]]
    ) -> tuple[dict[str, MapTrust], Floats]:
        """The gap of every map and its place among random orders; ``further`` parts are run with them."""
        wanted = [(method, side, COMPARED) for method in parts.orders for side in SIDES]
        outputs = parts.prepare([*wanted, *further], self._random_sets(seed))
        measured = {}
        for method in parts.orders:
            top, bottom = (parts.output(method, side, COMPARED)[self._target] for side in SIDES)
            measured[method] = against_chance(float(top - bottom), outputs[:, self._target])
        return measured, outputs

    # What is run ------------------------------------------------------------------------------------------------------

    def _whole(self) -> Tensor:
        """The logits of the whole photo: those of the explanation, or, where it may be of others, those of a run."""
        before = self._explanation.logits[[self._index]]
        if self._known:
            return before
        now = self._runner.logits(self._image)
        scale = float(at_least_float32(now).abs().max())
        if not now.shape == before.shape or float((now - before.to(now)).abs().max()) > _OTHER * scale:
            raise InputError(
                "the model's output is not that of the explanation: pass the model and the images that were explained"
            )
        return now

    def _finite(self) -> list[str]:
        explanation, place = self._explanation, (self._index, self._target_index)
        return [method for method in explanation.methods if explanation.shows(method, *place)]

    def _patch_scores(self, method: str) -> Floats:
        return self._of_patches(self._explanation.scores_of(method, self._index, self._target_index))

    def _of_patches(self, scores: Tensor) -> Floats:
        layout = self._runner.layout
        if scores.numel() != layout.patches:
            scores = patch_means(at_least_float32(scores)[None], self._runner.size, layout.grid, layout.geometry)[0]
        return float64_array(scores)

    def _unmeasurable(self) -> str | None:
        if self._runner.scale == "value":
            return "the model's outputs are values (regression), which have no probability to keep or to lose"
        if (patches := self._runner.layout.patches) < _FEWEST_PATCHES:
            return f"the model sees {patches} patches, too few to remove some of them"
        return None

    def _random_sets(self, seed: int) -> list[Order]:
        """Disjoint sets of the size that is compared."""
        patches = self._runner.layout.patches
        drawn, size = torch.randperm(patches, generator=seeded(seed)).numpy(), count_of(COMPARED, patches)
        return [drawn[number * size : (number + 1) * size] for number in range(min(RANDOM_SETS, patches // size))]

    def _outputs(self, sets: Sequence[Order]) -> Floats:
        """Probabilities of all classes with some of the patches, (sets, classes); equal sizes run together."""
        logits: list[Tensor] = [torch.empty(0)] * len(sets)
        for size in sorted({len(kept) for kept in sets}):
            numbers = [number for number, kept in enumerate(sets) if len(kept) == size]
            kept = torch.from_numpy(np.stack([np.sort(sets[number]) for number in numbers]))
            for number, row in zip(numbers, self._kept(kept), strict=True):
                logits[number] = row
        return self._probabilities(torch.stack(logits))

    def _kept(self, kept: Tensor) -> Tensor:
        images = self._image.expand(len(kept), *self._image.shape[1:])
        if self._removal == "dropped":
            try:
                return self._runner.logits_of_kept(images, kept)
            except UnsupportedModelError:
                self._removal = "painted"
        inside = torch.zeros(len(kept), self._runner.layout.patches).scatter(1, kept, 1.0)
        masks = PatchMasks(inside, self._runner.layout, self._runner.size)
        pixels = masks.pixels(torch.arange(len(kept))).to(images).unsqueeze(self._runner.channel_axis)
        return self._runner.logits(images * pixels)

    def _probabilities(self, logits: Tensor) -> Floats:
        return float64_array(likelihoods(at_least_float32(logits), self._runner.scale))

    def _moved(self, method: str) -> Tensor:
        """The map of the photo moved down and right by one pixel."""
        # Every plane by itself, also of a volume or a clip.
        planes = self._image.reshape(-1, 1, *self._image.shape[-2:])
        moved = functional.pad(planes, (1, 0, 1, 0), mode="replicate")[..., :-1, :-1].reshape(self._image.shape)
        result = run_on_images(self._network, moved, find_recipes([method]), self._target, None, self._settings)
        self._runner.note_layout(result.layout)
        return result.scores[method][0]

    def _stability(self, scores: Floats, moved: Tensor) -> float:
        """Rank correlation with the map of the moved photo."""
        return spearman(scores, self._of_patches(moved)) if bool(moved.isfinite().all()) else math.nan

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

    def _shares(self, parts: Parts, method: str, whole: Floats) -> tuple[Share | None, Share | None]:
        """What keeps and what destroys the prediction."""
        keeps = smallest_keeping(lambda share: self._holds(parts.output(method, "top", share), whole))
        lost = smallest_destroying(lambda share: not self._holds(parts.output(method, "bottom", 100 - share), whole))
        return (
            None if keeps is None else Share(keeps, float(parts.output(method, "top", keeps)[self._target])),
            None if lost is None else Share(lost, float(parts.output(method, "bottom", 100 - lost)[self._target])),
        )

    def _concluded(
        self,
        first: str,
        measured: Mapping[str, MapTrust],
        maps: Mapping[str, Floats],
        whole: Floats,
        account: Account | None,
    ) -> Trust:
        agreement, agree_on, disagree_on = agreement_of(maps, self._runner.layout.grid)
        top = int(whole.argmax())
        known = self._trust(first, whole, ())
        doubts = doubts_of(known, measured[first], self._name(top), float(whole[top]))
        if bool(is_constant(maps[first])):
            doubts += (f"the map of {first} is the same everywhere and orders nothing",)
        found = replace(
            known,
            verdict=verdict_of(measured[first], float(whole[self._target]), doubtful=bool(doubts)),
            notes=(*doubts, *self._remarks(maps)),
            best=max(measured, key=lambda method: measured[method].gap),
            maps=dict(measured),
            account=account,
            agreement=agreement,
            agree_on=agree_on,
            disagree_on=disagree_on,
        )
        return replace(found, sentence=sentence(found))

    def _remarks(self, maps: Mapping[str, Floats]) -> tuple[str, ...]:
        """How it was measured, where that is not as usual."""
        broken = [method for method in self._explanation.methods if method not in maps]
        remarks = [f"the map of {method} has values that are not finite and was left out" for method in broken]
        if self._removal == "painted":
            remarks.append("patches were painted with the mean colour, because the model cannot do without them")
        return tuple(remarks)

    def _name(self, number: int) -> str:
        if number == self._target:
            return self._explanation.label(self._index, self._target_index)
        names = self._explanation.class_names
        return str(number) if names is None else names[number]

    def _without_maps(self, first: str, whole: Floats | None, reason: str, verdict: Verdict = "not measured") -> Trust:
        """A statement in the place of numbers."""
        known = self._trust(first, whole, (reason,))
        return replace(known, verdict=verdict, sentence=f"Trust: {verdict}, because {reason}.")

    def _trust(self, first: str, whole: Floats | None, notes: tuple[str, ...]) -> Trust:
        """What is known before any map was measured."""
        return Trust(
            verdict="not measured",
            sentence="",
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
            notes=notes,
            energy=self._energy,
            energy_bound=self._energy_bound,
        )

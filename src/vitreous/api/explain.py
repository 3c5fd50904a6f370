"""``explain``: images in, an ``Explanation`` out; any model, any number of methods, one forward pass.

``precision`` and ``compile`` make runs faster: bfloat16 for methods whose maps keep their order, compiled models for
perturbation methods.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vitreous._utils.defaults import AUTO, CANDIDATES, DEFAULT_METHODS, RUNNERS_UP
from vitreous._utils.messages import short_repr, warn_caller
from vitreous._utils.torch_state import float64_array, preserves_torch_state
from vitreous.api.run_methods import run_on_images
from vitreous.api.runs import RawResult, RunSettings, try_methods, unchanged_since_now
from vitreous.architecture.evaluation_copy import evaluation_copy, run_in_evaluation
from vitreous.errors import InputError, MethodError, RefusedMethodsError, TargetError, UnsupportedModelError
from vitreous.explanation.explanation import Explanation, Origin, with_deferred_logits, with_origin
from vitreous.explanation.folder import collect_provenance
from vitreous.inputs.model_io import OutputActivation, OutputPart, ask, check_outputs, find_part
from vitreous.inputs.target import TargetContext, class_indices
from vitreous.inputs.target_objects import parse_targets
from vitreous.inputs.targets import AnyTarget, TargetObjects, find_objects
from vitreous.methods import list_methods
from vitreous.methods.spelling import Recipe, parse
from vitreous.metrics.sanity import spearman
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.dual_encoder import find_dual_encoder
from vitreous.models.loaded import with_resolved_outputs
from vitreous.models.loading import called_by, known_class_names
from vitreous.models.pixels import DisplayImages, Images, Model, display_images, find_model, find_pixels
from vitreous.models.prompt_target import embed_prompts, holds_prompts
from vitreous.tape.output import OutputReader

PRECISIONS = ("model", "bf16")

# Smallest rank correlation between maps in bfloat16 and in float32, over all images. Methods declare the spellings that
# reach it when they are registered (``bf16=``); measured on a trained ViT-Ti/16:
# docs/speed/precision.json, written by benchmarks/precision_and_compile.py.
TOLERANCE = 0.99


def bf16_spellings() -> frozenset[str]:
    """Give the spellings whose maps keep their order in bfloat16; another option or aggregation is another map."""
    return frozenset(spelling for info in list_methods() for spelling in info.bf16)


def running_in(precision: str, device: torch.device, recipes: Sequence[Recipe]) -> AbstractContextManager[Any]:
    """Give the context in which the model runs: as it is, or with its matrix products in bfloat16.

    Raises:
        RefusedMethodsError: Maps of methods in bfloat16 are not within the tolerance, or were not measured.
    """
    if not isinstance(precision, str) or precision not in PRECISIONS:
        given = precision if isinstance(precision, str) else short_repr(precision)
        raise InputError(f"precision={given} is not one of {', '.join(PRECISIONS)}")
    if precision == "model":
        return nullcontext()
    fit = bf16_spellings()
    refused = [recipe.spelling for recipe in recipes if recipe.spelling not in fit]
    if refused:
        reason = (
            f"was not found to rank patches in bf16 as in float32 (rank correlation {TOLERANCE} or more on every image)"
        )
        raise RefusedMethodsError(
            f"{refused[0]} {reason}: leave out precision. Methods that do: {', '.join(sorted(fit))}",
            dict.fromkeys(refused, f"it {reason}"),
        )
    return torch.autocast(device.type, dtype=torch.bfloat16)


def compiled(model: nn.Module) -> Callable[..., Any]:
    """Return the model wrapped in ``torch.compile``, which compiles it at its first run."""
    fast = torch.compile(model)

    def run(*arguments: Any, **options: Any) -> Any:
        from torch._dynamo.exc import TorchDynamoException  # noqa: PLC0415 - takes seconds to import

        try:
            return fast(*arguments, **options)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip() or type(error).__name__
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be compiled here: {reason}; leave out compile"
            ) from error

    return run


Found = TypeVar("Found")


@preserves_torch_state
def explain(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None = None,
    target: AnyTarget = None,
    *,
    topk: int | None = None,
    outputs: OutputActivation | None = None,
    output: OutputPart | None = None,
    call: Callable[[nn.Module, Tensor], Any] | None = None,
    precision: str = "model",
    compile: bool = False,  # noqa: A002 - what torch calls it
    stage: int | None = None,
) -> Explanation:
    """Explain the prediction of ``model`` for each image.

    Args:
        model: any ``nn.Module`` that contains a Vision Transformer, a name that ``load_model`` accepts, or a pair of a
            model and its preprocessing: a ``Preprocessing``, an image processor of transformers, torchvision weights or
            their ``transforms()``.
        images: a preprocessed tensor (batch, 3, height, width); for 3-D models (batch, channels, depth, height, width)
            or (batch, frames, channels, height, width). PIL images, uint8 arrays (height, width, 3) and paths are
            accepted if the preprocessing is known: for a name, a pair, or a timm model.
        methods: spellings, ``name[.aggregation...][:option=value,...]``. All of them share one forward pass.
            ``None`` for twoscale and the runner-up that agrees least with it: the one of decompx.skipplus, tokentm, gae
            and fullgrad_plus:rule=libra with the lowest rank correlation over all images. Methods that do not support
            the model are skipped with a warning. ``"auto"`` tries seven candidates (tokentm, gradtoken,
            decompx.skipplus, gae, fullgrad_plus:rule=libra, decompx.skipplus.propagate and twoscale) and keeps the most
            faithful one, measured by running the model on parts of the images: about four more forward passes; see
            ``vitreous.trust``.
        target: the class to explain: ``None`` for the predicted one, one for all images, one per image ``(batch,)``, or
            several per image ``(batch, k)``; by index, or by name if the model's class names are known. Instead of a
            class, a target of ``vitreous.targets``, such as ``Contrast("tabby", "tiger cat")``, or its spelling
            ``"tabby vs tiger cat"``.
        topk: instead of ``target``, the k most likely classes of each image.
        outputs: kind of the model's outputs: ``logits`` (softmax; sigmoid for a single output), ``probabilities`` (the
            model ends in its own softmax or sigmoid), ``sigmoid`` (multi-label logits) or ``value`` (no probability).
            ``None`` takes it from the model's configuration; probabilities are detected, with a warning.
        output: the part of the model's output to explain, if that is a dictionary, tuple or dataclass: a name
            (``"dog_head"``), path (``"heads.dog"``), index or function.
        call: how to call a model that takes more than the images: ``lambda model, x: model(x, extra)``.
        precision: ``bf16`` runs the model's matrix products in bfloat16; methods whose maps would change are refused.
        compile: use a compiled model for the additional forward passes of perturbation methods; recorded passes are not
            compiled.
        stage: stage of a hierarchical model to read, counted from 0, or from the end if negative; the map has the grid
            of that stage. ``None`` for the last stage with more than one token.

    Returns:
        Raw signed scores of every patch for every method, (batch, patches) or (batch, k, patches).

    Examples:
        >>> import vitreous
        >>> explanation = vitreous.explain(model, "demo.jpg", ["gae", "ixg.skipplus"])
        >>> explanation.scores["gae"].shape == (1, explanation.grid[0] * explanation.grid[1])
        True
        >>> explanation.save("explanation").name
        'explanation'
    """
    auto = _is_auto(methods)
    recipes = find_recipes(_spellings(methods))
    if auto and not (call is None and output is None):
        raise MethodError(f"methods={AUTO!r} cannot be combined with call= or output=: name the methods")
    check_outputs(outputs)
    if holds_prompts(target):
        dual = find_dual_encoder(model)
        model, target = dual.loaded(dual.model), embed_prompts(dual, target)
    loaded = find_model(model, images)
    if output is not None and isinstance(loaded, LoadedModel):
        loaded = replace(loaded, class_names=None)  # they name the classes of the model's usual output
    network, stage = network_of(loaded), stage_of(loaded) if stage is None else stage
    if call is not None:
        network = called_by(network, call)
    pixels, pictures = find_pixels(loaded, network, images)
    network, wanted = find_wanted(loaded, network, pixels, target, topk, output)

    def run(some: list[Recipe]) -> RawResult:
        def run_network(one: nn.Module) -> RawResult:
            bare = compiled(one) if compile else None
            declared = outputs or declared_outputs(loaded)
            settings = RunSettings(black_pixel(loaded, pixels), bare, declared, stage, OutputReader(output))
            return run_on_images(one, pixels, some, wanted, topk, settings)

        with running_in(precision, pixels.device, some):
            return run_in_evaluation(network, run_network)

    recipes, result, left_out = run_allowed(run, recipes, optional=methods is None or auto)
    provenance = _provenance(loaded, network, recipes, result.family)
    if stage is not None:
        provenance["stage"] = stage
    if output is not None:
        provenance["output"] = output if isinstance(output, str | int) else short_repr(output)
    if isinstance(wanted, TargetObjects):
        provenance["targets"] = list(dict.fromkeys(str(each) for row in wanted.rows for each in row))
    channels_first = pixels.movedim(result.layout.channel_axis, 1)
    normalised = loaded.preprocessing if isinstance(loaded, LoadedModel) else None
    drawn = display_images(channels_first, normalised) if pictures is None else DisplayImages(pictures)
    known = {"images": drawn.images, "images_note": drawn.note, "provenance": provenance, "left_out": left_out}
    explanation = _explanation(loaded, pixels, recipes, result, **known)
    plain = call is None and output is None
    origin = _origin(loaded, pixels, result, by_name=isinstance(model, str)) if plain else None
    return with_origin(_chosen(methods, loaded, images, with_origin(explanation, origin)), origin)


def _chosen(methods: Any, loaded: LoadedModel | nn.Module, images: Images, explanation: Explanation) -> Explanation:
    """What is kept of an explanation by the methods that were asked for, or by more where none was."""
    if _is_auto(methods):
        return _most_trusted(loaded, images, explanation)
    return with_runner_up(explanation) if methods is None else explanation


def with_runner_up(explanation: Explanation) -> Explanation:
    """Keep the first map of an explanation, and the one of ``RUNNERS_UP`` that agrees least with it.

    Two maps that agree are seen to agree, and where they differ nothing better is known than both. Agreement is the
    rank correlation over patches, averaged over images and classes; of equal ones the first is taken, and a map that is
    not finite only where there is no other. Other methods are kept only where there are none of these. What was found
    is in ``provenance["runner_up"]``.
    """
    first, *others = explanation.methods
    if len(others) < 2:
        return explanation
    others = [name for name in others if name in RUNNERS_UP] or others
    agreement = {name: _agreement(explanation.scores[first], explanation.scores[name]) for name in others}
    chosen = min(others, key=lambda name: math.inf if math.isnan(agreement[name]) else agreement[name])
    found = {name: None if math.isnan(value) else round(value, 4) for name, value in agreement.items()}
    return replace(
        explanation,
        scores={name: explanation.scores[name] for name in (first, chosen)},
        signed={name: explanation.signed[name] for name in (first, chosen)},
        provenance={
            **explanation.provenance,
            "methods": [first, chosen],
            "runner_up": {"method": chosen, "agreement": found},
        },
    )


def _agreement(one: Tensor, other: Tensor) -> float:
    """The mean rank correlation of the maps (..., patches) of two methods; NaN where a map is not finite."""
    pairs = zip(one.flatten(0, -2), other.flatten(0, -2), strict=True)
    alike = [
        spearman(float64_array(first), float64_array(second))
        if bool(first.isfinite().all() and second.isfinite().all())
        else math.nan
        for first, second in pairs
    ]
    return sum(alike) / len(alike)


def _is_auto(methods: Any) -> bool:
    """Whether the method is to be chosen by running the model on parts of the images."""
    return methods == AUTO or (isinstance(methods, list | tuple) and list(methods) == [AUTO])


def _spellings(methods: str | Sequence[str] | None) -> str | Sequence[str]:
    if methods is None:
        return DEFAULT_METHODS
    return CANDIDATES if _is_auto(methods) else methods


def _most_trusted(loaded: LoadedModel | nn.Module, images: Images, explanation: Explanation) -> Explanation:
    from vitreous.api.trust import most_trusted  # noqa: PLC0415  # it explains by this module

    return most_trusted(loaded, images, explanation)


@preserves_torch_state
def explain_again(model: LoadedModel, images: Tensor, methods: Sequence[str], target: AnyTarget) -> Explanation:
    """Explain preprocessed images as ``explain`` does, without provenance.

    For callers that explain one model in many batches and record by themselves which model that is: the fingerprint is
    a hash of all weights, taken anew for every batch where they were changed. Probabilities are not recognised either:
    what the outputs are has to be the same for all batches.
    """
    recipes, network = find_recipes(methods), network_of(model)
    pixels, _ = find_pixels(model, network, images)
    objects = find_objects(target, len(pixels))
    wanted = target if objects is None else objects

    settings = RunSettings(black_pixel(model, pixels), outputs=with_resolved_outputs(model).outputs, stage=model.stage)
    result = run_in_evaluation(network, lambda one: run_on_images(one, pixels, recipes, wanted, None, settings))
    return _explanation(model, pixels, recipes, result)


def find_wanted(
    loaded: LoadedModel | nn.Module,
    network: nn.Module,
    pixels: Tensor,
    target: AnyTarget,
    topk: int | None,
    output: OutputPart | None,
) -> tuple[nn.Module, AnyTarget | TargetObjects]:
    """The module that is run, and the classes or prepared targets that are explained of its images.

    Raises:
        TargetError: a target is not valid for these images.
    """

    def names() -> tuple[str, ...] | None:
        return known_class_names(loaded)

    target = parse_targets(target, names)
    objects = find_objects(target, len(pixels))
    if objects is None:
        return network, class_indices(target, names)
    if topk is not None:
        raise TargetError("give a target or topk, not both")
    network = objects.module(network)

    def encode(picture: Any) -> Any:
        found, _ = find_pixels(loaded, network, picture)
        with torch.no_grad():
            return find_part(run_in_evaluation(network, lambda one: ask(one, found)), output)

    return network, objects.prepared(TargetContext(loaded, network, pixels, names, encode))


def _explanation(
    loaded: LoadedModel | nn.Module, pixels: Tensor, recipes: list[Recipe], result: RawResult, **known: Any
) -> Explanation:
    """Build the explanation; ``known`` are fields that only some callers have."""
    explanation = Explanation(
        scores=result.scores,
        grid=result.layout.grid,
        target=result.target,
        logits=result.logits,
        image_size=result.layout.size_of(pixels),
        signed={recipe.spelling: recipe.signed for recipe in recipes},
        class_names=loaded.class_names if isinstance(loaded, LoadedModel) else None,
        preprocessing=_preprocessing(loaded),
        scale=result.scale,
        geometry=result.layout.geometry,
        targets=result.objects,
        target_values=result.target_values,
        **known,
    )
    return explanation if result.deferred is None else with_deferred_logits(explanation, result.deferred.compute)


def _origin(loaded: LoadedModel | nn.Module, pixels: Tensor, result: RawResult, *, by_name: bool) -> Origin:
    """What an explanation was made of. It does not keep the caller's model alive, only one that nobody else holds."""
    module = module_of(loaded)
    weak = weakref.ref(module)
    known = {one.name: getattr(loaded, one.name) for one in fields(loaded)} if isinstance(loaded, LoadedModel) else {}
    known.pop("model", None)

    def find() -> LoadedModel | nn.Module | None:
        found = weak()
        return LoadedModel(model=found, **known) if known and found is not None else found

    return Origin(
        model=(lambda: loaded) if by_name else find,
        pixels=pixels,
        layout=result.layout,
        unchanged=unchanged_since_now(module, pixels),
    )


def _preprocessing(loaded: LoadedModel | nn.Module) -> Preprocessing | None:
    """What says which part of a photo the model saw; a volume or clip is drawn as the model sees it."""
    return loaded.preprocessing if isinstance(loaded, LoadedModel) and not loaded.takes_volumes else None


class Allowed(NamedTuple, Generic[Found]):
    """What was found with the methods that a model allows.

    Attributes:
        recipes: these methods.
        found: what was found.
        left_out: by spelling, why the others were left out.
    """

    recipes: list[Recipe]
    found: Found
    left_out: dict[str, str]


def run_allowed(run: Callable[[list[Recipe]], Found], recipes: list[Recipe], *, optional: bool) -> Allowed[Found]:
    """Run methods; those that are ``optional`` and that the model does not allow are left out, with a warning.

    Raises:
        UnsupportedModelError: no method supports the model, or one that is not optional does not.
    """
    if not optional:
        return Allowed(recipes, run(recipes), {})
    by_spelling = {recipe.spelling: recipe for recipe in recipes}

    def run_some(spellings: list[str]) -> Found:
        return run([by_spelling[spelling] for spelling in spellings])

    trials = try_methods(run_some, list(by_spelling))
    if not trials.served:
        raise next(iter(trials.errors.values()))
    if trials.errors:
        skipped = "; ".join(f"{name} is left out: {reason}" for name, reason in trials.reasons.items())
        warn_caller(f"some of the default methods do not support this model: {skipped}")
    # Those that had to be run one by one to find which of them fails are run together for one result.
    found = trials.results[0] if len(trials.results) == 1 else run_some(trials.served)
    return Allowed([by_spelling[spelling] for spelling in trials.served], found, trials.reasons)


def find_recipes(methods: str | Sequence[str]) -> list[Recipe]:
    """Parse one or several spellings, without duplicates."""
    given = [methods] if isinstance(methods, str) else methods
    spellings = list(given) if isinstance(given, Iterable) else None
    if spellings is None or not all(isinstance(spelling, str) for spelling in spellings):
        raise MethodError(f"methods must be a spelling or a list of spellings, not {short_repr(methods)}")
    if not spellings:
        raise MethodError("no method was given")
    # By the parsed spelling: surrounding blanks are removed.
    return list({recipe.spelling: recipe for recipe in map(parse, spellings)}.values())


def network_of(model: LoadedModel | nn.Module) -> nn.Module:
    """Return an evaluation-mode, uncompiled copy of the network that shares its weights; the model is unchanged."""
    return evaluation_copy(module_of(model))


def module_of(model: LoadedModel | nn.Module) -> nn.Module:
    """Return the network of a model as it was given."""
    network = model.model if isinstance(model, LoadedModel) else model
    if not isinstance(network, nn.Module):
        raise InputError(f"model must be an nn.Module or a name, not {type(network).__name__}")
    return network


def declared_outputs(loaded: LoadedModel | nn.Module) -> OutputActivation | None:
    """What the model's outputs are, as declared when it was loaded."""
    return loaded.outputs if isinstance(loaded, LoadedModel) else None


def stage_of(model: LoadedModel | nn.Module) -> int | None:
    """Return the default stage of a hierarchical model."""
    return model.stage if isinstance(model, LoadedModel) else None


def black_pixel(model: LoadedModel | nn.Module, pixels: Tensor) -> Tensor | None:
    """What the model gets for a black pixel, where its preprocessing is known."""
    if not isinstance(model, LoadedModel):
        return None
    known = model.preprocessing
    mean, std = (pixels.new_tensor(values[: known.channels]) for values in (known.mean, known.std))
    return -mean / std


def _provenance(
    loaded: LoadedModel | nn.Module, network: nn.Module, recipes: list[Recipe], family: str
) -> dict[str, Any]:
    named = loaded if isinstance(loaded, LoadedModel) else None
    return collect_provenance(
        methods=[recipe.spelling for recipe in recipes],
        model=named.name if named else None,
        family=family,
        model_class=f"{type(network).__module__}.{type(network).__qualname__}",
        fingerprint=named.fingerprint if named else None,
    )

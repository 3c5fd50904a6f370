"""``explain``: images in, an ``Explanation`` out; any model, any number of methods, one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import evaluation_copy, run_in_evaluation
from vitreous.batching import batch_parts
from vitreous.cautions import warn_caller
from vitreous.class_names import class_indices
from vitreous.compiling import compiled
from vitreous.defaults import DEFAULT_METHODS
from vitreous.deferred_logits import DeferredLogits
from vitreous.errors import InputError, MethodError, RefusedMethodsError, TargetError, UnsupportedModelError
from vitreous.explanation import Explanation, with_deferred_logits
from vitreous.inputs.input_pictures import InputPictures, input_pictures
from vitreous.inputs.model_input import Inputs, Rows
from vitreous.method_trials import try_methods
from vitreous.methods import list_methods
from vitreous.models import LoadedModel, Preprocessing
from vitreous.models.brought import known_class_names
from vitreous.output_detection import find_outputs
from vitreous.outputs import OutputActivation, check_outputs, scale_of, with_outputs
from vitreous.parts import Part, parts_of, scores_of
from vitreous.pixels import Images, Model, find_model, find_pixels
from vitreous.precision import running_in
from vitreous.provenance import collect_provenance
from vitreous.reason import shown
from vitreous.spelling import Recipe, parse
from vitreous.tape import Gradients, Layout, Needs, Pass, Plan, Tape, record, unite
from vitreous.tape.diagnosis import missing_part
from vitreous.tape.relevance_listener import NOT_FOLLOWED
from vitreous.tape.runner import ModelRunner
from vitreous.targets import Target, Targets, find_targets
from vitreous.torch_state import leaves_torch_as_it_was
from vitreous.unrecorded import can_run_alone, run_alone

Found = TypeVar("Found")


class Answer(NamedTuple):
    """What all methods say of one batch.

    Attributes:
        logits: what the model says, (batch, classes).
        targets: the classes that were explained.
        layout: patch grid and prefix tokens.
        scores: by spelling, (batch, k, patches), or (batch, patches) where one class per image was asked for.
        family: the model's class.
        scale: what its outputs are; ``None`` for logits of which nobody says more.
        deferred: where nothing has needed the logits, what computes them; ``logits`` have only their shape then.
    """

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    family: str
    scale: OutputActivation | None
    deferred: DeferredLogits | None = None

    @property
    def target(self) -> Tensor:
        """The classes as the caller asked for them: (batch, k) or (batch,)."""
        return self.targets.classes if self.targets.several else self.targets.classes[:, 0]


@leaves_torch_as_it_was
def explain(
    model: Model,
    images: Images,
    methods: str | Sequence[str] | None = None,
    target: Target = None,
    *,
    topk: int | None = None,
    outputs: OutputActivation | None = None,
    precision: str = "model",
    compile: bool = False,  # noqa: A002 - what torch calls it
    stage: int | None = None,
) -> Explanation:
    """Explain why ``model`` says a class of each image.

    Args:
        model: any ``nn.Module`` that is a Vision Transformer inside, a name that ``load_model`` understands, or a pair
            of a model and what tells how photos become its input: a ``Preprocessing``, an image processor of
            transformers, torchvision's weights or their ``transforms()``.
        images: a preprocessed tensor (batch, 3, height, width); PIL images, uint8 arrays (height, width, 3) or paths
            where it is known how photos become the input: with a name, a pair, or a model that timm made.
        methods: spellings, ``name[.aggregation...][:option=value,...]``. All of them share one forward pass.
            ``None`` for tokentm, gradtoken and decompx.skipplus, as far as the model allows them; the rest is left out
            with a warning.
        target: the class to explain: ``None`` for the predicted one, one for all images, one per image ``(batch,)``, or
            several per image ``(batch, k)``; by number, or by name where the model's class names are known.
        topk: instead of ``target``, the k most likely classes of each image.
        outputs: what the model's outputs are: ``logits`` (softmax; sigmoid of a single one), ``probabilities`` (the
            model ends in its own softmax or sigmoid), ``sigmoid`` (multi-label logits) or ``value`` (no probability).
            ``None`` for what the model's configuration says; probabilities are recognised, with a warning.
        precision: ``bf16`` runs the model's matrix products in bfloat16, for methods whose maps survive that; others
            are refused.
        compile: ask a compiled model where methods ask it again (perturbation); what is recorded runs as it is.
        stage: of a hierarchical model, the stage whose blocks are read, counted from 0 or, below 0, from the end; the
            map has that stage's grid. ``None`` for the last one with several tokens.

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
    recipes = find_recipes(DEFAULT_METHODS if methods is None else methods)
    check_outputs(outputs)
    loaded = find_model(model, images)
    network, stage = network_of(loaded), stage_of(loaded) if stage is None else stage
    classes = class_indices(target, lambda: known_class_names(loaded))
    said = outputs or said_outputs(loaded)
    pixels, pictures = find_pixels(loaded, network, images)

    def ask(asked: list[Recipe]) -> Answer:
        with running_in(precision, pixels.device, asked):
            black = black_pixel(loaded, pixels)

            def answer_of(one: nn.Module) -> Answer:
                bare = compiled(one) if compile else None
                return answer_images(one, pixels, asked, classes, topk, black, bare, outputs=said, stage=stage)

            return run_in_evaluation(network, answer_of)

    recipes, answer, left_out = run_allowed(ask, recipes, optional=methods is None)
    provenance = _provenance(loaded, network, recipes, answer.family)
    if stage is not None:
        provenance["stage"] = stage
    drawn = input_pictures(pixels, _preprocessing(loaded)) if pictures is None else InputPictures(pictures)
    known = {"images": drawn.images, "images_note": drawn.note, "provenance": provenance, "left_out": left_out}
    return _explanation(loaded, pixels, recipes, answer, **known)


@leaves_torch_as_it_was
def explain_again(model: LoadedModel, images: Tensor, methods: Sequence[str], target: Target) -> Explanation:
    """Explain preprocessed images as ``explain`` does, without provenance.

    For who explains one model in many batches and keeps by itself which model that is: to say it takes a hash of all
    weights, for every batch where they were changed or put into another model. Nor is it tried to recognise
    probabilities: what the outputs are has to be the same for all batches.
    """
    recipes, network = find_recipes(methods), network_of(model)
    pixels, _ = find_pixels(model, network, images)

    black, outputs = black_pixel(model, pixels), model.outputs or scale_of(network) or "logits"
    answer = run_in_evaluation(
        network,
        lambda one: answer_images(one, pixels, recipes, target, None, black, outputs=outputs, stage=model.stage),
    )
    return _explanation(model, pixels, recipes, answer)


def _explanation(
    loaded: LoadedModel | nn.Module, pixels: Tensor, recipes: list[Recipe], answer: Answer, **known: Any
) -> Explanation:
    """Put together what was found; ``known`` are fields that only some callers know."""
    explanation = Explanation(
        scores=answer.scores,
        grid=answer.layout.grid,
        target=answer.target,
        logits=answer.logits,
        image_size=(pixels.shape[-2], pixels.shape[-1]),
        signed={recipe.spelling: recipe.signed for recipe in recipes},
        class_names=loaded.class_names if isinstance(loaded, LoadedModel) else None,
        preprocessing=_preprocessing(loaded),
        scale=answer.scale,
        geometry=answer.layout.geometry,
        **known,
    )
    return explanation if answer.deferred is None else with_deferred_logits(explanation, answer.deferred.compute)


def _preprocessing(loaded: LoadedModel | nn.Module) -> Preprocessing | None:
    return loaded.preprocessing if isinstance(loaded, LoadedModel) else None


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
        UnsupportedModelError: none is left, or one was asked for by the caller.
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
        told = "; ".join(f"{name} is left out: {reason}" for name, reason in trials.reasons.items())
        warn_caller(f"of the methods that are used where none is asked for, {told}")
    # Those that had to be run one by one to find which of them fails are run together for one result.
    found = trials.results[0] if len(trials.results) == 1 else run_some(trials.served)
    return Allowed([by_spelling[spelling] for spelling in trials.served], found, trials.reasons)


def answer_images(
    network: nn.Module,
    images: Tensor,
    recipes: list[Recipe],
    target: Target,
    topk: int | None,
    black: Tensor | None = None,
    bare: Callable[..., Any] | None = None,
    *,
    outputs: OutputActivation | None = None,
    stage: int | None = None,
) -> Answer:
    """Run all methods on images, as many in one recorded run as bounded memory allows.

    The arguments are those of ``explain`` and ``answer_with``. No image's scores depend on the others, so the results
    are those of one run, but for the rounding of matrix products of another size.
    """

    def answer(rows: slice, known: OutputActivation | None) -> Answer:
        def choose(logits: Tensor) -> Targets:
            if target is None or topk is not None:
                return find_targets(logits, target, topk)
            # Given classes are checked for all images together, of which they need nothing but the number of classes.
            classes, several = find_targets(logits[:1].expand(len(images), -1), target, None)
            return Targets(classes[rows], several)

        return answer_with(network, images[rows], recipes, choose, black, bare, outputs=known, stage=stage)

    parts = batch_parts(network, images)
    if target is not None and topk is None and can_run_alone(network, images, recipes):
        # What is refused here is refused by a recorded run as well, which knows why.
        with suppress(TargetError, UnsupportedModelError):
            found = run_alone(network, images, recipes, target, black, parts, outputs=outputs, stage=stage)
            return Answer(**found._asdict(), family=type(network).__name__)
    answers = [answer(parts[0], outputs)]
    # What the first part's outputs are taken as, those of all others are.
    answers += [answer(rows, answers[0].scale or "logits") for rows in parts[1:]]
    return _joined(answers)


def answer_with(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    choose: Callable[[Tensor], Targets],
    black: Tensor | None = None,
    bare: Callable[..., Any] | None = None,
    *,
    outputs: OutputActivation | None = None,
    stage: int | None = None,
) -> Answer:
    """Ask all methods of pictures or texts, in one run of the model and one backward pass per rule.

    Args:
        network: the model.
        inputs: what it is given.
        recipes: the methods.
        choose: which classes to explain, given the logits.
        black: what the model gets for a black pixel, where that is known.
        bare: the model in another form, for evaluations of which nothing is recorded.
        outputs: what the model's outputs are, where that is known.
        stage: which stage of the stream is read, where there are several.
    """
    architecture = find_architecture(network, inputs, stage)
    needs = {recipe.spelling: recipe.needs(architecture.depth) for recipe in recipes}
    with record(network, architecture, inputs, Plan(architecture.depth, unite(needs.values()))) as tape:
        # Only now: what works on a model shows when it has run, and nothing is promised that would then fail.
        _refuse_unserved(tape, recipes, needs)
        outputs = find_outputs(network, inputs, tape.logits, outputs or architecture.scale)
        tape.architecture = architecture = with_outputs(tape.architecture, outputs)
        targets = choose(tape.logits)
        if tape.layout.alike or len(inputs) == 1:
            runner = ModelRunner(
                network,
                inputs,
                targets.classes,
                black,
                _architecture=tape.architecture,
                _layout=tape.layout,
                _bare=bare,
            )
            scores = _scores(tape, runner, recipes, needs, targets.classes)
            shaped = {name: maps if targets.several else maps[:, 0] for name, maps in scores.items()}
            return Answer(tape.logits, targets, tape.layout, shaped, architecture.name, architecture.scale)
    # The head reads other tokens of each image, so that no row of a matrix is every image's.
    one_by_one = [slice(image, image + 1) for image in range(len(inputs))]
    return answer_in_portions(
        network, inputs, recipes, targets, one_by_one, black, bare, outputs=outputs or "logits", stage=stage
    )


def answer_in_portions(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    targets: Targets,
    portions: Sequence[Rows],
    black: Tensor | None = None,
    bare: Callable[..., Any] | None = None,
    *,
    outputs: OutputActivation | None = None,
    stage: int | None = None,
) -> Answer:
    """Ask all methods of some of the pictures or texts after the others, and put together what they say."""
    classes, several = targets

    def answer(rows: Rows) -> Answer:
        some = Targets(classes[rows], several)
        return answer_with(
            network, inputs[rows], recipes, lambda _logits: some, black, bare, outputs=outputs, stage=stage
        )

    return _joined([answer(rows) for rows in portions])


def _joined(answers: Sequence[Answer]) -> Answer:
    """Put together what was found of some images or texts after the others."""
    first = answers[0]
    if len(answers) == 1:
        return first
    return first._replace(
        logits=torch.cat([part.logits for part in answers]),
        targets=first.targets._replace(classes=torch.cat([part.targets.classes for part in answers])),
        scores={name: torch.cat([part.scores[name] for part in answers]) for name in first.scores},
    )


def find_recipes(methods: str | Sequence[str]) -> list[Recipe]:
    """What one or several spellings stand for, each once."""
    given = [methods] if isinstance(methods, str) else methods
    spellings = list(given) if isinstance(given, Iterable) else None
    if spellings is None or not all(isinstance(spelling, str) for spelling in spellings):
        raise MethodError(f"methods must be a spelling or a list of spellings, not {shown(methods)}")
    if not spellings:
        raise MethodError("no method was asked for")
    # By spelling, for blanks around it are not part of it.
    return list({recipe.spelling: recipe for recipe in map(parse, spellings)}.values())


def network_of(model: LoadedModel | nn.Module) -> nn.Module:
    """The network that can be listened to: in evaluation mode, and not compiled; the model given is not switched."""
    network = model.model if isinstance(model, LoadedModel) else model
    if not isinstance(network, nn.Module):
        raise InputError(f"model must be an nn.Module or a name, not {type(network).__name__}")
    return evaluation_copy(network)


def said_outputs(loaded: LoadedModel | nn.Module) -> OutputActivation | None:
    """What was said of a model's outputs when it was loaded."""
    return loaded.outputs if isinstance(loaded, LoadedModel) else None


def stage_of(model: LoadedModel | nn.Module) -> int | None:
    """The stage of a hierarchical model that is read where none is asked for."""
    return model.stage if isinstance(model, LoadedModel) else None


def black_pixel(model: LoadedModel | nn.Module, pixels: Tensor) -> Tensor | None:
    """What the model gets for a black pixel, where its preprocessing is known."""
    if not isinstance(model, LoadedModel):
        return None
    mean, std = (pixels.new_tensor(values) for values in (model.preprocessing.mean, model.preprocessing.std))
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


def _refuse_unserved(tape: Tape, recipes: list[Recipe], needs: dict[str, Needs]) -> None:
    """Refuse methods that need a part which the model's blocks do not have, and say which methods do not."""
    missing = {recipe.spelling: missing_part(tape, needs[recipe.spelling]) for recipe in recipes}
    reasons = {spelling: reason for spelling, reason in missing.items() if reason is not None}
    if reasons:
        refused = next(iter(reasons))
        found = {info.name: missing_part(tape, parse(info.name).needs(tape.depth)) for info in list_methods()}
        serving = [name for name, reason in found.items() if reason is None]
        # Relevance is followed only in a run that asks for it: about these methods this one says nothing.
        open_ones = [name for name, reason in found.items() if reason == NOT_FOLLOWED]
        untried = f"Methods that were not tried: {', '.join(open_ones)}. " if open_ones else ""
        raise RefusedMethodsError(
            f"{refused} cannot explain {tape.architecture.name}: {reasons[refused]}. {untried}"
            f"Methods that work on it: {', '.join(serving) or 'none'}",
            reasons,
        )


def _scores(
    tape: Tape, runner: ModelRunner, recipes: list[Recipe], needs: dict[str, Needs], targets: Tensor
) -> dict[str, Tensor]:
    """Scores (batch, k, patches) of every method, one backward pass per rule, objective and target."""
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    parts = parts_of(tape, runner)
    for number, target in enumerate(targets.unbind(dim=1)):
        # A method whose map does not depend on the class is asked once.
        asked = [recipe for recipe in recipes if number == 0 or recipe.info.class_specific]
        for spelling, scores in _scores_of_one_target(tape, parts, asked, needs, target):
            found[spelling].append(scores)
    count = targets.shape[1]
    return {
        name: torch.stack(maps, dim=1) if len(maps) == count else maps[0][:, None].expand(-1, count, -1).clone()
        for name, maps in found.items()
    }


def _scores_of_one_target(
    tape: Tape, parts: list[Part], recipes: list[Recipe], needs: dict[str, Needs], target: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Ask every method as soon as its backward passes are there, and drop gradients that nobody waits for."""
    waiting = {recipe.spelling: recipe for recipe in recipes}
    gradients: dict[Pass, Gradients] = {}
    passes = unite(needs[spelling] for spelling in waiting).gradients
    for backward in (None, *passes):
        if backward is not None:
            gradients[backward] = tape.backward(backward, target, passes[backward])
        ready = [spelling for spelling in waiting if needs[spelling].gradients.keys() <= gradients.keys()]
        # A caller's autocast is for the model's run, not for reading it.
        with torch.autocast(target.device.type, enabled=False):
            views = [(part, part.view(gradients, target)) for part in parts] if ready else []
            patches = tape.layout.patches
            scores = {spelling: scores_of(waiting.pop(spelling), views, len(target), patches) for spelling in ready}
        yield from scores.items()
        awaited = {each for spelling in waiting for each in needs[spelling].gradients}
        gradients = {each: found for each, found in gradients.items() if each in awaited}

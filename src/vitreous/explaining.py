"""``explain``: images in, an ``Explanation`` out; any model, any number of methods, one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vitreous.architecture import find_architecture
from vitreous.architecture.evaluation_copy import evaluation_copy, run_in_evaluation
from vitreous.cautions import warn_caller
from vitreous.compiling import compiled
from vitreous.defaults import DEFAULT_METHODS
from vitreous.errors import InputError, MethodError, RefusedMethodsError
from vitreous.explanation import Explanation
from vitreous.inputs.model_input import Inputs, Rows
from vitreous.methods import list_methods
from vitreous.methods.linear_parts import missing_linear_part
from vitreous.models import LoadedModel
from vitreous.outputs import Scale
from vitreous.parts import Part, parts_of, scores_of
from vitreous.pixels import Images, Model, find_model, find_pixels
from vitreous.precision import running_in
from vitreous.provenance import collect_provenance
from vitreous.spelling import Recipe, parse
from vitreous.tape import Gradients, Layout, Needs, Pass, Plan, Tape, record, unite
from vitreous.tape.relevance_listener import NOT_FOLLOWED
from vitreous.tape.rulebook import RULES
from vitreous.tape.runner import ModelRunner
from vitreous.targets import Target, Targets, find_targets
from vitreous.torch_state import leaves_torch_as_it_was

Found = TypeVar("Found")


class Answer(NamedTuple):
    """What all methods say of one batch.

    Attributes:
        logits: what the model says, (batch, classes).
        targets: the classes that were explained.
        layout: patch grid and prefix tokens.
        scores: by spelling, (batch, k, patches), or (batch, patches) where one class per image was asked for.
        family: the model's class.
        scale: what its outputs are, where its configuration says so.
    """

    logits: Tensor
    targets: Targets
    layout: Layout
    scores: dict[str, Tensor]
    family: str
    scale: Scale | None

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
    precision: str = "model",
    compile: bool = False,  # noqa: A002 - what torch calls it
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
            several per image ``(batch, k)``.
        topk: instead of ``target``, the k most likely classes of each image.
        precision: ``bf16`` runs the model's matrix products in bfloat16, for methods whose maps survive that; others
            are refused.
        compile: ask a compiled model where methods ask it again (perturbation); what is recorded runs as it is.

    Returns:
        Raw signed scores of every patch for every method, (batch, patches) or (batch, k, patches).
    """
    recipes = find_recipes(DEFAULT_METHODS if methods is None else methods)
    loaded = find_model(model, images)
    network = network_of(loaded)
    pixels, pictures = find_pixels(loaded, network, images)

    def choose(logits: Tensor) -> Targets:
        return find_targets(logits, target, topk)

    def ask(asked: list[Recipe]) -> Answer:
        with running_in(precision, pixels.device, asked):
            black = black_pixel(loaded, pixels)
            return run_in_evaluation(
                network,
                lambda one: answer_with(one, pixels, asked, choose, black, compiled(one) if compile else None),
            )

    recipes, answer = ask_allowed(ask, recipes, optional=methods is None)
    provenance = _provenance(loaded, network, recipes, answer.family)
    return _explanation(loaded, pixels, recipes, answer, images=pictures, provenance=provenance)


@leaves_torch_as_it_was
def explain_again(model: LoadedModel, images: Tensor, methods: Sequence[str], target: Target) -> Explanation:
    """Explain preprocessed images as ``explain`` does, without provenance.

    For who explains one model in many batches and keeps by itself which model that is: to say it takes a hash of all
    weights, for every batch where they were changed or put into another model.
    """
    recipes, network = find_recipes(methods), network_of(model)
    pixels, _ = find_pixels(model, network, images)

    def choose(logits: Tensor) -> Targets:
        return find_targets(logits, target, None)

    black = black_pixel(model, pixels)
    answer = run_in_evaluation(network, lambda one: answer_with(one, pixels, recipes, choose, black))
    return _explanation(model, pixels, recipes, answer)


def _explanation(
    loaded: LoadedModel | nn.Module, pixels: Tensor, recipes: list[Recipe], answer: Answer, **known: Any
) -> Explanation:
    """Put together what was found; ``known`` are fields that only some callers know."""
    return Explanation(
        scores=answer.scores,
        grid=answer.layout.grid,
        target=answer.target,
        logits=answer.logits,
        image_size=(pixels.shape[-2], pixels.shape[-1]),
        signed={recipe.spelling: recipe.signed for recipe in recipes},
        class_names=loaded.class_names if isinstance(loaded, LoadedModel) else None,
        preprocessing=loaded.preprocessing if isinstance(loaded, LoadedModel) else None,
        scale=answer.scale,
        geometry=answer.layout.geometry,
        **known,
    )


def ask_allowed(
    ask: Callable[[list[Recipe]], Found], recipes: list[Recipe], *, optional: bool
) -> tuple[list[Recipe], Found]:
    """Ask methods; those that are ``optional`` and that the model does not allow are left out, with a warning.

    Returns:
        The methods that are left, and what was found.

    Raises:
        RefusedMethodsError: none is left, or one was asked for by the caller.
    """
    while True:
        try:
            return recipes, ask(recipes)
        except RefusedMethodsError as error:
            left = [recipe for recipe in recipes if recipe.spelling not in error.reasons]
            if not optional or not left or len(left) == len(recipes):
                raise
            told = "; ".join(f"{name} is left out: {reason}" for name, reason in error.reasons.items())
            warn_caller(f"of the methods that are used where none is asked for, {told}")
            recipes = left


def answer_with(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    choose: Callable[[Tensor], Targets],
    black: Tensor | None = None,
    bare: Callable[..., Any] | None = None,
) -> Answer:
    """Ask all methods of pictures or texts, in one run of the model and one backward pass per rule.

    Args:
        network: the model.
        inputs: what it is given.
        recipes: the methods.
        choose: which classes to explain, given the logits.
        black: what the model gets for a black pixel, where that is known.
        bare: the model in another form, for evaluations of which nothing is recorded.
    """
    architecture = find_architecture(network, inputs)
    needs = {recipe.spelling: recipe.needs(architecture.depth) for recipe in recipes}
    with record(network, architecture, inputs, Plan(architecture.depth, unite(needs.values()))) as tape:
        # Only now: what works on a model shows when it has run, and nothing is promised that would then fail.
        _check_parts(tape, recipes, needs)
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
    return answer_in_portions(network, inputs, recipes, targets, one_by_one, black, bare)


def answer_in_portions(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    targets: Targets,
    portions: Sequence[Rows],
    black: Tensor | None = None,
    bare: Callable[..., Any] | None = None,
) -> Answer:
    """Ask all methods of some of the pictures or texts after the others, and put together what they say."""
    classes, several = targets

    def answer(rows: Rows) -> Answer:
        some = Targets(classes[rows], several)
        return answer_with(network, inputs[rows], recipes, lambda _logits: some, black, bare)

    answers = [answer(rows) for rows in portions]
    return answers[0]._replace(
        logits=torch.cat([part.logits for part in answers]),
        targets=targets,
        scores={name: torch.cat([part.scores[name] for part in answers]) for name in answers[0].scores},
    )


def find_recipes(methods: str | Sequence[str]) -> list[Recipe]:
    """What one or several spellings stand for, each once."""
    given = [methods] if isinstance(methods, str) else methods
    spellings = list(given) if isinstance(given, Iterable) else None
    if spellings is None or not all(isinstance(spelling, str) for spelling in spellings):
        raise MethodError(f"methods must be a spelling or a list of spellings, not {methods!r}")
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


def _check_parts(tape: Tape, recipes: list[Recipe], needs: dict[str, Needs]) -> None:
    """Refuse methods that need a part which the model's blocks do not have, and say which methods do not."""
    missing = {recipe.spelling: _missing_part(tape, needs[recipe.spelling]) for recipe in recipes}
    reasons = {spelling: reason for spelling, reason in missing.items() if reason is not None}
    if reasons:
        refused = next(iter(reasons))
        found = {info.name: _missing_part(tape, parse(info.name).needs(tape.depth)) for info in list_methods()}
        serving = [name for name, reason in found.items() if reason is None]
        # Relevance is followed only in a run that asks for it: about these methods this one says nothing.
        open_ones = [name for name, reason in found.items() if reason == NOT_FOLLOWED]
        untried = f"Methods that were not tried: {', '.join(open_ones)}. " if open_ones else ""
        raise RefusedMethodsError(
            f"{refused} cannot explain {tape.architecture.name}: {reasons[refused]}. {untried}"
            f"Methods that work on it: {', '.join(serving) or 'none'}",
            reasons,
        )


def _missing_part(tape: Tape, needs: Needs) -> str | None:
    if needs.picture and tape.reads_text:
        return "it reads texts, which have no pixels to paint or to scale"
    if needs.reads_blocks_alone and tape.reads_several_blocks:
        return "its head reads several blocks at once, so that what it says of one block's output alone is not defined"
    return (
        _missing_attention(tape, needs)
        or _unclear_attention(tape, needs)
        or tape.gradient_gap(needs)
        or _missing_norm(tape, needs)
        or tape.relevance_gap(needs)
        or missing_linear_part(tape, needs)
    )


def _missing_attention(tape: Tape, needs: Needs) -> str | None:
    architecture, unseen = tape.architecture, tape.unseen_attention
    if needs.uses_attention and not architecture.has_attention:
        return "its blocks do not attend"
    if needs.biases and unseen and not architecture.has_attention:
        return "its blocks do not attend, and biases may act across tokens and belong to none"
    # A rule other than the plain one has to take hold of the attention, also where nothing is read from it.
    takes_hold = needs.uses_attention or needs.rules - {"plain"}
    if takes_hold and unseen and architecture.has_attention:
        return (
            f"no attention was seen in its block {min(unseen)}, neither fused nor written as q kᵀ, softmax, A v, "
            "so A is not known"
        )
    needs_all_keys = any(RULES[name].follows_scores for name in needs.rules)
    if tape.unknown_keys and (needs.keys & tape.unknown_keys or needs_all_keys):
        return (
            "the scores of its attention are made of more than q and k (relative positions that depend on the tokens, "
            "or a step in front of the softmax that is not known), so that q and k by themselves say only a part"
        )
    return None


def _unclear_attention(tape: Tape, needs: Needs) -> str | None:
    """What blocks have besides one attention."""
    other, unknown = tape.other_attention, tape.unknown_products
    if needs.uses_attention and other is not None:
        return other
    if needs.rules - {"plain"} and unknown:
        return (
            f"in its block {min(unknown)} tokens are multiplied with each other, or weighed by a softmax, in a way "
            "that is no attention as it is known, so that a rule does not know what to hold constant"
        )
    return None


def _missing_norm(tape: Tape, needs: Needs) -> str | None:
    if _norms_get_no_gradient(tape, needs):
        return (
            "the norms of its blocks stand behind their attention, and behind the last one only the class token gets a "
            "gradient (convention=skipplus reads the tokens in front of it)"
        )
    for layer in needs.norms:
        if tape.architecture.blocks[layer].first_norm is None or layer in tape.unseen_norms:
            return f"the first norm of block {layer} was not found, or it does not see the tokens as they are"
    for layer in needs.halves:
        block = tape.architecture.blocks[layer]
        if block.first_norm is None or block.second_norm is None:
            return f"the norm between attention and feed-forward part of block {layer} was not found"
    return None


def _norms_get_no_gradient(tape: Tape, needs: Needs) -> bool:
    """Whether gradients are wanted behind the last attention, where no patch reaches the output any more."""
    last = tape.depth - 1
    wanted = any(last in part.norms for part in needs.gradients.values())
    return wanted and tape.layout.reads_prefix_only and tape.architecture.blocks[last].norm_place == "post"


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

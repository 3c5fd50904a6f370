"""Running methods on one batch: one recorded forward pass, and one backward pass per rule, for all of them.

Methods that read only runs of their own (Integrated Gradients, SmoothGrad) need no recorded pass where the class is
given. The logits are then computed when they are first read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from vitreous.api.runs import DeferredLogits, RawResult, RunSettings, find_outputs
from vitreous.architecture import find_architecture
from vitreous.errors import RefusedMethodsError, TargetError, UnsupportedModelError
from vitreous.inputs.model_io import Inputs, OutputActivation, Rows, Texts, in_unit_interval, scale_of
from vitreous.inputs.target import Target
from vitreous.inputs.targets import AnyTarget, TargetObjects, Targets, find_targets
from vitreous.methods import View, list_methods
from vitreous.methods.integrated import InputProcedure
from vitreous.methods.perturbation import Unrecorded
from vitreous.methods.spelling import Recipe, parse
from vitreous.tape import Gradients, Needs, Pass, Plan, Tape, record, unite
from vitreous.tape.diagnosis import missing_part
from vitreous.tape.output import OutputReader, TargetReader
from vitreous.tape.rules.relevance_handler import NOT_FOLLOWED
from vitreous.tape.runner import ModelRunner

_ANY_CLASSES = 2**31 - 1  # as many as no model has


def can_run_unrecorded(network: nn.Module, images: Tensor, recipes: Sequence[Recipe]) -> bool:
    """Whether all methods read only runs that they make themselves, of other pixels, and logits can wait.

    Methods of users are given a recorded run, as they may read it and are checked by it.
    """
    return all(map(_reads_own_runs, recipes)) and can_be_deferred(network, images)


def _reads_own_runs(recipe: Recipe) -> bool:
    if recipe.info.is_own or recipe.propagate is not None:
        return False
    return isinstance(recipe.readout, InputProcedure) and recipe.readout.at == "pixels"


def run_unrecorded(
    network: nn.Module,
    images: Tensor,
    recipes: Sequence[Recipe],
    target: AnyTarget,
    parts: Sequence[slice],
    settings: RunSettings,
) -> RawResult:
    """Run such methods for given classes, one part of the batch after another.

    The logits are computed immediately only if the kind of outputs is not declared and they may be probabilities.

    Raises:
        TargetError: the target is wrong.
        UnsupportedModelError: the model has no gradients where they are needed.
        InputError: the outputs are not of the declared kind.
    """
    # How many classes there are shows in the first run, and is checked then.
    unknown = images.new_empty(1, 1).expand(len(images), _ANY_CLASSES)
    targets = find_targets(unknown, target, None)
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    whole = _runner(network, images, targets.classes, settings)
    output = images[:1, 0, 0]
    for rows in parts:
        runner = _runner(network, images[rows], targets.classes[rows], settings)
        for recipe in recipes:
            scored = [
                _unrecorded_scores(recipe, Unrecorded(runner, target)) for target in targets.classes[rows].unbind(dim=1)
            ]
            output = scored[-1][1]
            maps = [scores for scores, _ in scored]
            found[recipe.spelling].append(torch.stack(maps, dim=1) if targets.several else maps[0])
        whole.note_layout(runner.layout)
    logits, deferred = output.expand(len(images), -1), DeferredLogits(network, whole)
    declared = settings.outputs or whole.scale
    recognising = declared is None and in_unit_interval(logits)
    if recognising:
        logits = deferred.compute()
    return RawResult(
        logits=logits,
        targets=targets,
        layout=whole.layout,
        scores={name: torch.cat(maps) for name, maps in found.items()},
        family=type(network).__name__,
        scale=find_outputs(network, images, logits, declared, settings.reader),
        deferred=None if recognising else deferred,
    )


def _runner(network: nn.Module, images: Tensor, classes: Tensor, settings: RunSettings) -> ModelRunner:
    return ModelRunner(network, images, classes, settings.black, stage=settings.stage, _reader=settings.reader)


def _unrecorded_scores(recipe: Recipe, seen: Unrecorded) -> tuple[Tensor, Tensor]:
    """The scores of a method, and the output of one of its runs."""
    assert isinstance(recipe.readout, InputProcedure)
    with torch.autocast(seen.target.device.type, enabled=False):  # it is for the model's run, not for reading it
        scores = recipe.readout.map(seen)
    assert seen.output is not None
    return scores.to(seen.output.dtype), seen.output


def can_be_deferred(network: nn.Module, images: Tensor) -> bool:
    """Whether it would show that a model or its images were changed in between."""
    return not any(tensor.is_inference() for tensor in (*network.parameters(), *network.buffers(), images))


# Tokens of all images of one recorded run: 16 images of 224 x 224 pixels in patches of 16 x 16. Memory grows with the
# images of a run, time per image no longer falls: see benchmarks/large_batches.py.
TOKENS_AT_ONCE = 16 * 200
_SMALL_PATCH = 8 * 8  # pixels; smaller patches are rare


def run_on_images(
    network: nn.Module,
    images: Tensor,
    recipes: list[Recipe],
    target: AnyTarget | TargetObjects,
    topk: int | None,
    settings: RunSettings,
) -> RawResult:
    """Run all methods on images, as many in one recorded run as bounded memory allows.

    No image's scores depend on the others, so the results are those of one run, up to the rounding of matrix products
    of another size.
    """

    def run(rows: slice, outputs: OutputActivation | None) -> RawResult:
        if isinstance(target, TargetObjects):
            some = TargetObjects(target.rows[rows], target.several)
            return run_target_objects(network, images[rows], recipes, some, replace(settings, outputs=outputs))

        def choose(logits: Tensor) -> Targets:
            if target is None or topk is not None:
                return find_targets(logits, target, topk)
            # Given classes are checked for all images together; only the number of classes is needed for that.
            classes, several = find_targets(logits[:1].expand(len(images), -1), target, None)
            return Targets(classes[rows], several)

        return run_methods(network, images[rows], recipes, choose, replace(settings, outputs=outputs))

    parts = batch_parts(network, images)
    given = None if isinstance(target, TargetObjects) or topk is not None else target
    if given is not None and can_run_unrecorded(network, images, recipes):
        # What is refused here is refused by a recorded run as well, with the reason.
        with suppress(TargetError, UnsupportedModelError):
            return run_unrecorded(network, images, recipes, given, parts, settings)
    results = [run(parts[0], settings.outputs)]
    # All parts are read as the first one's outputs were recognised.
    results += [run(rows, results[0].scale or "logits") for rows in parts[1:]]
    return concatenate_results(results)


def run_target_objects(
    network: nn.Module, inputs: Inputs, recipes: list[Recipe], targets: TargetObjects, settings: RunSettings
) -> RawResult:
    """Run all methods on images or texts for targets that are objects; they are prepared."""
    reader = target_reader(network, inputs, targets, settings)

    def choose(columns: Tensor) -> Targets:
        return Targets(reader.found.numbers_on(columns.device), targets.several)

    return run_methods(network, inputs, recipes, choose, replace(settings, reader=reader))


def target_reader(network: nn.Module, inputs: Inputs, targets: TargetObjects, settings: RunSettings) -> TargetReader:
    """What reads targets of these images or texts of the network's output, of which theirs has to be the first."""
    part = settings.reader.part

    def find_scale(logits: Tensor) -> OutputActivation | None:
        declared = settings.outputs or scale_of(network)
        return find_outputs(network, inputs, logits, declared, OutputReader(part))

    size = (inputs.shape[-2], inputs.shape[-1]) if isinstance(inputs, Tensor) else (0, 0)
    return TargetReader(part, targets.rows, find_scale, size)


def run_methods(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    choose: Callable[[Tensor], Targets],
    settings: RunSettings = RunSettings(),  # noqa: B008 - frozen
) -> RawResult:
    """Run all methods on images or texts, in one forward pass and one backward pass per rule.

    Args:
        network: the model.
        inputs: its input.
        recipes: the methods.
        choose: which classes to explain, given the logits.
        settings: how the model is run.
    """
    architecture = find_architecture(network, inputs, settings.stage)
    needs = {recipe.spelling: recipe.needs(architecture.depth) for recipe in recipes}
    reader = settings.reader
    with record(network, architecture, inputs, Plan(architecture.depth, unite(needs.values())), reader) as tape:
        # Only now: which parts a model has shows in its run, and no method is listed as working that would then fail.
        _refuse_unserved(tape, recipes, needs)
        if isinstance(reader, TargetReader):
            outputs = reader.found.scale if reader.found.classes else "value"
        else:
            outputs = find_outputs(network, inputs, tape.logits, settings.outputs or architecture.scale, reader)
        tape.architecture = architecture = tape.architecture.with_outputs(outputs)
        targets = choose(tape.logits)
        tapes = [tape.for_target(target) for target in targets.classes.unbind(dim=1)]
        if len(inputs) == 1 or all(each.layout.alike for each in (tape, *tapes)):
            runner = ModelRunner(
                network,
                inputs,
                targets.classes,
                settings.black,
                _architecture=tape.architecture,
                _layout=tape.layout,
                _bare=settings.bare,
                _reader=reader,
            )
            scores = _scores(tapes, runner, recipes, needs, targets.classes)
            shaped = {name: maps if targets.several else maps[:, 0] for name, maps in scores.items()}
            result = RawResult(tape.logits, targets, tape.layout, shaped, architecture.name, architecture.scale)
            return _with_objects(result, reader) if isinstance(reader, TargetReader) else result
    # The head reads other tokens of each image, so that no row of a matrix is every image's.
    one_by_one = [slice(image, image + 1) for image in range(len(inputs))]
    return run_in_portions(
        network, inputs, recipes, targets, one_by_one, replace(settings, outputs=outputs or "logits")
    )


def run_in_portions(
    network: nn.Module,
    inputs: Inputs,
    recipes: list[Recipe],
    targets: Targets,
    portions: Sequence[Rows],
    settings: RunSettings,
) -> RawResult:
    """Run all methods on some images or texts after the others, and concatenate the results."""
    classes, several = targets

    def run(rows: Rows) -> RawResult:
        some = Targets(classes[rows], several)
        return run_methods(network, inputs[rows], recipes, lambda _logits: some, settings)

    return concatenate_results([run(rows) for rows in portions])


def _with_objects(result: RawResult, reader: TargetReader) -> RawResult:
    """A result whose logits are class scores alone, with the numbers of its targets."""
    return result._replace(
        logits=result.logits[:, : reader.found.classes],
        objects=reader.found.targets,
        values=result.logits.gather(1, result.targets.classes),
    )


def concatenate_results(results: Sequence[RawResult]) -> RawResult:
    """The results of several batches as those of one."""
    first = results[0]
    if len(results) == 1:
        return first
    objects: dict[Target, int] = {}
    for part in results:
        for target in part.objects:
            objects.setdefault(target, first.logits.shape[1] + len(objects))
    values = [part.values for part in results if part.values is not None]
    return first._replace(
        logits=torch.cat([part.logits for part in results]),
        targets=first.targets._replace(classes=torch.cat([_renumbered(part, objects) for part in results])),
        scores={name: torch.cat([part.scores[name] for part in results]) for name in first.scores},
        objects=tuple(objects),
        values=torch.cat(values) if values else None,
    )


def _renumbered(part: RawResult, objects: Mapping[Target, int]) -> Tensor:
    """The targets of a part of a batch, by the numbers that objects have in the whole batch."""
    classes = part.targets.classes
    if not part.objects:
        return classes
    table = torch.tensor([*range(part.logits.shape[1]), *(objects[target] for target in part.objects)])
    return table.to(classes.device)[classes]


def batch_parts(network: nn.Module, images: Tensor) -> list[slice]:
    """Divide a batch into parts of nearly equal size, each small enough for one recorded run."""
    count = len(images)
    if images.dim() == 4 and count * images[0, 0].numel() <= TOKENS_AT_ONCE * _SMALL_PATCH:
        return [slice(0, count)]
    tokens = max(stage.tokens for stage in find_architecture(network, images).stages)
    parts = -(-count // max(1, TOKENS_AT_ONCE // tokens))
    bounds = [count * part // parts for part in range(parts + 1)]
    return [slice(start, end) for start, end in pairwise(bounds)]


def _refuse_unserved(tape: Tape, recipes: list[Recipe], needs: dict[str, Needs]) -> None:
    """Refuse methods that need a part which the model's blocks do not have, and say which methods do not."""
    missing = {recipe.spelling: missing_part(tape, needs[recipe.spelling]) for recipe in recipes}
    reasons = {spelling: reason for spelling, reason in missing.items() if reason is not None}
    if reasons:
        refused = next(iter(reasons))
        found = {info.name: missing_part(tape, parse(info.name).needs(tape.depth)) for info in list_methods()}
        serving = [name for name, reason in found.items() if reason is None]
        # Relevance is recorded only where a method needs it: whether these methods work is not known from this run.
        open_ones = [name for name, reason in found.items() if reason == NOT_FOLLOWED]
        untried = f"Methods that were not tried: {', '.join(open_ones)}. " if open_ones else ""
        raise RefusedMethodsError(
            f"{refused} cannot explain {tape.architecture.name}: {reasons[refused]}. {untried}"
            f"Methods that work on it: {', '.join(serving) or 'none'}",
            reasons,
        )


def _scores(
    tapes: Sequence[Tape], runner: ModelRunner, recipes: list[Recipe], needs: dict[str, Needs], targets: Tensor
) -> dict[str, Tensor]:
    """Scores (batch, k, patches) of every method, one backward pass per rule, objective and target.

    ``tapes`` are the same run as it is read for each target.
    """
    found: dict[str, list[Tensor]] = {recipe.spelling: [] for recipe in recipes}
    read_alike = all(tape is tapes[0] for tape in tapes)
    groups = unpadded_groups(tapes[0], runner)
    for number, (tape, target) in enumerate(zip(tapes, targets.unbind(dim=1), strict=True)):
        if not read_alike:
            groups = unpadded_groups(tape, runner)
        # A method whose map does not depend on the class runs once, unless targets read tokens of their own.
        chosen = [recipe for recipe in recipes if number == 0 or not read_alike or recipe.info.class_specific]
        for spelling, scores in _scores_of_one_target(tape, groups, chosen, needs, target):
            found[spelling].append(scores)
    count = targets.shape[1]
    return {
        name: torch.stack(maps, dim=1) if len(maps) == count else maps[0][:, None].expand(-1, count, -1).clone()
        for name, maps in found.items()
    }


def _scores_of_one_target(
    tape: Tape, groups: list[UnpaddedGroup], recipes: list[Recipe], needs: dict[str, Needs], target: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Run every method as soon as its backward passes are done, and drop gradients that no other method needs."""
    waiting = {recipe.spelling: recipe for recipe in recipes}
    gradients: dict[Pass, Gradients] = {}
    passes = unite(needs[spelling] for spelling in waiting).gradients
    for backward in (None, *passes):
        if backward is not None:
            gradients[backward] = tape.backward(backward, target, passes[backward])
        ready = [spelling for spelling in waiting if needs[spelling].gradients.keys() <= gradients.keys()]
        # A caller's autocast is for the model's run, not for reading it.
        with torch.autocast(target.device.type, enabled=False):
            views = [(group, group.view(gradients, target)) for group in groups] if ready else []
            patches = tape.layout.patches
            scores = {spelling: scores_of(waiting.pop(spelling), views, len(target), patches) for spelling in ready}
        yield from scores.items()
        awaited = {each for spelling in waiting for each in needs[spelling].gradients}
        gradients = {each: found for each, found in gradients.items() if each in awaited}


# Padding --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnpaddedGroup:
    """The texts of a batch that have one length, without their padding; or all images.

    No token attends to padding, so the model's numbers do not depend on it; but a mean over tokens, a softmax over them
    or a rollout would. So every method reads texts as if they had been run without padding.

    Attributes:
        rows: which rows of the batch; ``None`` for all of them.
        tape: their run.
        runner: the model with their input.
    """

    rows: Tensor | None
    tape: Tape
    runner: ModelRunner

    def view(self, gradients: Mapping[Pass, Gradients], target: Tensor) -> View:
        """What a method sees of them; gradients and target are those of the whole batch."""
        if self.rows is None:
            return View(self.tape, gradients, target, self.runner)
        cut = {backward: found.cut(self.rows, self.tape.layout.tokens) for backward, found in gradients.items()}
        return View(self.tape, cut, target[self.rows], self.runner)


def unpadded_groups(tape: Tape, runner: ModelRunner) -> list[UnpaddedGroup]:
    """All rows of a batch, in as few groups as have no padding inside."""
    texts = runner.inputs
    if not isinstance(texts, Texts) or bool((texts.lengths == texts.tokens).all()):
        return [UnpaddedGroup(None, tape, runner)]
    return [UnpaddedGroup(rows, tape.cut(rows, length), runner.cut(rows, length)) for length, rows in texts.by_length()]


def scores_of(recipe: Recipe, views: Iterable[tuple[UnpaddedGroup, View]], batch: int, patches: int) -> Tensor:
    """Scores of a method, (batch, patches), or of all pixels; 0 for padding."""
    whole: Tensor | None = None
    for group, view in views:
        scores = recipe.scores(view)
        if group.rows is None:
            return scores
        if whole is None:
            whole = scores.new_zeros(batch, patches)
        whole[group.rows, : scores.shape[1]] = scores
    assert whole is not None
    return whole

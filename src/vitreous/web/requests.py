"""What a user requests, checked against limits; and how methods are run for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vitreous.api.runs import try_methods
from vitreous.errors import MethodError, TargetError, VitreousError
from vitreous.methods.spelling import EXAMPLE_DEPTH, Plus, Recipe, parse
from vitreous.pictures.strips import depth_spellings, start_layer_spellings
from vitreous.targets import Contrast
from vitreous.web.jobs import BudgetError, CancelledError, Job
from vitreous.web.results import ResultCache, TargetKey

MAX_METHODS = 12
MAX_CLASSES = 4
_OPTION_FRACTION = 10  # the page allows a tenth of the largest value that an option may have
_BACKWARD_COST = 3  # a forward and a backward pass together, in forward passes
_COST_OPTIONS = ("points", "steps", "samples", "budget")  # options that set the number of forward passes
RunMethods = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class ExplainRequest:
    """Methods, targets and depth to explain.

    Attributes:
        methods: Method spellings.
        targets: Class indices, contrasts, prompts, other images; empty for the most probable classes.
        depth: How many blocks are aggregated; ``None`` for the methods as spelled.
        likely: How many of the most probable classes are explained where ``targets`` is empty.
    """

    methods: tuple[str, ...]
    targets: tuple[TargetKey, ...] = ()
    depth: int | None = None
    likely: int = 1

    def __post_init__(self) -> None:
        if not self.methods:
            raise MethodError("Choose at least one method.")
        if len(self.methods) > MAX_METHODS:
            raise MethodError(f"At most {MAX_METHODS} methods are shown at once.")
        if len(self.targets) > MAX_CLASSES:
            raise TargetError(f"At most {MAX_CLASSES} questions are answered at once.")
        for method in self.methods:
            _check_options(parse(method))

    def targets_for(self, results: ResultCache[Any]) -> tuple[TargetKey, ...]:
        """Return the targets to explain.

        Raises:
            TargetError: the model does not have one of the classes.
        """
        assert results.sample is not None
        if not self.targets:
            return tuple(one.class_index for one in results.sample.top(self.likely))
        count = results.sample.logits.shape[1]
        numbers = [one for target in self.targets for one in classes_in(target)]
        if any(not 0 <= one < count for one in numbers):
            raise TargetError(f"This model has {count} classes, numbered from 0.")
        return tuple(dict.fromkeys(self.targets))

    def methods_for(self, depth: int) -> list[str]:
        """Return the spellings to show for a model of ``depth`` blocks, at the requested depth."""
        if self.depth is None:
            return list(self.methods)
        return [at_depth(method, self.depth, depth) or method for method in self.methods]


def classes_in(target: TargetKey) -> tuple[int, ...]:
    """Return the classes that a target names."""
    if isinstance(target, int):
        return (target,)
    if isinstance(target, Contrast):
        return tuple(one for one in (target.index, target.other) if isinstance(one, int))
    return ()


def at_depth(method: str, count: int, depth: int) -> str | None:
    """Return the spelling of a method that aggregates ``count`` of a model's ``depth`` blocks.

    Rollouts multiply the lowest blocks, gradtoken propagates its map through them, sums add the uppermost ones. At
    full depth the spelling is unchanged.

    Returns:
        ``None`` where the method does not aggregate blocks.
    """
    if count >= depth:
        return method
    if isinstance(parse(method).aggregation, Plus):
        return start_layer_spellings(method, depth)[depth - max(1, count)]
    try:
        spellings = depth_spellings(method, depth)
    except MethodError:
        return None
    return spellings.get(count, method)


def all_depths(method: str, depth: int) -> list[str]:
    """Return the spellings of a method for every position of the depth slider."""
    found = (at_depth(method, count, depth) for count in range(1, depth + 1))
    return list(dict.fromkeys(spelling for spelling in found if spelling is not None))


def _check_options(recipe: Recipe) -> None:
    """Refuse option values that would block the server, before the model runs.

    Raises:
        MethodError: there is one.
    """
    items = (item.partition("=") for item in recipe.spelling.partition(":")[2].split(",") if item)
    for name, text in {name.strip(): value.strip() for name, _, value in items}.items():
        option = recipe.info.options.get(name)
        if option is None or option.most is None:
            continue
        most = max(option.most // _OPTION_FRACTION, option.default or 0)
        if option.convert(name, text) > most:
            raise MethodError(f"{recipe.spelling!r}: {name}={text} is more than {most:,}, the limit of this page")


def expected_inputs(method: str, classes: int, grid: tuple[int, ...] | None = None) -> int:
    """Return how many inputs the model processes for a method on a grid of patches; 0 where that is not known.

    Methods that need gradients run the model for every class, others once for all classes.
    """
    recipe = parse(method)
    evaluations = recipe.readout.evaluations_on(grid)
    if not evaluations:
        return 0
    return evaluations * classes if recipe.needs(EXAMPLE_DEPTH).gradients_again else evaluations


def forward_passes(method: str, classes: int) -> int:
    """Return the cost of a method in forward passes; 0 where its options do not tell."""
    inputs = expected_inputs(method, classes)
    return inputs * _BACKWARD_COST if inputs and parse(method).needs(EXAMPLE_DEPTH).gradients_again else inputs


def expect_cost(job: Job, methods: Sequence[str], classes: int) -> None:
    """Declare the cost of methods to a job.

    Raises:
        BudgetError: they would exceed the time limit.
    """
    costs = {method: forward_passes(method, classes) for method in methods if not is_single_pass(method)}
    slowest = max(costs, key=costs.__getitem__, default=None)
    if slowest is None:
        return
    option = next((name for name in _COST_OPTIONS if name in parse(slowest).info.options), None)
    advice = f"leave out {slowest}" if option is None else f"lower {option} of {slowest}"
    job.expect(sum(costs.values()), f"{advice} or choose fewer classes." if classes > 1 else f"{advice}.")


def is_single_pass(method: str) -> bool:
    """Whether a method reads one recorded run, rather than running the model many times."""
    return not parse(method).readout.runs_again


def group_methods(methods: Sequence[str]) -> Iterator[list[str]]:
    """Group the methods that share one run; each of the others runs the model by itself."""
    together = [method for method in methods if is_single_pass(method)]
    if together:
        yield together
    yield from ([method] for method in methods if method not in together)


def compute(
    results: ResultCache[Any],
    methods: Sequence[str],
    run: RunMethods,
    job: Job,
    *,
    classes: int,
    subject: str,
    kind: str = "class",
) -> None:
    """Run methods group by group and record which fail.

    Args:
        results: Where failures are recorded.
        methods: Spellings.
        run: Runs some methods and stores their scores.
        job: Progress and limits.
        classes: How many targets are explained.
        subject: What is explained, for the progress display.
        kind: The kind of target.
    """
    expect_cost(job, methods, classes)
    for group in group_methods(methods):
        _start_group(job, group, classes, subject, results.grid)
        run_methods(results, group, run, job, kind)


def compute_first(
    results: ResultCache[Any], methods: Sequence[str], run: RunMethods, job: Job, *, classes: int, subject: str
) -> None:
    """Run groups of methods until one of them works and gives the prediction.

    Raises:
        VitreousError: all methods fail; the first reason.
    """
    expect_cost(job, methods, classes)
    errors: list[VitreousError] = []
    for group in group_methods(methods):
        _start_group(job, group, classes, subject, results.grid)
        errors += run_methods(results, group, run, job)
        if results.sample is not None or not errors:
            return
    raise errors[0]


def run_methods(
    results: ResultCache[Any], methods: Sequence[str], run: RunMethods, job: Job, kind: str = "class"
) -> list[VitreousError]:
    """Run methods together; one that fails does not affect the others.

    Returns:
        The errors of those that failed.
    """

    def attempt(some: list[str]) -> None:
        job.check()
        job.measures_speed = not all(is_single_pass(method) for method in some)
        run(some)

    trials = try_methods(attempt, methods, lambda error: not isinstance(error, CancelledError | BudgetError))
    results.failed |= {(method, kind): reason for method, reason in trials.reasons.items()}
    return list(trials.errors.values())


def _start_group(job: Job, group: Sequence[str], classes: int, subject: str, grid: tuple[int, ...] | None) -> None:
    total = sum(expected_inputs(method, classes, grid) for method in group)
    job.start_stage(f"explaining {subject}" if len(group) > 1 else f"running {group[0]}", total or None)

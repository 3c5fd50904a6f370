"""What visitors want to see, within bounds, and how methods are asked for it: together, and none fails another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vitreous.cost import EXAMPLE_DEPTH
from vitreous.errors import MethodError, TargetError, VitreousError
from vitreous.method_trials import try_methods
from vitreous.spelling import Recipe, parse
from vitreous.web.findings import Findings
from vitreous.web.jobs import BudgetError, CancelledError, Job

MOST_METHODS = 12
MOST_CLASSES = 4
_PART_OF_LARGEST = 10  # the page takes a tenth of the largest value that an option may have
_WITH_GRADIENTS = 3  # forward passes that a forward and a backward pass take together
_COUNTS = ("points", "steps", "samples", "budget")  # the options that say how often the model is asked
Ask = Callable[[Sequence[str]], None]


@dataclass(frozen=True)
class Wanted:
    """What a visitor wants to see of a photo or text.

    Attributes:
        methods: Spellings.
        classes: Numbers of classes; none stands for the predicted one.
        depth: How many blocks are aggregated; ``None`` for the methods as they are spelled.
    """

    methods: tuple[str, ...]
    classes: tuple[int, ...] = ()
    depth: int | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise MethodError("Choose at least one method.")
        if len(self.methods) > MOST_METHODS:
            raise MethodError(f"No more than {MOST_METHODS} methods are shown at once.")
        if len(self.classes) > MOST_CLASSES:
            raise TargetError(f"No more than {MOST_CLASSES} classes are explained at once.")
        for method in self.methods:
            _check_costs(parse(method))


def _check_costs(recipe: Recipe) -> None:
    """Refuse values that would keep everybody waiting, before the model is asked anything.

    Raises:
        MethodError: there is one.
    """
    for name, text in _options(recipe.spelling).items():
        option = recipe.info.options.get(name)
        if option is None or option.most is None:
            continue
        most = max(option.most // _PART_OF_LARGEST, option.default or 0)
        if option.convert(name, text) > most:
            raise MethodError(
                f"{recipe.spelling!r}: {name}={text} is more than {most:,}, the most that this page takes"
            )


def _options(spelling: str) -> dict[str, str]:
    """Give the options of a spelling that can be read."""
    items = (item.partition("=") for item in spelling.partition(":")[2].split(",") if item)
    return {name.strip(): value.strip() for name, _, value in items}


def forward_passes(method: str, classes: int) -> float:
    """Give how many forward passes a method takes as long as; 0 where its options do not tell.

    Methods that need gradients run the model for every class, others once for all of them.
    """
    recipe = parse(method)
    evaluations = recipe.readout.evaluations or 0
    if not recipe.needs(EXAMPLE_DEPTH).gradients_again:
        return evaluations
    return evaluations * classes * _WITH_GRADIENTS


def expect(job: Job, methods: Sequence[str], classes: int) -> None:
    """Tell a job what lies ahead of it.

    Raises:
        BudgetError: that would take longer than a request may.
    """
    ahead = {method: forward_passes(method, classes) for method in methods if not is_quick(method)}
    slowest = max(ahead, key=ahead.__getitem__, default=None)
    if slowest is None:
        return
    lower = next((name for name in _COUNTS if name in parse(slowest).info.options), None)
    advice = f"leave out {slowest}" if lower is None else f"lower {lower} of {slowest}"
    job.expect(sum(ahead.values()), f"{advice} or choose fewer classes." if classes > 1 else f"{advice}.")


def classes_of(wanted: Wanted, record: Findings[Any]) -> tuple[int, ...]:
    """Give the classes that are explained."""
    return wanted.classes or (record.predicted,)


def check_classes(classes: Sequence[int], record: Findings[Any]) -> None:
    """Refuse classes that the model does not have.

    Raises:
        TargetError: there is one.
    """
    assert record.sample is not None
    count = record.sample.logits.shape[1]
    if any(not 0 <= one < count for one in classes):
        raise TargetError(f"This model has {count} classes, numbered from 0.")


def is_quick(method: str) -> bool:
    """Whether a method reads the recorded run, and does not run the model again and again."""
    return not parse(method).readout.runs_again


def groups(methods: Sequence[str]) -> Iterator[list[str]]:
    """Put methods that read one run together; others run the model by themselves."""
    together = [method for method in methods if is_quick(method)]
    if together:
        yield together
    yield from ([method] for method in methods if method not in together)


def begin(record: Findings[Any], wanted: Wanted, ask: Ask, job: Job) -> None:
    """Ask until a method tells what the model says: those that are quick together, and if all fail, the others.

    Raises:
        VitreousError: no method does; it is the first reason.
    """
    errors: list[VitreousError] = []
    for group in groups(wanted.methods):
        errors += make(record, group, ask, job)
        if record.sample is not None or not errors:
            return
    raise errors[0]


def make(record: Findings[Any], methods: Sequence[str], ask: Ask, job: Job) -> list[VitreousError]:
    """Ask methods together, as far as they work; one that fails does not take the others with it.

    Returns:
        Why some do not work.
    """

    def run(some: list[str]) -> None:
        job.check()
        job.runs_again = not all(is_quick(method) for method in some)
        ask(some)

    trials = try_methods(run, methods, lambda error: not isinstance(error, CancelledError | BudgetError))
    record.failed |= trials.reasons
    return list(trials.errors.values())

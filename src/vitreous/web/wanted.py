"""What visitors want to see, within bounds, and how methods are asked for it: together, and none fails another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vitreous.errors import MethodError, TargetError, VitreousError
from vitreous.method_trials import try_methods
from vitreous.spelling import parse
from vitreous.web.findings import Findings
from vitreous.web.jobs import CancelledError, Job

MOST_METHODS = 12
MOST_CLASSES = 4
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
            parse(method)


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
        ask(some)

    trials = try_methods(run, methods, lambda error: not isinstance(error, CancelledError))
    record.failed |= trials.reasons
    return list(trials.errors.values())

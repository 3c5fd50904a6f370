"""Running several methods on a model that may not serve all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vitreous.errors import MethodError, RefusedMethodsError, UnsupportedModelError, VitreousError

Result = TypeVar("Result")


@dataclass(frozen=True)
class Trials(Generic[Result]):
    """What came of running methods.

    Attributes:
        served: the methods that work, in order.
        results: what the runs gave: one result for all methods, or one for each where they had to run one by one.
        errors: by method, why it does not work.
    """

    served: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    errors: dict[str, VitreousError] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, str]:
        """By method, why it does not work, in words."""
        return {method: refusal_reason(error, method) for method, error in self.errors.items()}


def is_refusal(error: VitreousError) -> bool:
    """Whether an error is about the model's parts or a method, so that other methods may still work."""
    return isinstance(error, UnsupportedModelError | MethodError)


def try_methods(
    run: Callable[[list[str]], Result],
    methods: Sequence[str],
    refuses: Callable[[VitreousError], bool] = is_refusal,
) -> Trials[Result]:
    """Run methods together; without those that are refused, again; one by one where no error says which.

    Args:
        run: runs some of the methods together.
        methods: spellings.
        refuses: whether an error is one of the methods'; others are raised.
    """
    left, errors = list(methods), dict[str, VitreousError]()
    while left:
        try:
            return Trials(left, [run(left)], errors)
        except VitreousError as error:
            if not refuses(error):
                raise
            named = error.reasons.keys() & left if isinstance(error, RefusedMethodsError) else set()
            if not named and len(left) > 1:
                alone = [try_methods(run, [method], refuses) for method in left]
                return Trials(
                    [method for trial in alone for method in trial.served],
                    [result for trial in alone for result in trial.results],
                    errors | {method: each for trial in alone for method, each in trial.errors.items()},
                )
            errors |= dict.fromkeys((method for method in left if not named or method in named), error)
            left = [method for method in left if named and method not in named]
    return Trials(errors=errors)


def refusal_reason(error: VitreousError, method: str | None = None) -> str:
    """Why a method, or any of several, does not work; the message of a refusal also lists methods that do."""
    if not isinstance(error, RefusedMethodsError):
        return str(error)
    if method is not None and method in error.reasons:
        return error.reasons[method]
    return "; ".join(dict.fromkeys(error.reasons.values()))

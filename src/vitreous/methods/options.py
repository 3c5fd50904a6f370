"""Options of methods and aggregations, declared as annotated keyword arguments and parsed from text."""

from __future__ import annotations

import inspect
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vitreous._utils.messages import close_match
from vitreous.errors import MethodError
from vitreous.methods.readout import RuleName
from vitreous.tape.rules import own_rules

_LARGEST = 2**63  # torch takes 64-bit integers as seeds and counts


class AlsoOwnRules:
    """Annotation: registered user rules are valid values, too."""


# The rule option, for methods that read the attention's gradient and for those that read the stream's.
RuleOption = Annotated[RuleName, "how the backward pass treats attention, norms and activations", AlsoOwnRules()]
StreamRuleOption = Annotated[
    Literal["plain", "frozen", "libra", "attnlrp", "conservative"],
    "how the backward pass treats attention, norms and activations; under residual no gradient would reach the patches",
    AlsoOwnRules(),
]


@dataclass(frozen=True)
class AtMost:
    """Annotation: the largest value of an option that determines the cost of a method.

    Attributes:
        value: the bound, far above practical values and still feasible.
    """

    value: int


MOST_EVALUATIONS = AtMost(100_000)  # forward passes for one image


@dataclass(frozen=True)
class OptionInfo:
    """One option: its default, its choices (``None``: any value of ``kind``) and a line of help.

    Attributes:
        own_rules: whether registered user rules are valid values, too.
        most: the largest value, if the option determines the cost of the method.
    """

    default: Any
    choices: tuple[str, ...] | None
    help: str
    kind: type
    most: int | None = None
    own_rules: bool = False

    def convert(self, name: str, text: str) -> Any:
        """Parse a value from text."""
        if self.choices is not None:
            choices = (*self.choices, *own_rules()) if self.own_rules else self.choices
            if text not in choices:
                reason = f" ({self.help})" if self.help else ""
                raise MethodError(
                    f"{name}={text} is not one of {', '.join(choices)}{close_match(text, choices)}{reason}"
                )
            return text
        try:
            value = self.kind(text)
        except ValueError:
            raise MethodError(f"{name}={text} is not {'a whole number' if self.kind is int else 'a number'}") from None
        # No option needs infinity: a large number has the same effect.
        if isinstance(value, float) and not math.isfinite(value):
            raise MethodError(f"{name}={text} is not a finite number")
        if isinstance(value, int) and not -_LARGEST <= value < _LARGEST:
            raise MethodError(f"{name}={text} is out of range: whole numbers have 64 bits")
        if self.most is not None and value > self.most:
            raise MethodError(f"{name}={text} is more than {self.most:,}, the most that {name} may be")
        return value


def options_of(function: Callable[..., Any]) -> Mapping[str, OptionInfo]:
    """Return the options declared by the keyword arguments of a function."""
    hints = get_type_hints(function.__init__ if inspect.isclass(function) else function, include_extras=True)
    parameters = inspect.signature(function).parameters
    return {name: _option(hints[name], parameter.default) for name, parameter in parameters.items()}


def _option(hint: Any, default: Any) -> OptionInfo:
    explanation, most, also_own = "", None, False
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        explanation = next((note for note in notes if isinstance(note, str)), "")
        most = next((note.value for note in notes if isinstance(note, AtMost)), None)
        also_own = any(isinstance(note, AlsoOwnRules) for note in notes)
    if get_origin(hint) is Literal:
        return OptionInfo(default, get_args(hint), explanation, str, own_rules=also_own)
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
    return OptionInfo(default, None, explanation, hint, most)

"""Rules: how the backward pass treats attention, normalisation, activations and products; all of them, by name."""

from __future__ import annotations

import re
from typing import TypeVar, get_args, get_type_hints

from vitreous._utils.messages import close_match
from vitreous.errors import MethodError
from vitreous.tape.rules.abslrp import AbsoluteLrpRule, ProgramAbsoluteLrpRule
from vitreous.tape.rules.gradient_rules import (
    AttnLrpRule,
    ConservativeRule,
    FrozenRule,
    LibraRule,
    ResidualRule,
    Rule,
)
from vitreous.tape.rules.lrp import Inside, LrpRule, OriginalLrpRule, RelevanceRule, gamma_rule

__all__ = [
    "RULES",
    "AbsoluteLrpRule",
    "AttnLrpRule",
    "ConservativeRule",
    "FrozenRule",
    "LibraRule",
    "LrpRule",
    "OriginalLrpRule",
    "ProgramAbsoluteLrpRule",
    "RelevanceRule",
    "ResidualRule",
    "Rule",
    "add_gamma_rule",
    "own_rules",
    "register",
]

RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        *(Rule(), FrozenRule(), LibraRule(), AttnLrpRule(), ConservativeRule(), ResidualRule()),
        *(LrpRule(), OriginalLrpRule(), AbsoluteLrpRule(), ProgramAbsoluteLrpRule()),
    )
}
_BUILT_IN = set(RULES)
_NAME = re.compile(r"[a-z][a-z0-9_]*")

AnyRule = TypeVar("AnyRule", bound=type[Rule])


def register(rule: AnyRule) -> AnyRule:
    """Make a class a rule that methods can be used with, ``ixg:rule=NAME``; a decorator.

    Registered again, as when a plugin is run again, it replaces the earlier class of its name.

    Raises:
        MethodError: its name is missing, badly written or taken, or an attribute has a value that does not exist.
    """
    if not (isinstance(rule, type) and issubclass(rule, Rule)):
        raise MethodError("a rule is a class that inherits from vitreous.rules.Rule")
    name = vars(rule).get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise MethodError(f"the rule {rule.__name__}: set name to lower-case letters, digits and _, as name = 'mine'")
    if name in _BUILT_IN:
        raise MethodError(f"there is a rule {name!r} already: give {rule.__name__} another name")
    for attribute, hint in get_type_hints(Rule).items():
        allowed = get_args(get_args(hint)[0])
        value = getattr(rule, attribute)
        if allowed and value not in allowed:
            raise MethodError(
                f"the rule {name!r}: {attribute} {value!r} is not one of {', '.join(allowed)}"
                f"{close_match(str(value), allowed)}"
            )
    RULES[name] = rule()
    return rule


def own_rules(*, relevance: bool = False) -> tuple[str, ...]:
    """The names of registered rules that are not built in, of those with gradients or of those with relevance."""
    return tuple(name for name, rule in RULES.items() if name not in _BUILT_IN and rule.carries_relevance == relevance)


def add_gamma_rule(linear: float, convolution: float, inside: Inside) -> str:
    """Add the rule of one setting of AttnLRP with gamma, unless it is known, and return its name."""
    rule = gamma_rule(linear, convolution, inside)
    RULES.setdefault(rule.name, rule)
    _BUILT_IN.add(rule.name)
    return rule.name

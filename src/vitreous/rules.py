"""Rules of the backward pass; see docs/own-rule.md for writing your own.

A rule is a class. Once registered, it is used as ``ixg:rule=NAME``.

Examples:
    >>> import vitreous
    >>> from vitreous.rules import Rule, register
    >>> @register
    ... class ConstantAttention(Rule):
    ...     name = "constant_attention"
    ...     softmax = "constant"
    >>> vitreous.explain(model, "demo.jpg", "ixg:rule=constant_attention").methods
    ('ixg:rule=constant_attention',)
"""

from vitreous.tape.attention import AttentionRecord, plain_gradients, value_gradient
from vitreous.tape.rules import (
    RULES,
    AttnLrpRule,
    ConservativeRule,
    FrozenRule,
    LibraRule,
    LrpRule,
    RelevanceRule,
    ResidualRule,
    Rule,
    register,
)
from vitreous.tape.rules.gradient_rules import ElementwiseCall, NormCall

__all__ = [
    "RULES",
    "AttentionRecord",
    "AttnLrpRule",
    "ConservativeRule",
    "ElementwiseCall",
    "FrozenRule",
    "LibraRule",
    "LrpRule",
    "NormCall",
    "RelevanceRule",
    "ResidualRule",
    "Rule",
    "plain_gradients",
    "register",
    "value_gradient",
]
